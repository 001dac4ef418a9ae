"""Preemption: which jobs must stop so that a more deserving job can start, the least deserving first, as few as possible.

Such a job is behind it in the order, preemptible, not preempted too often, and past its minimum run time or of a lower class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from evenload.scheduler.core.placement import FreeDevices, Place, PoolChoice, place_finder
from evenload.scheduler.core.values import Job


class PreemptionCandidate(NamedTuple):
    job: Job
    slots: Sequence[int]
    """Indices of its devices that others could use; none where it is bound to stay."""
    pools: frozenset[int]
    """Those of `slots`."""
    is_young: bool
    """Only a job of a higher class may displace it."""


class PreemptionCandidates:
    """The running jobs behind the current position in the order; made of jobs, devices and youth, the most deserving first."""

    def __init__(
        self, in_order: Iterable[tuple[Job, Sequence[int], bool]], pool_of: Sequence[int], host_of: Sequence[int]
    ) -> None:
        self._pool_of, self._host_of = pool_of, host_of
        self.behind = {
            job.id: PreemptionCandidate(job, slots, frozenset([pool_of[slot] for slot in slots]), is_young)
            for job, slots, is_young in in_order
        }
        """Job → candidate, of those that stay so far: they may still have to stop, but for those that are bound to stay."""
        self._bound = frozenset([name for name, candidate in self.behind.items() if not candidate.slots])
        self._failed: dict[tuple[PoolChoice, int], int] = {}
        self.displaced: set[str] = set()

    @property
    def is_empty(self) -> bool:
        return not any(candidate.slots for candidate in self.behind.values())

    def pass_by(self, job: Job) -> bool:
        """Advance to this running job: only those behind it may still be displaced. False if it changes, or is displaced."""
        return self.behind.pop(job.id, None) is not None

    def may_stop(self, name: str) -> bool:
        """Return whether a job may have to stop for one at this position: in this plan, or in a later one if it was kept."""
        return name in self.behind and name not in self._bound

    def keep(self, name: str) -> None:
        """Let a job stay whatever its position: another has joined on its device (`core.sharing`)."""
        if (candidate := self.behind.get(name)) is not None:
            self.behind[name] = candidate._replace(slots=(), pools=frozenset())

    def preempt_for(self, job: Job, choice: PoolChoice, num: int, free: FreeDevices) -> bool:
        """Displace jobs and keep `num` devices of `choice` for this one; False, and nothing displaced, if that is impossible."""
        priority = job.spec.priority
        if self._failed.get((choice, priority), num + 1) <= num:
            return False
        if (found := self._find(priority, choice, num, free)) is None:
            self._failed[choice, priority] = num
            return False
        for candidate in found:
            del self.behind[candidate.job.id]
            self.displaced.add(candidate.job.id)
            free.give(candidate.slots, soon=True)
        free.place(choice, num, soon=True)
        return True

    def _find(self, priority: int, choice: PoolChoice, num: int, free: FreeDevices) -> list[PreemptionCandidate] | None:
        """Return the least deserving jobs that together with what is free make a place."""
        place_of, pools = place_finder(choice, self._pool_of, self._host_of), frozenset(choice.pools)
        counts: Counter[Place | None] = Counter(map(place_of, free.free(soon=True)))
        found: list[PreemptionCandidate] = []
        for candidate in reversed(self.behind.values()):
            if pools.isdisjoint(candidate.pools) or (candidate.is_young and candidate.job.spec.priority >= priority):
                continue
            found.append(candidate)
            places = [place_of(slot) for slot in candidate.slots]
            counts.update(places)
            for place in places:
                if place is not None and counts[place] >= num:
                    at_place = [(one, sum([place_of(slot) == place for slot in one.slots])) for one in found]
                    return _needed(at_place, counts[place] - num)
        return None


def _needed(found: list[tuple[PreemptionCandidate, int]], spare: int) -> list[PreemptionCandidate]:
    """Leave out those that others make unnecessary; spare the more deserving first."""
    needed = []
    for candidate, num in reversed(found):
        if num <= spare:
            spare -= num
        else:
            needed.append(candidate)
    return needed
