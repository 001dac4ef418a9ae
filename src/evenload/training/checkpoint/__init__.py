"""Checkpoints: what a job's state is, and how it lies on disk."""
