"""What jobs are told of their future, against what then happens."""

from __future__ import annotations

import time

import pytest

from evenload.scheduler.core import events
from evenload.scheduler.core.values import POLICIES, After, Limits, Reservation
from evenload.scheduler.forecast.forecast import Forecast, forecast
from tests.unit.scheduler.queue import Queue, box, spec


def look(queue: Queue, most: int | None = None) -> dict[str, Forecast]:
    return dict(forecast(queue.queue_state.snapshot(), queue.now_s, most))


def test_a_line_of_known_jobs_is_played_through() -> None:
    queue = Queue(box(1), policy="fifo", restart_s=10.0)
    first = queue.submit(1, estimate_s=100.0)
    queue.settle()
    second = queue.submit(1, estimate_s=50.0)
    third = queue.submit(1, estimate_s=20.0)
    told = look(queue)
    assert told[first] == Forecast("", None, 100.0)
    assert (told[second].start_s, told[second].end_s) == (100.0, 150.0)
    assert (told[third].start_s, told[third].end_s) == (150.0, 170.0)
    assert "are taken" in told[second].reason and told[third].reason


def test_what_is_not_known_is_not_guessed() -> None:
    queue = Queue(box(2), policy="fifo")
    queue.submit(1, name="endless")
    queue.submit(1, name="known", estimate_s=300.0)
    queue.settle()
    queue.submit(1, name="next")
    queue.submit(1, name="after next", estimate_s=10.0)
    told = look(queue)
    assert told["endless"].end_s is None and told["known"].end_s == 300.0
    assert (told["next"].start_s, told["next"].end_s) == (300.0, None)
    assert told["after next"].start_s is None


def test_now_means_now_and_a_victim_stands_in_line_again() -> None:
    queue = Queue(box(2), policy="srpt", min_run_s=60.0, restart_s=0.0)
    queue.submit(2, name="long", estimate_s=10_000.0)
    queue.settle()
    queue.now_s = 20.0
    queue.submit(1, name="short", estimate_s=100.0)
    told = look(queue)
    assert (told["short"].start_s, told["short"].end_s) == (60.0, 160.0)  # once the long one has had its minute
    assert told["long"].end_s == pytest.approx(160.0 + 9980.0)
    queue.now_s = 70.0
    told = look(queue)
    assert told["short"].start_s == 70.0 and "that are to stop" in told["short"].reason
    assert told["long"].reason == "a job that goes first needs its devices"


def test_gangs_wait_for_one_host_and_for_devices_that_they_can_use() -> None:
    queue = Queue([*box(2, 2, "a"), *box(2, 1, "b")], policy="fifo", restart_s=0.0)
    for num, ends_s in enumerate((100.0, 300.0, 200.0, 250.0, 50.0, 60.0)):
        queue.submit(1, estimate_s=ends_s, name=f"r{num}")
    queue.settle()
    queue.submit(2, name="apart", estimate_s=10.0, kinds=("a",))
    told = look(queue)
    assert told["apart"].start_s == 200.0  # of the four of kind a, the second to end
    queue.apply(events.Cancelled(0.0, "apart"))
    queue.submit(2, name="together", estimate_s=10.0, kinds=("a",), one_host=True)
    queue.submit(1, name="b", estimate_s=10.0, kinds=("b",))
    told = look(queue)
    assert told["together"].start_s == 250.0  # r2 and r3 share a host
    assert told["b"].start_s == 50.0


def test_limits_arrays_and_dependencies_hold() -> None:
    queue = Queue(box(8), policy="fifo", restart_s=0.0)
    queue.apply(events.LimitsSet(0.0, "ann", Limits(max_devices=2)))
    queue.submit(2, user="ann", name="a1", estimate_s=100.0)
    queue.submit(2, user="ann", name="a2", estimate_s=100.0)
    queue.submit(spec(1, user="bob", array="x", array_limit=1, estimate_s=40.0), name="x1")
    queue.submit(spec(1, user="bob", array="x", array_limit=1, estimate_s=40.0), name="x2")
    queue.submit(spec(1, user="bob", after=(After("x2"),), estimate_s=5.0), name="then")
    queue.submit(spec(1, user="bob", not_before_s=500.0, estimate_s=5.0), name="later")
    queue.settle()
    told = look(queue)
    assert told["a2"].start_s == 100.0 and "may have 2" in told["a2"].reason
    assert told["x2"].start_s == 40.0 and told["then"].start_s == 80.0 and told["later"].start_s == 500.0
    assert told["then"].reason == "waits for job x2 to end"


def test_nobody_is_promised_what_is_closed_or_held_back() -> None:
    queue = Queue(box(2), policy="fifo")
    queue.apply(events.DeviceClosed(0.0, "gpu0.1", "an external process holds it"))
    queue.submit(2, name="wide", estimate_s=10.0)
    queue.submit(1, name="held", estimate_s=10.0)
    queue.apply(events.JobHeld(0.0, "held"))
    told = look(queue)
    assert told["wide"].start_s is None and told["held"].start_s is None
    assert told["held"].reason == "its owner holds it back" and "closed" in told["wide"].reason


def test_reserved_devices_are_left_out() -> None:
    queue = Queue(box(2), policy="fifo")
    queue.apply(events.ReservationSet(0.0, Reservation("maintenance", frozenset({"gpu0.0"}), 0.0, 1e6, frozenset())))
    queue.submit(1, name="one", estimate_s=100.0)
    queue.settle()
    queue.submit(1, name="two", estimate_s=100.0)
    assert look(queue)["two"].start_s == 100.0


def test_only_the_first_in_line_are_worked_out_where_asked() -> None:
    queue = Queue(box(1), policy="fifo")
    names = [queue.submit(1, estimate_s=100.0) for _ in range(10)]
    queue.settle()
    told = look(queue, most=4)
    assert told[names[3]].start_s is not None and told[names[4]].start_s is None
    assert all(told[name].reason for name in names[1:])


@pytest.mark.parametrize("policy", POLICIES)
def test_every_job_is_told_something_under_every_policy(policy: str) -> None:
    queue = Queue(box(4, 2), policy=policy, min_run_s=0.0)
    for num in range(40):
        size = ((1, 4), 1, 2, 4)[num % 4]
        queue.submit(
            spec(size, user=("ann", "bob")[num % 2], estimate_s=2000.0 + 37 * num % 900, priority=num % 3 // 2)
        )
        queue.now_s += 20.0
        queue.settle()
    told = look(queue)
    assert list(told) == list(queue.queue_state.jobs)
    for name, job in queue.queue_state.jobs.items():
        if not job.devices:
            one = told[name]
            assert one.reason and one.start_s is not None and one.end_s is not None
            assert queue.now_s <= one.start_s < one.end_s


def test_a_thousand_jobs_cost_little() -> None:
    queue = Queue([], policy="default")
    for device in box(8, 125):
        queue.queue_state.apply(events.DeviceAdded(0.0, device))
    for num in range(1000):
        one_host = num % 5 == 0
        what = spec((1, 2, 4, 8)[num % 4], user=f"u{num % 30}", estimate_s=100.0 + num, one_host=one_host)
        queue.queue_state.apply(events.Submitted(0.0, f"j{num}", what))
    snapshot = queue.queue_state.snapshot()
    took_s = []
    for _ in range(3):
        began_s = time.process_time()
        assert len(forecast(snapshot, 0.0)) == 1000
        took_s.append(time.process_time() - began_s)
    assert min(took_s) < 0.5  # a tenth of that where nothing else runs


def test_place_in_line_is_that_of_the_policy_and_reasons_differ() -> None:
    """The last submitted has the least work, so it goes next; nobody's first start costs a restart."""
    queue = Queue(box(2), policy="srpt", min_run_s=1e9)
    running = queue.submit(2, estimate_s=600.0)
    queue.settle()
    names = [queue.submit(num, estimate_s=work_s) for num, work_s in ((1, 5000.0), (2, 900.0), (1, 300.0))]
    found = forecast(queue.queue_state.snapshot(), queue.now_s)
    assert [found[name].position for name in (running, *names)] == [None, 3, 2, 1]
    reasons = [found[name].reason for name in names]
    assert len(set(reasons)) == 3, reasons
    assert "it needs 2 devices, 0 that it can use are free; 1 job goes first" in reasons[1]
    assert all(f"job {running} ends next, in about 10 min" in reason for reason in reasons)
    assert found[names[2]].start_s == 600.0 and found[names[2]].end_s == 900.0


def test_the_job_that_ends_next_has_devices_that_the_waiting_one_can_use() -> None:
    """Another kind's jobs say nothing about it, and neither does one that ends after its start."""
    queue = Queue([*box(1, kind="a"), *box(1, kind="b")], min_run_s=1e9)
    soon, late = (queue.submit(1, kinds=(kind,), estimate_s=work_s) for kind, work_s in (("a", 300.0), ("b", 3000.0)))
    queue.settle()
    name = queue.submit(1, kinds=("b",), estimate_s=60.0)
    reason = forecast(queue.queue_state.snapshot(), queue.now_s)[name].reason
    assert f"job {late} ends next, in about 50 min" in reason and f"job {soon}" not in reason
