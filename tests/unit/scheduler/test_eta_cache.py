"""The daemon's forecasts: as of now, or of a moment ago where computing them takes long."""

from __future__ import annotations

import pytest

from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.forecast import eta_cache
from evenload.scheduler.forecast.eta_cache import EtaCache
from tests.unit.scheduler.queue import Queue, box


def _snapshot(num_jobs: int) -> QueueSnapshot:
    queue = Queue(box(1))
    for _ in range(num_jobs):
        queue.submit(1, estimate_s=100.0)
    return queue.queue_state.snapshot()


def test_forecasts_are_those_of_the_present() -> None:
    cache = EtaCache()
    known = cache.forecasts(_snapshot(3), last=4, now_s=0.0)
    assert known["j1"].reason == "gets its devices now" and known["j3"].start_s is not None
    assert cache.forecasts(_snapshot(3), last=4, now_s=0.0) is known, "nothing happened since"


def test_forecasts_that_took_long_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eta_cache, "_COST_FACTOR", 1e9)  # as if they had taken long
    cache = EtaCache()
    known = cache.forecasts(_snapshot(3), last=4, now_s=0.0)
    assert cache.forecasts(_snapshot(4), last=5, now_s=0.0) is known
    assert set(cache.forecasts(_snapshot(4), last=5, now_s=0.0, job="j4")) == {"j1", "j2", "j3", "j4"}
