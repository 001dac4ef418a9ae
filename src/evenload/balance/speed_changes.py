"""The changes of speed since the last move. No clock, no I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from evenload.balance.drift import SpeedChange

_BIG_CHANGE = 1.4
_REPORTED_CHANGE = 1.1
_OF_THE_SHARE = 1
"""Seconds that change so few steps after the rank's share did are the share's, and no change of its speed."""
_REMEMBERED_STEPS = 512


class SpeedChanges:
    """Times are numbers of blocks (blocks.py); changes are kept with the run's own number of their step."""

    def __init__(self, world_size: int) -> None:
        self._of: dict[int, SpeedChange] = {}
        self._resized = (False,) * world_size
        """Of each rank whether its share is another than before."""
        self._since = 0
        """Time since which the shares are these."""
        self._first_steps: deque[int] = deque(maxlen=_REMEMBERED_STEPS)
        """The run's number of the first step of each of the last blocks."""

    def begin_shares(self, time: int, before: Sequence[int], after: Sequence[int]) -> None:
        """Note that from `time` on steps run under other shares."""
        self._resized = tuple(new != old for new, old in zip(after, before, strict=True))
        self._since = time

    def add(self, time: int, first_step: int, found: Mapping[int, SpeedChange]) -> bool:
        """Add what a block that began with `first_step` completed; return whether a speed changed."""
        self._first_steps.append(first_step)
        is_of_speed = False
        for rank, change in found.items():
            if self._resized[rank] and change.step <= self._since + _OF_THE_SHARE:
                continue
            is_of_speed = True
            before = self._of.get(rank)
            since = before.step if before else self._first_steps[change.step - time - 1]
            self._of[rank] = SpeedChange(since, change.factor * (before.factor if before else 1.0))
        return is_of_speed

    @property
    def has_big(self) -> bool:
        return any(abs(math.log(change.factor)) > math.log(_BIG_CHANGE) for change in self._of.values())

    def reported(self) -> dict[int, SpeedChange]:
        """Return the changes that are worth a word, by rank."""
        least = math.log(_REPORTED_CHANGE)
        return {rank: change for rank, change in self._of.items() if abs(math.log(change.factor)) > least}

    def clear(self) -> None:
        self._of.clear()
