"""Preemption: which jobs must stop so that a more deserving job can start, the least deserving first, as few as possible.

A pending job may displace a running one that is behind it in the policy's order, is preemptible, was not preempted too
often within the hour, and has had its minimum run time or is of a lower class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from evenload.scheduler.core.availability import Availability
from evenload.scheduler.core.placement import Place, PoolChoice, place_counter
from evenload.scheduler.core.values import Job


class PreemptionCandidate(NamedTuple):
    job: Job
    slots: Sequence[int]
    """Indices of its devices that others could use."""
    pools: frozenset[int]
    """Those of `slots`."""
    is_young: bool
    """Only a job of a higher class may displace it."""


class PreemptionCandidates:
    """The running jobs behind the current position in the order."""

    def __init__(
        self, in_order: Iterable[tuple[Job, Sequence[int], bool]], pool_of: Sequence[int], host_of: Sequence[int]
    ) -> None:
        """Take jobs, their devices and whether they are young, the most deserving first."""
        self._pool_of, self._host_of = pool_of, host_of
        self.behind = {
            job.id: PreemptionCandidate(job, slots, frozenset([pool_of[slot] for slot in slots]), is_young)
            for job, slots, is_young in in_order
        }
        """Job → candidate, of those that stay so far, but may still have to stop."""
        self._num_left = sum([len(candidate.slots) for candidate in self.behind.values()])
        self._failed: dict[tuple[PoolChoice, int], int] = {}
        self.displaced: set[str] = set()

    @property
    def is_empty(self) -> bool:
        return self._num_left == 0

    def pass_by(self, job: Job) -> bool:
        """Advance to this running job: only those behind it may still be displaced. False if it is fixed, or displaced itself."""
        candidate = self.behind.pop(job.id, None)
        if candidate is not None:
            self._num_left -= len(candidate.slots)
        return candidate is not None

    def keep(self, name: str) -> None:
        """Let a job stay whatever its position: another has joined on its device (`core.sharing`)."""
        if (candidate := self.behind.get(name)) is not None:
            self._num_left -= len(candidate.slots)
            self.behind[name] = candidate._replace(slots=(), pools=frozenset())

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
            self.pass_by(candidate.job)
            self.displaced.add(candidate.job.id)
            availability.comes_free(candidate.slots)
        return True

    def _find(
        self, priority: int, choice: PoolChoice, num: int, availability: Availability
    ) -> list[PreemptionCandidate] | None:
        """Return the least deserving jobs that together with what is free make a place."""
        adds_of, pools = place_counter(choice, self._pool_of, self._host_of), frozenset(choice.pools)
        if choice.one_host or (choice.one_kind and len(choice.groups) > 1):
            counts = Counter(adds_of(availability.soon.free()))
        else:  # all devices are one place
            counts = Counter({(None, 0 if choice.one_kind else None): availability.soon.total(choice.pools)})
        found: list[tuple[PreemptionCandidate, dict[Place, int]]] = []
        for candidate in reversed(self.behind.values()):
            if pools.isdisjoint(candidate.pools) or (candidate.is_young and candidate.job.spec.priority >= priority):
                continue
            adds = adds_of(candidate.slots)
            found.append((candidate, adds))
            counts.update(adds)
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
