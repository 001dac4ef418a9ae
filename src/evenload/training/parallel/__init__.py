"""Strategies: how models are spread over ranks, one file each."""
