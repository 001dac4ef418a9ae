"""Contention of the replicas of one process: they share an interpreter, and often cores and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

TURNS = 2
"""Steps in turns: the first may warm caches for the second, and of two times the shorter one counts; of more the median."""


@dataclass(frozen=True)
class ReplicaObservation:
    """Times of each replica in one step; zeros for one without samples."""

    step: int
    shares: tuple[int, ...]
    num_micro: int
    own_s: tuple[float, ...]
    """Own seconds of forward and backward, without waiting in BatchNorm or for a turn."""
    cpu_s: tuple[float, ...]
    """Seconds in which the replica's thread was on a processor, or ready for one."""
    together_s: float
    """From the first beginning to the last end, the sums of gradients included."""
    in_turns: bool
    left_out: bool = False
    """The step doesn't represent the next ones."""
    step_s: float | None = None
    """Seconds of the whole step, the optimizer included; None if unknown."""


@dataclass(frozen=True)
class Contention:
    """Mutual slow-down of the replicas of one process."""

    side_by_side_s: float
    """Own seconds of the slowest replica, side by side."""
    alone_s: tuple[float, ...]
    """Of each replica in turns; 0 for one without samples."""
    waiting_s: tuple[float, ...]
    """Of each: how much longer than in turns it was blocked. It waited for the interpreter."""
    separate_s: float
    """Seconds that the slowest would need without that waiting."""

    @property
    def gain(self) -> float:
        """Factor by which separate processes would be faster, by this measure."""
        return self.side_by_side_s / self.separate_s


def contention(side_by_side: Sequence[ReplicaObservation], in_turns: Sequence[ReplicaObservation]) -> Contention:
    """Return what replicas cost one another, from steps with the same shares, at least one of each kind."""
    ranks = range(len(side_by_side[0].shares))
    typical: Callable[[list[float]], float] = min if len(in_turns) <= TURNS else median
    own_s = [median(seen.own_s[rank] for seen in side_by_side) for rank in ranks]
    off_s = [median(seen.own_s[rank] - seen.cpu_s[rank] for seen in side_by_side) for rank in ranks]
    alone_s = tuple(typical([seen.own_s[rank] for seen in in_turns]) for rank in ranks)
    alone_off_s = [typical([seen.own_s[rank] - seen.cpu_s[rank] for seen in in_turns]) for rank in ranks]
    waiting_s = tuple(
        # Never more than it took longer: a processor that others hold is no wait for the interpreter.
        max(0.0, min(off - alone_off, own - alone))
        for off, alone_off, own, alone in zip(off_s, alone_off_s, own_s, alone_s, strict=True)
    )
    separate_s = max(own - waiting for own, waiting in zip(own_s, waiting_s, strict=True))
    return Contention(max(own_s), alone_s, waiting_s, separate_s)
