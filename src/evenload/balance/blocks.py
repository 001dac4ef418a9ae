"""Merge short steps into blocks that last long enough to show a rank's speed. No clock, no I/O.

A scheduler runs other threads for some milliseconds at a time, and a rank may compute at full speed until its quota is used up.
The seconds of a step of half a millisecond therefore show what happened beside it; only the mean over a longer time shows the
rank. The mean, not the median: a rank that stands still in one step of five is a fifth slower.

How long steps last is judged without the time in which other programs had the processors: a step of 2 ms is a short one also on
a machine so busy that it takes 20, and there its seconds show the ranks least of all.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from dataclasses import replace
from statistics import fmean

from evenload.balance.decision import Observation

BLOCK_S = 0.016
"""A block lasts so long; steps as long as this are blocks of their own."""
_STAYS_SHORT = 1.25
"""Steps that were short are merged until they are so many times as long, so that the limit isn't crossed again and again."""
_MOST_STEPS = 1000
_RECENT = 64
_UNDISTURBED = 24
"""One step of so many is taken as undisturbed: on a busy machine most short steps are stretched by time slices of others."""
_LEAST_SEEN_S = 0.75
"""The first steps load and allocate: none is known to be long before so many undisturbed ones as take this time."""


class StepBlocks:
    def __init__(self) -> None:
        self._steps: list[Observation] = []
        self._size = 1
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self._num_seen = 0
        self._is_known = False

    @property
    def is_short(self) -> bool:
        """True if steps are merged, or may have to be: there were too few."""
        return self._size > 1 or not self._is_known

    def add(self, step: Observation) -> Observation | None:
        """Add a step; return the block that it completes. A block has steps of one split alone."""
        if self._steps and _split_of(step) != _split_of(self._steps[-1]):
            self._steps.clear()
        self._steps.append(step)
        # The wait for a rank may be counted in the step after its own.
        longest_s = max(step.whole_s, *filter(None, step.seconds))
        self._recent_s.append(max(longest_s - step.delay_s, BLOCK_S / _MOST_STEPS))
        self._num_seen += 1
        if len(self._steps) < self._size:
            return None
        steps, self._steps = self._steps, []
        # Not by the time that the block took: one that ends with a long step would hold too many of those.
        usual_s = sorted(self._recent_s)[(len(self._recent_s) - 1) // _UNDISTURBED]
        self._is_known = self._is_known or self._num_seen * usual_s >= _LEAST_SEEN_S
        if usual_s < BLOCK_S:
            self._size = min(math.ceil(BLOCK_S / usual_s), _MOST_STEPS)
        else:
            self._size = 2 if self._size > 1 and usual_s < _STAYS_SHORT * BLOCK_S else 1
        return step if len(steps) == 1 else _merged(steps)


def _split_of(step: Observation) -> tuple[object, ...]:
    return step.shares, step.num_micro, tuple(map(operator.is_, step.seconds, itertools.repeat(None)))


def _merged(steps: list[Observation]) -> Observation:
    columns = zip(*(one.seconds for one in steps), strict=True)
    seconds = tuple(
        None if column[0] is None else fmean(time_s for time_s in column if time_s is not None) for column in columns
    )
    return replace(
        steps[-1],
        seconds=seconds,
        step_s=fmean(one.whole_s for one in steps),
        num_steps=len(steps),
        parts=tuple(one.seconds for one in steps),
    )
