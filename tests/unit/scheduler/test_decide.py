"""What is decided: backfill, preemption and its bounds, limits, reservations, dependencies, time."""

from __future__ import annotations

import pytest

from evenload.errors import QueueError
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import After, Device, Limits, Reservation, Settings
from tests.unit.scheduler.queue import Queue, box, is_preemption, spec


def test_an_empty_queue_decides_nothing() -> None:
    assert Queue(box(2)).decide() == ()
    assert Queue([]).decide() == ()


def test_a_job_starts_once_and_on_devices_that_are_free() -> None:
    queue = Queue(box(2))
    job = queue.submit(2)
    (start,) = queue.decide()
    assert isinstance(start, events.Placed) and start.attempt == 1 and set(start.devices) == {"gpu0.0", "gpu0.1"}
    assert queue.decide() == ()
    other = queue.submit(1)
    assert queue.decide() == () and other in queue.waits()
    queue.began(job)
    queue.ended(job)
    assert [c.job for c in queue.decide()] == [other]


class TestBackfill:
    def fill(self, **rest: float) -> Queue:
        """Four devices, two of them taken for 1,000 s more; a job of four is first in line."""
        queue = Queue(box(4), policy="fifo", **rest)
        queue.submit(2, name="runs", estimate_s=1000.0)
        queue.settle()
        queue.submit(4, name="first", estimate_s=100.0)
        return queue

    def test_short_jobs_pass_and_long_ones_wait(self) -> None:
        queue = self.fill()
        queue.submit(1, name="long", estimate_s=2000.0)
        queue.submit(1, name="unknown")
        queue.submit(1, name="short", estimate_s=900.0)
        queue.settle()
        assert queue.running == {"runs", "short"}
        assert queue.waits()["long"] == "would delay job first, which is first in line"

    def test_what_the_first_leaves_over_may_be_taken_for_any_time(self) -> None:
        queue = Queue(box(4), policy="fifo")
        queue.submit(2, name="runs", estimate_s=1000.0)
        queue.settle()
        queue.submit(3, name="first")
        queue.submit(1, name="long", estimate_s=1e6)
        queue.submit(1, name="longer", estimate_s=1e6)
        queue.settle()
        assert queue.running == {"runs", "long"}

    def test_nobody_passes_where_no_end_is_known(self) -> None:
        queue = Queue(box(4), policy="fifo")
        queue.submit(2, name="runs")
        queue.settle()
        queue.submit(4, name="first")
        queue.submit(1, name="short", estimate_s=1.0)
        queue.submit(1, name="other")
        queue.settle()
        assert queue.running == {"runs"}

    def test_without_backfill_nobody_passes_at_all(self) -> None:
        queue = self.fill(backfill=False)
        queue.submit(1, name="short", estimate_s=1.0)
        queue.settle()
        assert queue.running == {"runs"}

    def test_progress_tells_more_than_the_estimate(self) -> None:
        queue = self.fill()
        queue.now_s = 500.0
        queue.report("runs", done=10.0, total=1000.0, rate=0.1)  # 9,900 s more, not 500
        queue.submit(1, name="long", estimate_s=2000.0)
        queue.settle()
        assert queue.running == {"runs", "long"}

    def test_another_kind_is_not_kept_free_for_the_first(self) -> None:
        queue = Queue([*box(2, 1, "a"), *box(2, 1, "b")], policy="fifo")
        queue.submit(spec(1, kinds=("a",)), name="runs")
        queue.settle()
        queue.submit(spec(2, kinds=("a",)), name="first")
        queue.submit(spec(2, kinds=("b",)), name="other")
        queue.settle()
        assert queue.running == {"runs", "other"}

    def test_a_job_that_fits_nowhere_holds_nobody_up(self) -> None:
        queue = Queue(box(4), policy="fifo")
        queue.submit(4, name="first")
        queue.apply(events.DeviceClosed(0.0, "gpu0.0", "broken"))
        queue.submit(1, name="small")
        queue.settle()
        assert queue.running == {"small"}
        assert "closed" in queue.waits()["first"]

    def test_a_gang_for_one_host_keeps_that_host_alone(self) -> None:
        queue = Queue(box(2, 2), policy="fifo")
        queue.submit(1, name="short", estimate_s=100.0)
        queue.submit(2, name="long", estimate_s=9000.0)
        queue.settle()
        queue.submit(spec(2, one_host=True), name="first")
        queue.submit(1, name="later", estimate_s=1e5)
        queue.settle()
        assert "later" not in queue.running
        queue.now_s = 100.0
        queue.ended("short")
        queue.settle()
        assert "first" in queue.running


class TestPreemption:
    def test_a_higher_class_displaces_at_once_the_least_deserving_and_no_more(self) -> None:
        queue = Queue(box(4), policy="priority")
        for name in ("one", "two", "three", "four"):
            queue.submit(1, name=name)
            queue.now_s += 1
        queue.settle()
        queue.submit(2, name="urgent", priority=1)
        commands = queue.decide()
        assert [c.job for c in commands] == ["three", "four"] and all(is_preemption(c) for c in commands)
        assert queue.decide() == ()
        queue.yielded("four")
        assert queue.decide() == () and queue.waits()["urgent"].startswith(
            "waits for devices of jobs that are stopping"
        )
        queue.yielded("three")
        assert [c.job for c in queue.decide()] == ["urgent"]

    def test_what_comes_free_is_kept_for_whom_it_was_freed(self) -> None:
        queue = Queue(box(2), policy="priority")
        queue.submit(1, name="one")
        queue.submit(1, name="two")
        queue.settle()
        queue.submit(2, name="urgent", priority=1)
        queue.decide()
        queue.yielded("one")
        queue.submit(1, name="small")
        assert queue.decide() == ()

    def test_minimum_run_time_holds_within_a_class(self) -> None:
        queue = Queue(box(1), policy="srpt", min_run_s=300.0)
        queue.submit(1, name="long", estimate_s=1e5)
        queue.settle()
        queue.submit(1, name="short", estimate_s=10.0)
        queue.now_s = 299.0
        assert queue.decide() == ()
        queue.now_s = 300.0
        assert [c.job for c in queue.decide()] == ["long"]

    def test_no_job_is_preempted_more_often_than_the_bound(self) -> None:
        queue = Queue(box(1), policy="srpt", min_run_s=0.0, max_preemptions_per_hour=2)
        queue.submit(1, name="long", estimate_s=1e6)
        queue.settle()
        times = []
        for step in range(200):
            queue.now_s = step * 60.0
            queue.submit(1, estimate_s=10.0)
            commands = queue.settle()
            times += [queue.now_s for c in commands if is_preemption(c) and c.job == "long"]
            while short := queue.running - {"long"}:
                queue.now_s += 1.0
                queue.ended(*short)
                queue.settle()
        assert len(times) > 4
        assert all(sum(t - 3600 < other <= t for other in times) <= 2 for t in times)

    def test_a_job_that_cannot_stop_is_left_alone(self) -> None:
        queue = Queue(box(1), policy="priority")
        queue.submit(1, name="stubborn", preemptible=False)
        queue.settle()
        queue.submit(1, name="urgent", priority=5)
        assert queue.decide() == ()

    def test_jobs_below_zero_take_what_is_idle_and_give_it_back_at_once(self) -> None:
        queue = Queue(box(2), max_preemptions_per_hour=0)
        queue.submit(1, name="idle", priority=-1)
        queue.submit(1, name="idler", priority=-1)
        queue.settle()
        assert queue.running == {"idle", "idler"}
        queue.submit(2, name="work")
        queue.settle()
        assert queue.running == {"work"}

    def test_a_gang_blocked_by_young_jobs_gets_its_turn(self) -> None:
        queue = Queue(box(4), policy="default", min_run_s=100.0)
        for _ in range(4):
            queue.submit(1, estimate_s=5000.0)
        queue.settle()
        gang = queue.submit(4, estimate_s=10.0)
        for step in range(1, 30):
            queue.now_s = step * 10.0
            queue.submit(1, estimate_s=5000.0)
            queue.settle()
            if gang in queue.running:
                break
        assert queue.now_s <= 110.0

    def test_over_the_soft_limit_a_job_goes_on_only_where_nobody_waits(self) -> None:
        queue = Queue(box(1))
        queue.submit(1, name="slow", soft_limit_s=100.0, estimate_s=1000.0)
        queue.settle()
        queue.now_s = 150.0
        assert queue.decide() == ()
        queue.submit(1, name="other", estimate_s=1e6)
        queue.settle()
        assert queue.running == {"other"}


def test_over_the_hard_limit_a_job_is_ended() -> None:
    queue = Queue(box(1))
    job = queue.submit(1, hard_limit_s=100.0)
    queue.settle()
    queue.now_s = 99.0
    assert queue.decide() == ()
    queue.now_s = 100.0
    (end,) = queue.decide()
    assert (
        isinstance(end, events.StopRequested)
        and end.then is JobState.FAILED
        and end.reason == "its time limit of 2 min is over"
    )
    queue.yielded(job)
    assert queue.state(job) is JobState.FAILED


class TestLimits:
    def test_devices_and_running_jobs_of_a_user(self) -> None:
        queue = Queue(box(8))
        queue.apply(events.LimitsSet(0.0, "ann", Limits(max_devices=3)))
        queue.apply(events.LimitsSet(0.0, "bob", Limits(max_running=1)))
        for num in (2, 2, 1):
            queue.submit(num, user="ann")
        for num in (1, 1):
            queue.submit(num, user="bob")
        queue.settle()
        assert queue.running == {"j1", "j3", "j4"}
        waits = queue.waits()
        assert waits["j2"] == "ann has 3 devices and may have 3"
        assert waits["j5"] == "bob has 1 jobs running and may have 1"

    def test_an_elastic_job_grows_up_to_the_limit_only(self) -> None:
        queue = Queue(box(8), policy="goodput")
        queue.apply(events.LimitsSet(0.0, "ann", Limits(max_devices=3)))
        queue.submit((1, 8), name="elastic", rates=tuple(float(k) for k in range(1, 9)), total=1e6)
        queue.settle()
        assert len(queue.devices("elastic")) == 3

    @pytest.mark.parametrize("policy", ["default", "fair_share", "goodput", "cost"])
    def test_jobs_that_grow_in_one_plan_stay_within_it_together(self, policy: str) -> None:
        queue = Queue(box(8), policy=policy)
        queue.submit(6, name="large", user="bob")
        queue.settle()
        for most, name in enumerate(("one", "two"), start=1):
            queue.apply(events.LimitsSet(0.0, "ann", Limits(max_devices=most)))
            queue.submit((1, 8), name=name)
            queue.settle()
        assert len(queue.devices("one")) == len(queue.devices("two")) == 1
        queue.apply(events.LimitsSet(0.0, "ann", Limits(max_devices=4)))
        queue.now_s = 1000.0
        queue.ended("large")
        queue.submit(1, name="behind", priority=-1)
        queue.settle()
        assert len(queue.devices("one")) + len(queue.devices("two")) + len(queue.devices("behind")) == 4

    def test_growth_onto_devices_that_are_coming_counts_too(self) -> None:
        queue = Queue([*box(8), *box(1, kind="cpu")], policy="goodput")
        queue.submit(6, name="large", user="bob", kinds=("gpu",))
        queue.settle()
        queue.submit((1, 8), name="one", kinds=("gpu",))
        queue.settle()
        assert len(queue.devices("one")) == 2
        queue.apply(events.LimitsSet(0.0, "ann", Limits(max_devices=4)))
        queue.now_s = 1000.0
        queue.apply(events.StopRequested(queue.now_s, "large", JobState.CANCELLED, "cancelled"))
        queue.submit(1, name="behind", kinds=("cpu",), priority=-1)
        queue.decide()
        assert queue.waits()["behind"] == "ann has 4 devices and may have 4"
        queue.yielded("large")
        queue.settle()
        assert len(queue.devices("one")) == 4

    def test_too_many_queued_or_too_large_is_refused_with_the_reason(self) -> None:
        queue = Queue([*box(2, 2, "a"), *box(1, 1, "b")])
        queue.apply(events.LimitsSet(0.0, "ann", Limits(max_queued=1, max_devices=2)))
        assert queue.queue_state.refusal(spec(1)) is None
        queue.submit(1)
        assert queue.queue_state.refusal(spec(1)) == "ann has 1 jobs in the queue and may have 1"
        said = queue.queue_state.refusal(spec(3, user="bob", kinds=("b",)))
        assert said == "it asks for 3 devices of kind b; this queue has 1 such of its 5 devices"
        assert "in one host" in (queue.queue_state.refusal(spec(3, user="bob", one_host=True)) or "")
        assert queue.queue_state.refusal(spec(3, user="bob")) is None

    def test_elements_of_an_array(self) -> None:
        queue = Queue(box(8))
        for index in range(4):
            queue.submit(1, name=f"a{index}", array="a", array_limit=2)
        queue.settle()
        assert queue.running == {"a0", "a1"}
        queue.ended("a0")
        queue.settle()
        assert queue.running == {"a1", "a2"}


class TestDependencies:
    def test_conditions(self) -> None:
        queue = Queue(box(8))
        queue.submit(1, name="good")
        queue.submit(1, name="bad")
        for name, condition in (("good", "ok"), ("good", "failed"), ("bad", "ok"), ("bad", "failed"), ("bad", "any")):
            queue.submit(spec(1, after=(After(name, condition),)), name=f"{name} {condition}")
        queue.settle()
        assert queue.running == {"good", "bad"}
        queue.ended("good")
        queue.ended("bad", is_success=False)
        queue.settle()
        assert queue.running == {"good ok", "bad failed", "bad any"}
        assert queue.state("good failed") is queue.state("bad ok") is JobState.CANCELLED

    def test_a_chain_falls_whole(self) -> None:
        queue = Queue(box(8))
        queue.submit(1, name="a")
        queue.submit(spec(1, after=(After("a"),)), name="b")
        queue.submit(spec(1, after=(After("b"),)), name="c")
        queue.settle()
        queue.ended("a", is_success=False)
        queue.settle()
        assert queue.state("b") is queue.state("c") is JobState.CANCELLED

    def test_after_nobody(self) -> None:
        queue = Queue(box(1))
        assert (
            queue.queue_state.refusal(spec(1, after=(After("x"),)))
            == "it is to start after x, but there is no such job"
        )
        with pytest.raises(QueueError, match="no such job"):
            queue.submit(spec(1, after=(After("x"),)))


class TestReservations:
    def reserve(self, queue: Queue, *devices: str, start: float, end: float, users: tuple[str, ...] = ("bob",)) -> None:
        queue.apply(events.ReservationSet(0.0, Reservation("r", frozenset(devices), start, end, frozenset(users))))

    def test_only_its_users_get_in(self) -> None:
        queue = Queue(box(2))
        self.reserve(queue, "gpu0.0", start=0.0, end=100.0)
        queue.submit(1, user="ann", name="ann1")
        queue.submit(1, user="ann", name="ann2")
        queue.submit(1, user="bob", name="bob")
        queue.settle()
        assert queue.devices("ann1") == ("gpu0.1",) and queue.devices("bob") == ("gpu0.0",)
        queue.now_s = 100.0
        queue.ended("bob")
        queue.settle()
        assert queue.devices("ann2") == ("gpu0.0",)

    def test_before_it_begins_only_those_come_in_who_will_be_gone(self) -> None:
        queue = Queue(box(1), policy="fifo")
        self.reserve(queue, "gpu0.0", start=1000.0, end=2000.0)
        queue.submit(1, name="endless", preemptible=False)
        queue.submit(1, name="short", preemptible=False, hard_limit_s=900.0)
        queue.settle()
        assert queue.running == {"short"}

    def test_when_it_begins_the_others_leave(self) -> None:
        queue = Queue(box(2))
        queue.submit(2, name="ann")
        queue.settle()
        self.reserve(queue, "gpu0.1", start=1000.0, end=2000.0, users=())
        queue.now_s = 999.0
        assert queue.decide() == ()
        queue.now_s = 1000.0
        (preempt,) = queue.decide()
        assert is_preemption(preempt) and "reservation r" in preempt.reason


def test_held_and_not_before() -> None:
    queue = Queue(box(2))
    queue.submit(1, name="later", not_before_s=50.0)
    queue.submit(1, name="held")
    queue.apply(events.JobHeld(0.0, "held"))
    queue.settle()
    assert queue.running == set()
    assert queue.waits() == {"later": "is not to start for another 50 s", "held": "its owner holds it back"}
    queue.now_s = -22903.0
    assert queue.waits()["later"] == "is not to start for another 6:22 h"
    queue.now_s = 50.0
    queue.apply(events.Released(50.0, "held"))
    queue.settle()
    assert queue.running == {"later", "held"}
    assert queue.queue_state.jobs["later"].waited_s == 0.0


def test_nothing_starts_on_a_closed_device() -> None:
    queue = Queue(box(2))
    queue.apply(events.DeviceClosed(0.0, "gpu0.0", "held by pid 12 (python)"))
    queue.submit(1)
    queue.submit(1)
    queue.settle()
    assert queue.devices("j1") == ("gpu0.1",) and queue.running == {"j1"}
    queue.apply(events.DeviceClosed(0.0, "gpu0.1", "held by an external process"))
    queue.ended("j1")
    queue.settle()
    assert queue.running == set()


def test_failing_and_lost_jobs() -> None:
    queue = Queue(box(1), max_lost=2)
    queue.submit(1, name="retried", retries=1)
    queue.settle()
    queue.ended("retried", is_success=False)
    assert queue.state("retried") is JobState.PENDING
    queue.settle()
    queue.ended("retried", is_success=False)
    assert queue.state("retried") is JobState.FAILED
    queue.submit(1, name="unlucky")
    queue.settle()
    queue.apply(events.Lost(0.0, "unlucky", "host gone"))
    assert queue.state("unlucky") is JobState.PENDING
    queue.settle()
    queue.apply(events.Lost(0.0, "unlucky", "host gone"))
    assert queue.state("unlucky") is JobState.FAILED


def test_a_cancelled_job_ends_when_its_processes_are_gone() -> None:
    queue = Queue(box(1))
    job = queue.submit(1)
    queue.settle()
    with pytest.raises(QueueError, match="request its stop"):
        queue.apply(events.Cancelled(0.0, job))
    queue.apply(events.StopRequested(0.0, job, JobState.CANCELLED, "by ann"))
    assert queue.state(job) is JobState.PREEMPTING and queue.decide() == ()
    queue.apply(events.StopRequested(0.0, job, JobState.PENDING, "a preemption on top"))
    queue.yielded(job)
    assert queue.state(job) is JobState.CANCELLED and queue.queue_state.holder == {}


def test_times_and_use_are_accounted() -> None:
    queue = Queue(box(2), half_life_s=1000.0)
    queue.submit(2, name="a")
    queue.now_s = 10.0
    queue.settle()
    queue.now_s = 110.0
    queue.apply(events.StopRequested(110.0, "a"))
    queue.now_s = 115.0
    queue.yielded("a")
    job = queue.queue_state.jobs["a"]
    assert (job.waited_s, job.held_s, job.service_device_s) == (10.0, 105.0, 210.0)
    assert job.waited_until(125.0) == 20.0
    ann = queue.queue_state.users["ann"]
    assert ann.num_devices == 0 and 200 < ann.usage_device_s < 210
    assert ann.usage_until(1115.0, 1000.0) == pytest.approx(ann.usage_device_s / 2)


@pytest.mark.parametrize(
    "event",
    [
        events.Placed(0.0, "j1", ("nowhere",), 1),
        events.Placed(0.0, "j1", ("gpu0.0", "gpu0.0"), 1),
        events.Placed(0.0, "j1", ("gpu0.0",), 2),
        events.Placed(0.0, "j1", (), 1),
        events.JobStarted(0.0, "j1"),
        events.JobStarted(0.0, "nobody"),
        events.DeviceRemoved(0.0, "nowhere"),
        events.ReservationEnded(0.0, "r"),
        events.DeviceAdded(0.0, Device("gpu0.0", "elsewhere")),
    ],
)
def test_an_event_that_cannot_follow_is_refused_and_changes_nothing(event: events.QueueEvent) -> None:
    queue = Queue(box(1))
    queue.submit(1)
    before = queue.queue_state.snapshot()
    with pytest.raises(QueueError):
        queue.queue_state.apply(event)
    assert queue.queue_state.snapshot() == before


def test_settings_are_checked() -> None:
    for wrong in (
        {"policy": "best"},
        {"packing": "tight"},
        {"min_run_s": -1.0},
        {"las_thresholds_device_s": (5.0, 2.0)},
    ):
        with pytest.raises(ValueError, match=r"expected|there are"):
            Settings(**wrong)
