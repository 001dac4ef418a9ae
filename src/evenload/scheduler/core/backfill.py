"""EASY backfilling: reserve devices for the first job that can't start; others use them only if that doesn't delay it.

The algorithm is from Lifka (JSSPP 1995). The expected ends of running jobs give the earliest time at which the first in
line can start, and the number of devices left over then. A later job may start now if it ends before that time, or uses
only devices that are left over. Expected ends come from measured progress, estimates and hard time limits; a preemptible
job counts as ended once it may be preempted. If no end is known, only preemptible jobs may pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from evenload.scheduler.core.placement import Place, PoolChoice, place_finder
from evenload.scheduler.core.values import Job


@dataclass
class BackfillWindow:
    """The reservation of the first job in line."""

    job: Job
    start_s: float
    """When it can start at the latest, as far as is known."""
    extra: int
    """Devices that it will leave over then."""
    place: Place
    place_of: Callable[[int], Place | None]

    def num_inside(self, slots: Iterable[int]) -> int:
        """Return how many of these devices are at the place where it waits."""
        return sum([self.place_of(slot) == self.place for slot in slots])

    def admit(self, slots: Iterable[int], end_s: float) -> bool:
        """Return whether a job may take these devices now; count what it takes of the surplus."""
        if end_s <= self.start_s and end_s < math.inf:
            return True
        inside = self.num_inside(slots)
        if inside > self.extra:
            return False
        self.extra -= inside
        return True


def backfill_window(
    job: Job, choice: PoolChoice, until: Mapping[int, float], pool_of: Sequence[int], host_of: Sequence[int]
) -> BackfillWindow | None:
    """Find when and where `job`, the first in line, can start; None if all devices are too few for it.

    `until`: when each device that isn't closed comes free; infinite if unknown.
    """
    place_of, num = place_finder(choice, pool_of, host_of), job.spec.needs.min_devices
    counts: Counter[Place] = Counter()
    for slot in sorted(until, key=until.__getitem__):
        if (place := place_of(slot)) is None:
            continue
        counts[place] += 1
        if counts[place] < num:
            continue
        if (start_s := until[slot]) == math.inf:  # it may get any of them, at any moment
            anywhere = place_finder(PoolChoice(choice.groups), pool_of, host_of)
            return BackfillWindow(job, math.inf, 0, (None, None), anywhere)
        here = [other for other, time_s in until.items() if time_s <= start_s and place_of(other) == place]
        return BackfillWindow(job, start_s, len(here) - num, place, place_of)
    return None
