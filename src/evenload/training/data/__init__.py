"""From the user's DataLoader to each rank's samples of a global batch, exact whatever the split."""
