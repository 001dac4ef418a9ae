"""Preemption: which jobs must stop so that a more deserving job can start, the least deserving first, as few as possible.

A pending job may displace a running one that is behind it in the policy's order, is preemptible, was not preempted too
often within the hour, and has had its minimum run time or is of a lower class.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evenload.scheduler.core.availability import Availability
from evenload.scheduler.core.placement import PoolChoice
from evenload.scheduler.core.values import Job


class PreemptionCandidate(NamedTuple):
    job: Job
    slots: Sequence[int]
    """Indices of its devices that others could use."""
    is_young: bool
    """Only a job of a higher class may displace it."""


Adds = dict[object, int]
"""Key of a place → devices there that a gang could use; devices under one key count together."""


@dataclass
class _Line:
    """The search for gangs of one choice and class, from the least deserving up."""

    spared: list[tuple[int, Adds]]
    """Positions of jobs that could stop and were spared, falling; and their devices."""
    end: int


class PreemptionCandidates:
    """The running jobs behind the current position in the order."""

    def __init__(self, in_order: list[PreemptionCandidate], pool_of: Sequence[int], host_of: Sequence[int]) -> None:
        """Take the candidates, the most deserving first."""
        self._tail = in_order
        self._pool_of, self._host_of = pool_of, host_of
        self._num_passed = 0
        self.displaced: set[str] = set()
        self._open: defaultdict[int, int] = defaultdict(int)
        self._young: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._failed: dict[tuple[PoolChoice, int], int] = {}
        self._lines: dict[tuple[PoolChoice, int], _Line] = {}
        self._num_left = 0
        for candidate in in_order:
            self._count(candidate, 1)

    def _count(self, candidate: PreemptionCandidate, sign: int) -> None:
        job, slots, is_young = candidate
        counts = self._young[job.spec.priority] if is_young else self._open
        pool_of = self._pool_of
        for slot in slots:
            counts[pool_of[slot]] += sign
        self._num_left += sign * len(slots)

    @property
    def is_empty(self) -> bool:
        return self._num_left == 0

    def behind(self) -> set[str]:
        """Return the jobs that stay so far, but may still have to stop."""
        return {m.job.id for m in self._tail[self._num_passed :]} - self.displaced

    def pass_by(self, job: Job) -> None:
        """Advance to this running job: it stays, and only those behind it may still be displaced."""
        while (candidate := self._tail[self._num_passed]).job.id != job.id:  # those displaced before are passed too
            self._num_passed += 1
        self._num_passed += 1
        self._count(candidate, -1)

    def keep(self, name: str) -> None:
        """Let a job stay whatever its position: another has joined on its device (`core.sharing`)."""
        for index in range(self._num_passed, len(self._tail)):
            if (candidate := self._tail[index]).job.id == name:
                self._count(candidate, -1)
                self._tail[index] = candidate._replace(slots=())
                return

    def preempt_for(self, job: Job, choice: PoolChoice, num: int, availability: Availability) -> bool:
        """Displace jobs to free `num` devices of `choice`; False, and nothing displaced, if that is impossible."""
        priority, is_single = (
            job.spec.priority,
            not choice.one_host and (not choice.one_kind or len(choice.groups) == 1),
        )
        if self._failed.get((choice, priority), num + 1) <= num:
            return False
        if is_single:
            pools = choice.pools
            most = availability.soon.total(pools) + sum(self._open.get(p, 0) for p in pools)
            most += sum(c.get(p, 0) for other, c in self._young.items() if other < priority for p in pools)
            found = self._collect(job, choice, num, availability, is_single) if most >= num else None
        else:
            found = self._collect(job, choice, num, availability, is_single)
        if found is None:
            self._failed[choice, priority] = num
            return False
        for candidate in found:
            self.displaced.add(candidate.job.id)
            self._count(candidate, -1)
            availability.comes_free(candidate.slots)
        return True

    def _adds_of(self, choice: PoolChoice, is_single: bool) -> Callable[[Sequence[int]], Adds]:
        """Return a function that counts the devices a gang of this choice could use, by where they can serve together."""
        pools, pool_of, host_of = frozenset(choice.pools), self._pool_of, self._host_of
        if is_single:

            def together(slots: Sequence[int]) -> Adds:
                num = sum([pool_of[slot] in pools for slot in slots])
                return {_ANYWHERE: num} if num else {}

            return together
        kind_of = {pool: number for number, group in enumerate(choice.groups) for pool in group}

        def by_key(slots: Sequence[int]) -> Adds:
            adds: Adds = {}
            for slot in slots:
                if (pool := pool_of[slot]) in pools:
                    key = (host_of[slot] if choice.one_host else -1, kind_of[pool] if choice.one_kind else -1)
                    adds[key] = adds.get(key, 0) + 1
            return adds

        return by_key

    def _collect(
        self, job: Job, choice: PoolChoice, num: int, availability: Availability, is_single: bool
    ) -> list[PreemptionCandidate] | None:
        """Return the least deserving jobs that together with what is free make a place."""
        adds_of = self._adds_of(choice, is_single)
        counts: defaultdict[object, int] = defaultdict(int)
        if is_single:
            counts[_ANYWHERE] = availability.soon.total(choice.pools)
        else:
            counts.update(adds_of(availability.soon.free()))
        found: list[tuple[PreemptionCandidate, Adds]] = []
        with contextlib.closing(self._candidates(choice, job.spec.priority, adds_of)) as in_order_found:
            for candidate, adds in in_order_found:
                found.append((candidate, adds))
                for key, added in adds.items():
                    counts[key] += added
                for key in adds:
                    if counts[key] >= num:
                        return _needed(found, counts[key] - num, key)
        return None

    def _candidates(
        self, choice: PoolChoice, priority: int, adds_of: Callable[[Sequence[int]], Adds]
    ) -> Generator[tuple[PreemptionCandidate, Adds], None, None]:
        """Yield jobs that may stop for a gang of such a choice and class, the least deserving first, and their devices.

        A job that was considered for another such gang is skipped, unless it was spared.
        """
        line = self._lines.setdefault((choice, priority), _Line([], len(self._tail)))
        kept: list[tuple[int, Adds]] = []
        num_seen = 0
        try:
            for entry in line.spared:
                index, adds = entry
                if index < self._num_passed:
                    del line.spared[num_seen:]
                    return
                num_seen += 1
                if (candidate := self._tail[index]).job.id not in self.displaced:
                    kept.append(entry)
                    yield candidate, adds
            while line.end > self._num_passed:
                line.end -= 1
                candidate = self._tail[line.end]
                if candidate.job.id in self.displaced or (
                    candidate.is_young and candidate.job.spec.priority >= priority
                ):
                    continue
                if adds := adds_of(candidate.slots):
                    kept.append((line.end, adds))
                    yield candidate, adds
        finally:
            line.spared[:num_seen] = kept


def _needed(found: list[tuple[PreemptionCandidate, Adds]], spare: int, place: object) -> list[PreemptionCandidate]:
    """Leave out those that others make unnecessary; spare the more deserving first."""
    needed = []
    for candidate, adds in reversed(found):
        num = adds.get(place, 0)
        if num <= spare:
            spare -= num
        else:
            needed.append(candidate)
    return needed


_ANYWHERE = 0
"""The key for a gang that may use any devices: all count together."""
