"""EASY backfilling: reserve devices for the first job that can't start; others use them only if that doesn't delay it.

The algorithm is from Lifka (JSSPP 1995). The expected ends of running jobs give the earliest time at which the first in
line can start, and the number of devices left over then. A later job may start now if it ends before that time, or uses
only devices that are left over. Expected ends come from measured progress, estimates and hard time limits; a preemptible
job counts as ended once it may be preempted. If no end is known, only preemptible jobs may pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from evenload.scheduler.core.placement import Place, PoolChoice, place_counter
from evenload.scheduler.core.values import Job

Release = tuple[float, Sequence[int]]
"""When devices are expected back, and which; plain, for there may be 100,000."""


@dataclass
class BackfillWindow:
    """The reservation of the first job in line."""

    job: Job
    pools: frozenset[int]
    host: int | None
    """If all devices must be in one host."""
    start_s: float
    """When it can start at the latest, as far as is known."""
    extra: int
    """Devices that it will leave over then."""
    pool_of: Sequence[int]
    host_of: Sequence[int]

    def is_hopeless(self, choice: PoolChoice, num: int, end_s: float) -> bool:
        """Return whether a job would delay the first in line wherever it was placed."""
        if self._is_gone_in_time(end_s) or num <= self.extra or self.host is not None:
            return False
        return self.pools.issuperset(choice.pools)

    def _is_gone_in_time(self, end_s: float) -> bool:
        return end_s <= self.start_s and end_s < math.inf

    def admit(self, slots: Iterable[int], end_s: float) -> bool:
        """Return whether a job may take these devices now; count what it takes of the surplus."""
        if self._is_gone_in_time(end_s):
            return True
        inside = sum(
            self.pool_of[slot] in self.pools and (self.host is None or self.host_of[slot] == self.host)
            for slot in slots
        )
        if inside > self.extra:
            return False
        self.extra -= inside
        return True


def backfill_window(
    job: Job,
    choice: PoolChoice,
    num: int,
    releases: Iterable[Release],
    pool_of: Sequence[int],
    host_of: Sequence[int],
) -> BackfillWindow:
    """Find when and where `job`, the first in line, can start.

    `releases` include the devices that are free now, before others, and may omit devices that never come back. Those of one
    time count in the order given, which is that of submission.
    """
    places_of = place_counter(choice, pool_of, host_of)
    counts: Counter[Place] = Counter()
    for time_s, slots in sorted(releases, key=itemgetter(0)):
        if time_s == math.inf:
            break
        more = places_of(slots)
        counts.update(more)
        if full := [place for place in more if counts[place] >= num]:
            host, kind = full[-1]
            pools = frozenset(choice.pools if kind is None else choice.groups[kind])
            return BackfillWindow(job, pools, host, time_s, counts[full[-1]] - num, pool_of, host_of)
    return BackfillWindow(job, frozenset(choice.pools), None, math.inf, 0, pool_of, host_of)
