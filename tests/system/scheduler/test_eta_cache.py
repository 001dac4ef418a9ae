"""The daemon's looks ahead: at once in a small queue, never long in the way in a large one."""

from __future__ import annotations

import time

import pytest

from evenload.scheduler.core import events
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.values import Device, JobSpec
from evenload.scheduler.daemon.eta_cache import EtaCache
from tests.system.scheduler.daemons import until


def _queue_state(num_jobs: int) -> QueueState:
    now_s = time.time()
    queue_state = QueueState([events.DeviceAdded(now_s, Device("cpu:0", "local", "cpu"))])
    for number in range(num_jobs):
        queue_state.apply(events.Submitted(now_s, str(number), JobSpec("ann", estimate_s=100.0)))
    return queue_state


def test_a_small_queue_is_looked_at_while_the_caller_waits() -> None:
    cache, queue_state = EtaCache(), _queue_state(3)
    known = cache.forecasts(queue_state.snapshot(), last=4, now_s=0.0)
    assert known["0"].reason == "gets its devices now" and known["2"].start_s is not None
    assert cache.forecasts(queue_state.snapshot(), last=4, now_s=0.0) is known, "nothing happened since"


@pytest.mark.parametrize("num_jobs", [20_000])
def test_a_large_queue_is_looked_at_beside(num_jobs: int) -> None:
    cache, queue_state = EtaCache(), _queue_state(num_jobs)
    first = cache.forecasts(queue_state.snapshot(), last=1, now_s=0.0)
    assert first == {} or len(first) == num_jobs, "all, or nothing yet"
    until(lambda: len(cache.forecasts(queue_state.snapshot(), last=1, now_s=0.0)) == num_jobs, lambda: "no look came")
    thread = cache._thread
    assert thread is not None
    thread.join(60.0)
    began_s = time.thread_time()
    known = cache.forecasts(queue_state.snapshot(), last=2, now_s=0.0)
    assert time.thread_time() - began_s < 0.5 and len(known) == num_jobs, "what the last look saw"
    thread = cache._thread
    assert thread is not None
    thread.join(60.0)
