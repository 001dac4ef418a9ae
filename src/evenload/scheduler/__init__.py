"""Many jobs: which of them runs on which devices, now. No torch, and nothing of a training process."""
