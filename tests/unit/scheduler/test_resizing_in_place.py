"""Elastic jobs that change their devices without a stop: what policies do with them, and what the records say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evenload.errors import QueueError
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Device, JobSpec, Needs, Settings
from evenload.scheduler.simulator.arrivals import JobArrival
from evenload.scheduler.simulator.programs import TimedProgram
from evenload.scheduler.simulator.simulate import Conditions, simulate
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.ledger import RunnerStarted
from evenload.scheduler.store.writer import QueueStore
from tests.unit.scheduler.queue import Queue, box, spec

IN_PLACE = spec((1, 2), resize_s=1.0)


def _resized(queue: Queue, name: str) -> None:
    job = queue.queue_state.jobs[name]
    queue.apply(events.Resized(queue.now_s, name, job.target, job.attempt + 1, 1.0))


@pytest.mark.parametrize("policy", ["default", "goodput"])
def test_it_gives_devices_back_at_once_and_that_is_no_preemption(policy: str) -> None:
    queue = Queue(box(2), policy=policy)
    block, name = queue.submit(1), queue.submit(IN_PLACE)
    queue.settle()
    queue.ended(block)
    queue.now_s = 10.0
    queue.decide()
    _resized(queue, name)
    assert len(queue.devices(name)) == 2
    for round in range(1, 11):
        queue.now_s += 10.0  # far less than min_run_s, and more often than any job is preempted in an hour
        short = queue.submit(spec(1, estimate_s=5.0))
        (request,) = queue.decide()
        assert isinstance(request, events.ResizeRequested) and not request.is_forced and len(request.devices) == 1
        _resized(queue, name)
        queue.settle()
        assert queue.running == {name, short} and queue.queue_state.jobs[name].attempt == 2 * round + 1
        queue.ended(short)
        queue.now_s += 10.0
        (request,) = queue.decide()
        assert isinstance(request, events.ResizeRequested) and set(request.devices) > set(queue.devices(name))
        _resized(queue, name)
    job = queue.queue_state.jobs[name]
    assert not job.preempted_s and job.num_restarts == 0
    assert job.service_until(queue.now_s) == pytest.approx(10.0 + 10 * 30.0), "one device for 110 s, two for 100 s"


@pytest.mark.parametrize("policy", ["default", "goodput"])
def test_a_run_that_has_not_reported_yet_keeps_its_devices(policy: str) -> None:
    """It can change its devices before the queue knows that it saves: nobody wants these, so it isn't made smaller."""
    queue = Queue(box(2), policy=policy)
    name = queue.submit(replace(IN_PLACE, preemptible=False))
    queue.settle()
    queue.now_s = 10.0
    assert queue.decide() == () and len(queue.devices(name)) == 2


def test_its_changes_protect_it_no_longer_than_its_start() -> None:
    queue = Queue(box(2), min_run_s=300.0)
    block, name = queue.submit(1), queue.submit(IN_PLACE)
    queue.settle()
    queue.ended(block)
    queue.now_s = 290.0
    queue.decide()
    _resized(queue, name)
    other = queue.submit(spec(2, estimate_s=5.0))
    assert queue.decide() == ()
    queue.now_s = 310.0
    (request,) = queue.decide()
    assert isinstance(request, events.StopRequested) and request.job == name
    queue.apply(events.Yielded(queue.now_s, name))
    queue.settle()
    assert queue.running == {other}


def test_it_grows_beside_its_own_devices() -> None:
    queue = Queue(box(4))
    blocks = [queue.submit(1, name=f"b{index}") for index in range(4)]
    queue.settle()
    queue.ended(blocks[3])
    name = queue.submit(IN_PLACE)
    queue.settle()
    own = queue.devices(name)
    queue.ended(blocks[0])
    queue.ended(blocks[1])
    queue.decide()
    target = queue.queue_state.jobs[name].target
    assert len(target) == 2 and set(own) < set(target)


def test_one_that_is_stopped_while_it_grows_holds_its_new_devices_until_it_has_ended() -> None:
    queue = Queue(box(2))
    block = queue.submit(1)
    name = queue.submit(IN_PLACE)
    queue.settle()
    queue.ended(block)
    queue.decide()
    queue.apply(events.StopRequested(queue.now_s, name, JobState.CANCELLED))
    job = queue.queue_state.jobs[name]
    assert (len(job.devices), job.target, job.attempt) == (2, (), 2), "ranks may run on both"
    assert not job.resizes_in_place, "it is stopped"
    waiting = queue.submit(1)
    assert queue.decide() == () and queue.queue_state.jobs[waiting].state is JobState.PENDING
    queue.apply(events.Yielded(queue.now_s, name))
    queue.settle()
    assert queue.running == {waiting}


def test_a_refused_change_is_a_stop_and_a_start_and_says_why() -> None:
    queue = Queue(box(2))
    block = queue.submit(1)
    name = queue.submit(IN_PLACE)
    queue.settle()
    queue.ended(block)
    queue.decide()
    queue.apply(events.ResizeRefused(queue.now_s, name, "its shares are fixed"))
    job = queue.queue_state.jobs[name]
    assert job.spec.resize_s is None and not job.resizes_in_place
    assert job.reason == "1 → 2 devices, by a stop and a start: its shares are fixed"
    queue.apply(events.Yielded(queue.now_s, name))
    assert queue.queue_state.jobs[name].state is JobState.STARTING and len(queue.devices(name)) == 2
    with pytest.raises(QueueError, match="not about to continue on other devices"):
        queue.apply(events.ResizeRefused(queue.now_s, name, "again"))


def test_the_store_has_a_row_for_each_number_of_devices_and_the_runner_of_the_first(tmp_path: Path) -> None:
    wide = spec((1, 2), resize_s=1.0)
    with QueueStore(tmp_path / "queue", holder="test") as store:
        for device in box(2):
            store.record(events.DeviceAdded(0.0, device))
        one, both = ("gpu0.0",), ("gpu0.0", "gpu0.1")
        store.record(events.Submitted(0.0, "j", wide))
        store.record(events.Placed(0.0, "j", one, 1))
        store.commit()
        runner = store.fence("j")
        store.record(RunnerStarted(1.0, "j", 1, {"pid": 7}), fence=runner)
        store.record(events.JobStarted(1.0, "j"), fence=runner)
        store.record(events.ResizeRequested(10.0, "j", both, "1 → 2 devices"))
        with pytest.raises(QueueError, match="was to continue on"):
            store.record(events.Resized(12.0, "j", ("gpu0.1",), 2))
        store.record(events.Resized(12.0, "j", both, 2, 2.0))
        store.record(events.ResizeRequested(20.0, "j", one, "2 → 1 devices"))
        store.record(events.Resized(20.0, "j", both, 2, reason="it keeps them"))
        store.record(events.ResizeRequested(21.0, "j", one, "2 → 1 devices"))
        store.record(events.Resized(22.0, "j", one, 3))
        store.commit()
        record = store.attempt("j")
        assert record is not None and record.runner_fence == runner and record.fence.attempt == 3
        assert store.queue_state.jobs["j"].service_until(30.0) == 12.0 + 2 * 10.0 + 8.0
    assert audit(tmp_path / "queue") == []


def test_a_simulation_counts_the_small_cost() -> None:
    """A wide job and short ones that take a device from it each ten minutes: without stops it ends earlier."""

    def arrival(name: str, time_s: float, what: JobSpec, seconds: float) -> JobArrival:
        return JobArrival(time_s, name, what, lambda: TimedProgram(seconds, what.needs.min_devices, 1.0))

    def end_s(resize_s: float | None) -> tuple[float, int]:
        wide = replace(JobSpec("ann", Needs(1, 2), restart_s=100.0), resize_s=resize_s)
        shorts = [arrival(f"s{i}", 600.0 * i, JobSpec("bob", Needs(1, 1)), 60.0) for i in range(1, 6)]
        devices = tuple(Device(f"d{index}", "host") for index in range(2))
        conditions = Conditions(devices, Settings(min_run_s=0.0, restart_s=0.0))
        log: list[events.QueueEvent] = []
        outcome = simulate([arrival("wide", 0.0, wide, 7200.0), *shorts], conditions, log)
        ended_s = next(job.ended_s for job in outcome.jobs if job.job == "wide")
        return ended_s, sum(isinstance(event, events.Resized) for event in log)

    (in_place_s, num_in_place), (stopped_s, num_stopped) = end_s(2.0), end_s(None)
    assert num_stopped == 0 and num_in_place >= 10
    assert in_place_s < stopped_s - 5 * 100.0
