"""How many more devices a job may have where not every job can use every device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from copy import copy

from evenload.scheduler.core.eligibility import PoolChoices
from evenload.scheduler.core.layout import Layout
from evenload.scheduler.core.policy import PolicyInput
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job

_MOST_UNIONS = 64


class Room:
    """What is left of some devices as jobs get theirs, each of the pools that it can use.

    All can have what they got if, for each union U of their sets of pools, those that can use just pools of U got no more than
    U has (Hall's marriage theorem). So a job may have the least, over all unions that contain its pools, of what is left. Of
    more than `_MOST_UNIONS` some are left out: then it may promise too much.
    """

    def __init__(self, layout: Layout, choices: PoolChoices, slots: Iterable[int]) -> None:
        """Take the indices of the devices."""
        self._index, self._choices = layout.index, choices
        self._num: dict[int, float] = dict(Counter([choices.pool_of[slot] for slot in slots]))
        """Pool → devices that no job keeps."""
        self.num_left = sum(self._num.values())
        self._taken: dict[int, float] = {}
        """Set of pools, bit p is pool p → devices of any of them that jobs got."""
        self._left: dict[int, float] = {0: 0.0}
        """Union → what is left of it."""
        self._unions: dict[tuple[int, ...], list[int]] = {}
        """Pools of a job → the unions that contain them, its own set first."""

    def most(self, job: Job) -> int:
        """Return how many devices the job may have beyond what it got."""
        return math.floor(min([self._left[union] for union in self._unions_of(job)]))

    def take(self, job: Job, num: int) -> None:
        """Give the job devices, of any pools that it can use."""
        unions = self._unions_of(job)
        self._taken[unions[0]] = self._taken.get(unions[0], 0.0) + num
        self.num_left -= num
        for union in unions:
            self._left[union] -= num

    def keep(self, job: Job, num: int) -> bool:
        """Let a running job keep `num` of its devices; False, and nothing is changed, if others got them."""
        pools = Counter([self._choices.pool_of[self._index[device]] for device in job.devices[:num]])
        less = {union: sum([pools[pool] for pool in pools if union >> pool & 1]) for union in self._left}
        if any(of_union > self._left[union] for union, of_union in less.items() if of_union):
            return False
        for pool in pools:
            self._num[pool] = self._num.get(pool, 0.0) - pools[pool]
        self.num_left -= num
        for union, of_union in less.items():
            self._left[union] -= of_union
        return True

    def times(self, factor: float) -> Room:
        """Return a room of so many times what is left in this one."""
        other = copy(self)
        other.num_left *= factor
        other._unions = dict(self._unions)
        other._num, other._taken, other._left = (
            {key: factor * num for key, num in counts.items()} for counts in (self._num, self._taken, self._left)
        )
        return other

    def _unions_of(self, job: Job) -> list[int]:
        pools = self._choices.of(job).pools
        if pools not in self._unions:
            own = sum([1 << pool for pool in set(pools)])
            for union in [*self._left][:_MOST_UNIONS]:
                self._left.setdefault(union | own, self._left_of(union | own))
            for known in (*self._unions, pools):
                least = sum([1 << pool for pool in set(known)])
                others = [union for union in self._left if union & least == least and union != least]
                self._unions[known] = [least, *others]
        return self._unions[pools]

    def _left_of(self, union: int) -> float:
        num = sum([num for pool, num in self._num.items() if union >> pool & 1])
        return num - sum([num for pools, num in self._taken.items() if pools & union == pools])


def room_of(inputs: PolicyInput) -> Room:
    """Return the room of all devices that are free, coming free, or held by running jobs."""
    index = inputs.layout.index
    held = [index[device] for job in inputs.holders if job.state is JobState.RUNNING for device in job.devices]
    return Room(inputs.layout, inputs.choices, {*inputs.free, *held})
