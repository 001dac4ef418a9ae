"""Checkpoints: the registered state of a job, and its format on disk."""
