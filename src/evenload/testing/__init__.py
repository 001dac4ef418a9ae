"""Tools for tests: real ranks in real processes, faults, and machines on a test network."""

from evenload.testing.ranks import run_ranks

__all__ = ["run_ranks"]
