"""Preemption: which jobs must stop so that a more deserving job can start, the least deserving first, as few as possible.

A pending job may displace a running one that is behind it in the policy's order, is preemptible, was not preempted too
often within the hour, and has had its minimum run time or is of a lower class.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from evenload.scheduler.core.availability import Availability
from evenload.scheduler.core.placement import Place, PoolChoice, place_counter
from evenload.scheduler.core.values import Job


class PreemptionCandidate(NamedTuple):
    job: Job
    slots: Sequence[int]
    """Indices of its devices that others could use."""
    is_young: bool
    """Only a job of a higher class may displace it."""


class PreemptionCandidates:
    """The running jobs behind the current position in the order."""

    def __init__(self, in_order: list[PreemptionCandidate], pool_of: Sequence[int], host_of: Sequence[int]) -> None:
        """Take the candidates, the most deserving first."""
        self._in_order, self._pool_of, self._host_of = in_order, pool_of, host_of
        self._index = {candidate.job.id: index for index, candidate in enumerate(in_order)}
        self._num_passed = 0
        self._num_left = 0
        self._left: defaultdict[int | None, Counter[int]] = defaultdict(Counter)
        """Pool → devices of jobs that may stop: by class where only a higher one may displace them, else under None."""
        self._failed: dict[tuple[PoolChoice, int], int] = {}
        self.displaced: set[str] = set()
        for candidate in in_order:
            self._count(candidate, 1)

    def _count(self, candidate: PreemptionCandidate, sign: int) -> None:
        left = self._left[candidate.job.spec.priority if candidate.is_young else None]
        for slot in candidate.slots:
            left[self._pool_of[slot]] += sign
        self._num_left += sign * len(candidate.slots)

    @property
    def is_empty(self) -> bool:
        return self._num_left == 0

    def behind(self) -> set[str]:
        """Return the jobs that stay so far, but may still have to stop."""
        return {candidate.job.id for candidate in self._in_order[self._num_passed :]} - self.displaced

    def is_behind(self, name: str) -> bool:
        """Return whether a job is one of these."""
        return self._index.get(name, -1) >= self._num_passed and name not in self.displaced

    def pass_by(self, job: Job) -> bool:
        """Advance to this running job: only those behind it may still be displaced. False if it is fixed, or displaced itself."""
        index = self._index.get(job.id)
        if index is None or job.id in self.displaced:
            return False
        self._num_passed = index + 1
        self._count(self._in_order[index], -1)
        return True

    def keep(self, name: str) -> None:
        """Let a job stay whatever its position: another has joined on its device (`core.sharing`)."""
        index = self._index.get(name, -1)
        if index >= self._num_passed:
            self._count(self._in_order[index], -1)
            self._in_order[index] = self._in_order[index]._replace(slots=())

    def preempt_for(self, job: Job, choice: PoolChoice, num: int, availability: Availability) -> bool:
        """Displace jobs to free `num` devices of `choice`; False, and nothing displaced, if that is impossible."""
        priority = job.spec.priority
        if self._failed.get((choice, priority), num + 1) <= num:
            return False
        found = self._find(priority, choice, num, availability)
        if found is None:
            self._failed[choice, priority] = num
            return False
        for candidate in found:
            self.displaced.add(candidate.job.id)
            self._count(candidate, -1)
            availability.comes_free(candidate.slots)
        return True

    def _find(
        self, priority: int, choice: PoolChoice, num: int, availability: Availability
    ) -> list[PreemptionCandidate] | None:
        """Return the least deserving jobs that together with what is free make a place."""
        adds_of = place_counter(choice, self._pool_of, self._host_of)
        soon = availability.soon
        if choice.one_host or (choice.one_kind and len(choice.groups) > 1):
            counts = Counter(adds_of(soon.free()))
        else:  # all devices are one place: their number says if there are enough
            counts = Counter({(None, 0 if choice.one_kind else None): soon.total(choice.pools)})
            movable = [left for level, left in self._left.items() if level is None or level < priority]
            if counts.total() + sum(left[pool] for left in movable for pool in choice.pools) < num:
                return None
        found: list[tuple[PreemptionCandidate, dict[Place, int]]] = []
        displaced = self.displaced
        for index in range(len(self._in_order) - 1, self._num_passed - 1, -1):
            candidate = self._in_order[index]
            if candidate.job.id in displaced or (candidate.is_young and candidate.job.spec.priority >= priority):
                continue
            if adds := adds_of(candidate.slots):
                found.append((candidate, adds))
                for place, added in adds.items():
                    counts[place] += added
                for place in adds:
                    if counts[place] >= num:
                        return _needed(found, counts[place] - num, place)
        return None


def _needed(
    found: list[tuple[PreemptionCandidate, dict[Place, int]]], spare: int, place: Place
) -> list[PreemptionCandidate]:
    """Leave out those that others make unnecessary; spare the more deserving first."""
    needed = []
    for candidate, adds in reversed(found):
        num = adds.get(place, 0)
        if num <= spare:
            spare -= num
        else:
            needed.append(candidate)
    return needed
