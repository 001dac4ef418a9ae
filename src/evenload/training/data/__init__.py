"""Split the batches of the user's DataLoader over the ranks, exactly and whatever the shares."""
