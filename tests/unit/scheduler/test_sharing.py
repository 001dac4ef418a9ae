"""Small jobs on one device, as the core decides: who joins whom, who has to leave, and that whole devices stay whole."""

from __future__ import annotations

from typing import Any

import pytest

from evenload.errors import ConfigError, QueueError
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import JobSpec, Limits, Needs, Reservation
from evenload.scheduler.forecast.forecast import forecast
from tests.unit.scheduler.queue import GIB, Queue, box, is_preemption, spec


def queue_of(num: int = 1, **settings: float | str | bool) -> Queue:
    return Queue(box(num, memory_bytes=24 * GIB), **settings)


def small(queue: Queue, gib: float = 4, **rest: Any) -> str:
    """A job of known size that may share."""
    return queue.submit(share_device=True, memory_bytes=int(gib * GIB), **rest)


def holders(queue: Queue) -> dict[str, tuple[str, ...]]:
    return queue.queue_state.holder


def test_small_jobs_share_while_their_peaks_fit() -> None:
    queue = queue_of(2)
    jobs = [small(queue, 6) for _ in range(5)]
    queue.settle()
    # 3 x 6 GiB x 1.2 fit into 24 GiB, 4 don't.
    assert holders(queue) == {"gpu0.0": tuple(jobs[:3]), "gpu0.1": tuple(jobs[3:])}


def test_no_more_than_so_many_share() -> None:
    queue = queue_of(1, max_sharers=2)
    jobs = [small(queue, 1) for _ in range(3)]
    queue.settle()
    assert holders(queue) == {"gpu0.0": tuple(jobs[:2])}
    queue.ended(jobs[0])
    queue.settle()
    assert holders(queue) == {"gpu0.0": tuple(jobs[1:])}


def test_nobody_else_comes_to_a_shared_device_and_nobody_shares_unasked() -> None:
    queue = queue_of(1)
    queue.submit(memory_bytes=4 * GIB)
    queue.settle()
    joiner = small(queue)
    assert queue.settle() == [] and queue.state(joiner) is JobState.PENDING
    queue = queue_of(1)
    small(queue)
    whole = queue.submit(memory_bytes=4 * GIB)
    assert len(queue.settle()) == 1 and queue.state(whole) is JobState.PENDING


def test_what_is_not_known_is_alone_until_it_is_measured() -> None:
    queue = queue_of(1)
    unknown, other = queue.submit(share_device=True), small(queue)
    queue.settle()
    assert queue.running == {unknown}
    queue.apply(events.MemoryMeasured(queue.now_s, unknown, 10 * GIB))
    queue.settle()
    assert queue.running == {unknown, other}


def test_what_jobs_like_it_took_is_as_good_as_a_measurement() -> None:
    queue = queue_of(1)
    small(queue)
    second = queue.submit(spec(share_device=True, peak_bytes=3 * GIB))
    queue.settle()
    assert second in queue.running


def test_what_was_measured_counts_not_what_was_said() -> None:
    queue = queue_of(1)
    small(queue, 20)
    other = small(queue, 10)
    queue.settle()
    assert other not in queue.running
    queue.apply(events.MemoryMeasured(queue.now_s, "j1", 2 * GIB))
    queue.settle()
    assert queue.running == {"j1", other}


def test_a_whole_device_is_only_taken_where_none_can_be_joined() -> None:
    queue = queue_of(2)
    jobs = [small(queue, 2) for _ in range(3)]
    queue.settle()
    assert holders(queue) == {"gpu0.0": tuple(jobs)}


def test_the_emptiest_is_joined_first_and_then_the_one_that_is_filled_best() -> None:
    queue = queue_of(3)
    for gib in (12, 9.5, 11.5):  # of 20 each, without the margin
        small(queue, gib)
    queue.settle()
    assert [len(jobs) for jobs in holders(queue).values()] == [1, 1, 1]
    joiner = small(queue, 8)
    queue.settle()
    assert joiner in holders(queue)["gpu0.0"]
    one = small(queue, 2)
    queue.settle()
    assert one in holders(queue)["gpu0.2"]


def test_peaks_that_grow_too_large_send_the_youngest_away_whose_leaving_is_enough() -> None:
    queue = queue_of(1)
    first = small(queue, 6)
    queue.settle()
    queue.now_s += 10
    second = small(queue, 6)
    queue.settle()
    queue.now_s += 10
    third = small(queue, 1)
    queue.settle()
    assert len(queue.running) == 3
    queue.apply(events.MemoryMeasured(queue.now_s, first, 14 * GIB))
    assert queue.decide() == ()  # 21 of 24 GiB: it isn't let in any more, but it fits
    queue.apply(events.MemoryMeasured(queue.now_s, second, 12 * GIB))
    (stop,) = queue.decide()
    assert is_preemption(stop) and stop.job == second  # the third is younger, but its leaving isn't enough
    assert "27.0 GiB of its 24.0 GiB" in stop.reason
    queue.yielded(second)
    assert queue.decide() == () and queue.queue_state.jobs[second].peak_bytes == 12 * GIB
    queue.ended(first)
    queue.settle()
    assert queue.running == {second, third}


def test_who_can_not_be_stopped_is_not() -> None:
    queue = queue_of(1)
    for _ in range(2):
        small(queue, preemptible=False)
    queue.settle()
    queue.apply(events.MemoryMeasured(queue.now_s, "j1", 20 * GIB))
    queue.apply(events.MemoryMeasured(queue.now_s, "j2", 20 * GIB))
    assert queue.decide() == ()


def test_who_needs_the_whole_device_has_all_of_them_stopped() -> None:
    queue = queue_of(1)
    followers = [small(queue, priority=-1) for _ in range(3)]
    queue.settle()
    queue.now_s += 1000
    boss = queue.submit()
    commands = queue.decide()
    assert {c.job for c in commands if is_preemption(c)} == set(followers)
    queue.yielded(followers[0])
    queue.yielded(followers[1])
    assert queue.decide() == ()  # not before the last has left
    queue.yielded(followers[2])
    assert [c.job for c in queue.decide()] == [boss]


def test_one_that_can_not_be_stopped_keeps_all_of_them() -> None:
    queue = queue_of(1)
    small(queue, priority=-1)
    small(queue, priority=-1, preemptible=False)
    queue.settle()
    queue.now_s += 1000
    queue.submit(priority=1)
    assert queue.decide() == ()


def test_one_that_is_nearly_done_stands_for_all_of_them() -> None:
    queue = queue_of(1)
    small(queue, estimate_s=50000.0), small(queue, estimate_s=1500.0)
    queue.settle()
    queue.now_s += 1000
    between = queue.submit(estimate_s=5000.0)
    assert queue.decide() == ()
    queue.ended("j2")
    assert [c.job for c in queue.decide()] == ["j1"]
    queue.yielded("j1")
    assert [c.job for c in queue.decide()] == [between]


def test_a_short_job_joins_a_long_one_instead_of_displacing_it() -> None:
    queue = queue_of(1)
    long = small(queue, estimate_s=50000.0)
    queue.settle()
    queue.now_s += 1000
    short = small(queue, estimate_s=10.0)
    assert queue.settle() == [events.Placed(queue.now_s, short, ("gpu0.0",), 1)]
    assert queue.running == {long, short}


def test_who_is_joined_is_not_displaced_in_the_same_plan() -> None:
    queue = queue_of(1)
    small(queue, estimate_s=50000.0)
    queue.settle()
    queue.now_s += 1000
    short = small(queue, estimate_s=10.0)
    queue.submit(estimate_s=20.0)
    assert [c.job for c in queue.decide()] == [short]


def test_joining_does_not_delay_the_first_in_line() -> None:
    queue = queue_of(1, policy="fifo")
    small(queue, estimate_s=100.0)
    queue.settle()
    queue.submit()  # is promised the device in 100 s
    longer, shorter = small(queue, estimate_s=500.0), small(queue, estimate_s=50.0)
    queue.settle()
    assert longer not in queue.running and shorter in queue.running


def test_a_device_that_stays_busy_anyway_may_be_joined_past_the_first_in_line() -> None:
    queue = Queue([*box(1, memory_bytes=24 * GIB), *box(1, kind="b", memory_bytes=24 * GIB)], policy="fifo")
    queue.submit(kinds=("b",), estimate_s=10.0)
    small(queue, estimate_s=1000.0)
    queue.settle()
    queue.submit()  # is promised gpu b in 10 s
    joiner = small(queue, estimate_s=500.0)
    queue.settle()
    assert queue.devices(joiner) == ("gpu0.0",)


def test_a_device_whose_job_can_not_be_stopped_may_be_joined_past_the_first_in_line() -> None:
    """Also where that job goes after the first in line."""
    queue = Queue([*box(1, memory_bytes=24 * GIB), *box(1, kind="b", memory_bytes=24 * GIB)])
    queue.submit(kinds=("b",), estimate_s=10.0, preemptible=False)
    small(queue, estimate_s=1000.0, preemptible=False, priority=-1)
    queue.settle()
    queue.submit(priority=1)  # is promised gpu b in 10 s
    joiner = small(queue, estimate_s=500.0, preemptible=False)
    queue.settle()
    assert queue.devices(joiner) == ("gpu0.0",)


def test_limits_count_each_who_shares() -> None:
    queue = queue_of(1)
    queue.apply(events.LimitsSet(0.0, "ann", Limits(max_devices=2)))
    queue.apply(events.LimitsSet(0.0, "bob", Limits(max_running=1)))
    anns, bobs = [small(queue) for _ in range(3)], [small(queue, user="bob") for _ in range(2)]
    queue.settle()
    assert queue.running == {*anns[:2], bobs[0]}
    array = [queue.submit(spec(share_device=True, peak_bytes=GIB, user="cyd", array="a", array_limit=1)) for _ in "ab"]
    queue.settle()
    assert len(queue.running & set(array)) == 1


def test_a_reservation_sends_away_only_those_whom_it_leaves_out() -> None:
    queue = queue_of(1)
    ann, bob = small(queue), small(queue, user="bob")
    queue.settle()
    queue.now_s += 10
    until_s = queue.now_s + 1000
    queue.apply(
        events.ReservationSet(
            queue.now_s, Reservation("r", frozenset(["gpu0.0"]), queue.now_s, until_s, frozenset(["bob"]))
        )
    )
    assert [c.job for c in queue.decide()] == [ann]
    queue.yielded(ann)
    queue.decide()
    assert queue.running == {bob}


def test_a_hard_limit_ends_one_alone() -> None:
    queue = queue_of(1)
    ends, stays = small(queue, hard_limit_s=100.0), small(queue)
    queue.settle()
    queue.now_s += 200
    queue.submit(priority=-1)
    assert [c.job for c in queue.decide()] == [ends]
    queue.ended(ends, is_success=False)
    assert queue.decide() == () and queue.running == {stays}


def test_a_closed_device_is_not_joined() -> None:
    queue = queue_of(1)
    small(queue)
    queue.settle()
    queue.apply(events.DeviceClosed(queue.now_s, "gpu0.0", "an external process"))
    small(queue)
    assert queue.decide() == ()
    queue.apply(events.DeviceOpened(queue.now_s, "gpu0.0"))
    assert len(queue.decide()) == 1


def test_everybody_who_shares_is_foreseen() -> None:
    queue = queue_of(1)
    small(queue, estimate_s=100.0), small(queue, estimate_s=300.0)
    queue.settle()
    whole = queue.submit(priority=-1, estimate_s=50.0)
    told = forecast(queue.queue_state.snapshot(), queue.now_s)
    assert told["j1"].end_s == 100.0 and told["j2"].end_s == 300.0
    assert told[whole].start_s == 300.0


def test_the_book_lets_nobody_onto_a_device_who_may_not() -> None:
    queue = queue_of(1)
    first = small(queue)
    queue.settle()
    whole = queue.submit()
    with pytest.raises(QueueError, match=f"which job {first} holds"):
        queue.apply(events.Placed(queue.now_s, whole, ("gpu0.0",), 1))
    second = small(queue)
    queue.apply(events.StopRequested(queue.now_s, first))
    with pytest.raises(QueueError, match=f"which job {first} holds"):
        queue.apply(events.Placed(queue.now_s, second, ("gpu0.0",), 1))
    with pytest.raises(QueueError, match=f"held by job {first}"):
        queue.apply(events.DeviceRemoved(queue.now_s, "gpu0.0"))
    with pytest.raises(ConfigError, match="share_device: such a job has one device"):
        JobSpec("ann", Needs(2, 2), share_device=True)
