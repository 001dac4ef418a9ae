"""For users' tests and ours: real ranks in real processes, and the faults that happen to them."""

from evenload.testing.ranks import run_ranks

__all__ = ["run_ranks"]
