"""Why jobs wait and when they will be done, kept at hand for those who ask: worked out seldom, and never long in their way.

A small queue is looked at when somebody asks. At 100,000 jobs a look takes more than a second: there a thread makes it, from
a snapshot that nobody changes, and whoever asks meanwhile is told what the last one saw.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from evenload.scheduler.core.forecast import Forecast, forecast
from evenload.scheduler.core.snapshot import QueueSnapshot

_FRESH_S = 1.0
"""A look at a queue in which nothing happened since is as good for so long."""
_COST = 10
"""No further look for this many times what the last one took."""
_AT_ONCE = 2000
"""Up to so many jobs are looked at while the caller waits: some 20 ms."""
_MOST_FORESEEN = 2000
"""Times are worked out for so many in line; reasons for all."""
_PATIENT_S = 0.1
"""A caller waits so long for a look that a thread makes, where there is no earlier one."""


@dataclass(frozen=True, slots=True)
class _Seen:
    last: int
    """The record's last event then."""
    done_s: float
    cost_s: float
    jobs: Mapping[str, Forecast]


class EtaCache:
    """The last look ahead, and the next."""

    def __init__(self) -> None:
        self._seen: _Seen | None = None
        self._thread: threading.Thread | None = None

    def of(self, snapshot: QueueSnapshot, last: int) -> Mapping[str, Forecast]:
        """Each job's prospects, as of now or a moment ago. Jobs that came since may be missing.

        Args:
            snapshot: the queue.
            last: number of the last event in it.
        """
        if self._is_fresh(last):
            return self._known()
        if len(snapshot.jobs) <= _AT_ONCE:
            self._look(snapshot, last)
            return self._known()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._look, args=(snapshot, last), name="evenload-foresight", daemon=True
            )
            self._thread.start()
        if self._seen is None:
            self._thread.join(_PATIENT_S)
        return self._known()

    def _known(self) -> Mapping[str, Forecast]:
        return {} if self._seen is None else self._seen.jobs

    def _is_fresh(self, last: int) -> bool:
        seen = self._seen
        if seen is None:
            return False
        return time.monotonic() - seen.done_s < (_FRESH_S if last == seen.last else 0.0) + _COST * seen.cost_s

    def _look(self, snapshot: QueueSnapshot, last: int) -> None:
        began_s = time.monotonic()
        known = forecast(snapshot, time.time(), _MOST_FORESEEN)
        done_s = time.monotonic()
        self._seen = _Seen(last, done_s, done_s - began_s, known)
