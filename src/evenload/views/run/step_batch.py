"""Steps on their way to the bins: placed on the axis, their late seconds carried back, and summed while a bin holds them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from operator import add, attrgetter

from evenload.records.values import SEGMENTS, StepRecord

Seconds = tuple[float, ...]
"""Of one rank in one step, by `SEGMENTS`."""
SECONDS_OF = attrgetter(*SEGMENTS)
"""Returns the `Seconds` of a `RankTimes`."""
_LATE = tuple(map(SEGMENTS.index, ("wait_s", "comm_s", "other_s", "optimizer_s")))
"""Segments that come after the exchange of the ranks' times, which a step ends with, and so travel with the next one."""


@dataclass
class PlacedStep:
    """A step and its place on the axis."""

    keys: tuple[Hashable, ...]
    begin_s: float
    end_s: float
    covered_s: float
    """From the end of the step before, or the beginning of the session."""
    length_s: float
    record: StepRecord
    rows: list[Seconds]


class StepBatch:
    """Consecutive steps of the same devices, summed before they are spread over the bins: most bins hold many steps."""

    def __init__(self, keys: tuple[Hashable, ...], begin_s: float) -> None:
        self.keys = keys
        self.begin_s = self.end_s = begin_s
        self.covered_s = 0.0
        self.seconds = 0.0
        self.num_samples = 0
        self.shares = [0] * len(keys)
        self.last_shares: tuple[int, ...] = ()
        self.segments_s: list[Seconds] = [(0.0,) * len(SEGMENTS)] * len(keys)
        self.memory_bytes = [0] * len(keys)

    def add(self, step: PlacedStep) -> None:
        record = step.record
        self.end_s = step.end_s
        self.covered_s += step.covered_s
        self.seconds += record.seconds
        self.num_samples += record.num_samples
        self.last_shares = record.shares
        self.shares = list(map(add, self.shares, record.shares))
        self.segments_s = [tuple(map(add, *pair)) for pair in zip(self.segments_s, step.rows, strict=True)]
        held = [times.memory_bytes for times in record.ranks]
        self.memory_bytes = list(map(max, self.memory_bytes, held))


def carry_back(earlier: Seconds, earlier_s: float, later: Seconds, later_s: float) -> tuple[Seconds, Seconds]:
    """Move seconds that the later step can't hold into the gap that they left in the earlier one.

    Args:
        earlier: seconds of a rank in a step.
        earlier_s: length of that step.
        later: seconds of the same rank in the step after it.
        later_s: length of this step.

    Returns:
        Both, with the same sum. Of steps of equal length nothing moves.
    """
    left_s = min(sum(later) - later_s, earlier_s - sum(earlier))
    if left_s <= 0:
        return earlier, later
    first, second = list(earlier), list(later)
    for index in _LATE:
        moved_s = min(left_s, second[index])
        first[index] += moved_s
        second[index] -= moved_s
        left_s -= moved_s
    return tuple(first), tuple(second)
