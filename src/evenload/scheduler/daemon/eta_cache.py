"""Cache of wait reasons and ETAs, so that `ps` never blocks on them.

In a small queue they are computed on request. With 100,000 jobs that takes more than a second: a thread does it then, from an
immutable snapshot, and requests meanwhile get the previous result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from evenload.scheduler.core.forecast import Forecast, forecast
from evenload.scheduler.core.snapshot import QueueSnapshot

_FRESH_S = 1.0
"""A result stays valid this long if no event was recorded since."""
_COST_FACTOR = 10
"""A result also stays valid for this many times the time that it took."""
_MAX_SYNCHRONOUS = 2000
"""Up to this many jobs the caller waits for the result, about 20 ms."""
_MAX_FORECASTS = 2000
"""Times are computed for this many jobs in line; reasons for all."""
_FIRST_WAIT_S = 0.1
"""Longest wait of a caller for the thread's first result."""


@dataclass(frozen=True, slots=True)
class _CachedForecast:
    last: int
    """Number of the last event in it."""
    done_s: float
    cost_s: float
    jobs: Mapping[str, Forecast]


class EtaCache:
    def __init__(self) -> None:
        self._cached: _CachedForecast | None = None
        self._thread: threading.Thread | None = None

    def forecasts(self, snapshot: QueueSnapshot, last: int, now_s: float, job: str = "") -> Mapping[str, Forecast]:
        """Return each job's forecast, as of now or a moment ago. Of jobs submitted since, only `job` is sure to be there."""
        if self._is_fresh(last) and (not job or job in self._jobs()):
            return self._jobs()
        if len(snapshot.jobs) <= _MAX_SYNCHRONOUS:
            self._compute(snapshot, last, now_s)
            return self._jobs()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._compute, args=(snapshot, last, now_s), name="evenload-forecast", daemon=True
            )
            self._thread.start()
        if self._cached is None:
            self._thread.join(_FIRST_WAIT_S)
        return self._jobs()

    def _jobs(self) -> Mapping[str, Forecast]:
        return {} if self._cached is None else self._cached.jobs

    def _is_fresh(self, last: int) -> bool:
        seen = self._cached
        if seen is None:
            return False
        return time.monotonic() - seen.done_s < (_FRESH_S if last == seen.last else 0.0) + _COST_FACTOR * seen.cost_s

    def _compute(self, snapshot: QueueSnapshot, last: int, now_s: float) -> None:
        began_s = time.monotonic()
        known = forecast(snapshot, now_s, _MAX_FORECASTS)
        done_s = time.monotonic()
        self._cached = _CachedForecast(last, done_s, done_s - began_s, known)
