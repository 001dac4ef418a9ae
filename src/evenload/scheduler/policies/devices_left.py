"""`DevicesLeft`: counts the devices that a job may still have, where not every job can use every device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from copy import copy

from evenload.scheduler.core.eligibility import PoolChoices
from evenload.scheduler.core.layout import Layout
from evenload.scheduler.core.policy import PolicyInput
from evenload.scheduler.core.states import RUNNING
from evenload.scheduler.core.values import Job

_MOST_UNIONS, _MOST_SETS = 64, 128


class DevicesLeft:
    """Counts what is left of some devices as jobs get theirs, each of the pools that it can use.

    All can have what they got if, for each union U of their sets of pools, those that can use just pools of U got no more than
    U has (Hall's marriage theorem). So a job may have the least, over all unions that contain its pools, of what is left. Of
    more than `_MOST_UNIONS`, or `_MOST_SETS` sets, some aren't counted: then it may promise too much.

    The counts are brought up to date where it matters: what is left only falls, and by no more than jobs got since.
    """

    def __init__(self, layout: Layout, choices: PoolChoices, slots: Iterable[int]) -> None:
        """Take the indices of the devices."""
        self._index, self._choices = layout.index, choices
        self._num: dict[int, float] = dict(Counter([choices.pool_of[slot] for slot in slots]))
        """Pool → devices."""
        self.num_left = sum(self._num.values())
        self._sets: dict[tuple[int, ...], int] = {}
        """Pools of a job → its set: bit p is pool p."""
        self._left: dict[int, float] = {0: 0.0}
        """Union → what was left of it at the last `_update`."""
        self._taken: dict[int, float] = {}
        """Set → devices of any of its pools that jobs had got then; those they keep are of a set of one pool."""
        self._new: dict[int, float] = {}
        self._num_new = 0.0
        self._least: dict[int, float] = {}
        """Set → the least that was left of a union that contains it."""

    def most(self, job: Job) -> int:
        """Return how many devices the job may have beyond what it got."""
        self._update()
        return math.floor(self._least_of(self._set_of(job)))

    def has(self, job: Job, num: int) -> bool:
        """Return whether the job may have so many devices beyond what it got."""
        return self._has(self._set_of(job), num)

    def take(self, job: Job, num: int) -> None:
        """Give the job devices, of any pools that it can use."""
        own = self._set_of(job)
        self._new[own] = self._new.get(own, 0.0) + num
        self._num_new += num
        self.num_left -= num

    def keep(self, job: Job, num: int) -> bool:
        """Let a running job keep `num` of its devices; False, and nothing is changed, if others got them."""
        if num > self.num_left:
            return False
        index, pool_of, pools = self._index, self._choices.pool_of, dict[int, int]()
        for device in job.devices[:num]:
            pool = 1 << pool_of[index[device]]
            pools[pool] = pools.get(pool, 0) + 1
        for pool, of_pool in pools.items():
            if num + self._num_new > self._least.get(pool, 0.0) and not self._has(pool, of_pool):
                return False
        if len(pools) > 1 and any(num + self._num_new > self._least_of(pool) for pool in pools):
            self._update()
            for union, left in self._left.items():
                if left < sum([of_pool for pool, of_pool in pools.items() if union & pool]) > 0:
                    return False
        for pool, of_pool in pools.items():
            self._new[pool] = self._new.get(pool, 0.0) + of_pool
        self._num_new += num
        self.num_left -= num
        return True

    def times(self, factor: float) -> DevicesLeft:
        """Return a copy with so many times what is left here."""
        self._update()
        other = copy(self)
        other.num_left *= factor
        other._sets = dict(self._sets)
        other._num, other._taken, other._left, other._new, other._least = (
            {key: factor * num for key, num in counts.items()}
            for counts in (self._num, self._taken, self._left, self._new, self._least)
        )
        return other

    def _has(self, own: int, num: int) -> bool:
        least = self._least_of(own)
        if least - self._num_new < num <= least:
            self._update()
            least = self._least_of(own)
        return num <= least

    def _least_of(self, own: int) -> float:
        if own not in self._least:
            self._least[own] = min([n for union, n in self._left.items() if union & own == own] or [self._num_of(own)])
        return self._least[own]

    def _update(self) -> None:
        for own, num in self._new.items():
            self._taken[own] = self._taken.get(own, 0.0) + num
            for union in self._left:
                if union & own == own:
                    self._left[union] -= num
        if self._new:
            self._new, self._num_new, self._least = {}, 0.0, {}

    def _set_of(self, job: Job) -> int:
        pools = self._choices.of(job).pools
        if pools not in self._sets:
            self._sets[pools] = own = sum([1 << pool for pool in set(pools)])
            for union in [*self._left]:  # 0 is the first
                if len(self._left) < (_MOST_UNIONS if union else _MOST_SETS):
                    self._add(union | own)
        return self._sets[pools]

    def _add(self, union: int) -> None:
        if union not in self._left:
            self._left[union] = self._num_of(union) - sum([n for own, n in self._taken.items() if own & union == own])
            self._least = {}

    def _num_of(self, own: int) -> float:
        return sum([num for pool, num in self._num.items() if own >> pool & 1])


def devices_left(inputs: PolicyInput) -> DevicesLeft:
    """Return a count of all devices that are free, coming free, or held by running jobs."""
    index = inputs.layout.index
    held = [index[device] for job in inputs.holders if job.state is RUNNING for device in job.devices]
    return DevicesLeft(inputs.layout, inputs.choices, {*inputs.free, *held})
