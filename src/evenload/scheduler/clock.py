"""The queue's clock: seconds since 1970 that grow by the time that has passed, whatever is done to the machine's clock.

Within a boot the queue's time is CLOCK_BOOTTIME plus an offset, which is stored with the queue: a wall clock that is set
back or forward, also while no daemon runs, changes no duration. After a reboot it starts at the wall clock's time, or at the
queue's last event if that claims to be later. People see wall time: `QueueClock.ahead_s` is the difference.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from evenload.job.processes import boot_id, boottime_s

_SAME_S = 1.0
"""The wall clock and the queue's count as equal up to this difference: nobody set a clock."""


def wall_s() -> float:
    """Return the wall clock's time, for people alone."""
    return time.time()


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """Origin of a queue's time, as it is stored."""

    boot: str
    """Id of the boot."""
    offset_s: float
    """Queue's time at the boot."""
    ahead_s: float = 0.0
    """Seconds by which the wall clock was ahead of the queue's when this was stored."""


class QueueClock:
    """Counts from the stored anchor in the same boot, else from the wall clock."""

    def __init__(self, stored: ClockAnchor | None = None, last_s: float = 0.0) -> None:
        """`last_s`: when the queue is known to have worked last; no time lies before."""
        self._stored = stored
        boot = boot_id()
        if stored is not None and boot and stored.boot == boot:
            self._offset_s = stored.offset_s
        else:
            self._offset_s = max(wall_s(), last_s) - boottime_s()
        self._boot = boot

    def now_s(self) -> float:
        return self._offset_s + boottime_s()

    @property
    def ahead_s(self) -> float:
        """Seconds by which the wall clock is ahead of the queue's; 0 where nobody set it."""
        ahead_s = wall_s() - self.now_s()
        return ahead_s if abs(ahead_s) > _SAME_S else 0.0

    def midnight_s(self, at_s: float) -> float:
        """Return the queue's time of the last midnight before a time: the hours of the wall clock's day count from it.

        On a day on which summer time begins or ends, it is that of the time then: an hour from midnight once that has changed.
        """
        wall_s = at_s + self.ahead_s
        at = time.localtime(wall_s)
        of_day_s = at.tm_hour * 3600 + at.tm_min * 60 + at.tm_sec
        return math.floor(wall_s) - of_day_s - self.ahead_s

    def anchor(self) -> ClockAnchor:
        return ClockAnchor(self._boot, self._offset_s, self.ahead_s)

    def step_s(self, since: ClockAnchor) -> float:
        """Return by how much the wall clock was set since an anchor was stored; 0 if it wasn't."""
        step_s = self.ahead_s - since.ahead_s
        return step_s if abs(step_s) > _SAME_S else 0.0

    def at(self, boot: str, since_boot_s: float) -> float | None:
        """Return the queue's time at a moment of a boot; None for a boot that the queue knows nothing of."""
        if boot == self._boot:
            return self._offset_s + since_boot_s
        if self._stored is not None and boot == self._stored.boot:
            return self._stored.offset_s + since_boot_s
        return None
