"""Slurm's fixtures for these tests."""

from __future__ import annotations

from tests.scheduler.backends.slurm_cluster import slurm, slurm_session

__all__ = ["slurm", "slurm_session"]
