"""What each policy prefers, and the bound on starving under all of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import ConfigError
from evenload.scheduler.core import events
from evenload.scheduler.core.decide import decide
from evenload.scheduler.core.eligibility import PoolChoices
from evenload.scheduler.core.limits import LimitUse
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import POLICIES, Limits, Reservation, Settings
from evenload.scheduler.policies import policy_named
from evenload.scheduler.policies.devices_left import DevicesLeft
from evenload.scheduler.policies.elastic import Bid, Churn, share_out
from tests.unit.scheduler.queue import Queue, box, is_preemption, spec

LINEAR = tuple(float(k) for k in range(1, 17))
FLAT = (1.0, 1.05, 1.06, 1.06)


def test_all_policies_have_names_and_no_other_name_is_one() -> None:
    assert [policy_named(name).__name__ for name in POLICIES] == list(POLICIES)
    with pytest.raises(ConfigError, match="there is no such policy; there are default, fifo"):
        policy_named("best")


def test_fifo_is_in_order_of_submission_whatever_the_priority() -> None:
    queue = Queue(box(1), policy="fifo")
    queue.submit(1, name="first")
    queue.now_s = 1.0
    queue.submit(1, name="urgent", priority=9)
    queue.settle()
    assert queue.running == {"first"}


@pytest.mark.parametrize("policy", ["fifo", "priority", "las", "srpt"])
def test_elastic_jobs_start_with_what_no_other_job_needs_and_keep_it(policy: str) -> None:
    queue = Queue(box(8), policy=policy)
    queue.submit(2, name="rigid")
    queue.submit((1, 8), name="steep", rates=LINEAR[:8], total=1e6)
    queue.submit((1, 8), name="flat", rates=FLAT, total=1e6)
    queue.settle()
    assert [len(queue.devices(job)) for job in ("rigid", "steep", "flat")] == [2, 5, 1]
    queue.ended("rigid")
    assert queue.settle() == []  # those that run keep what they have
    queue.submit(2, name="fits")
    queue.submit((1, 4), name="beside one that waits", rates=LINEAR[:4], total=1e6)
    queue.submit(4, name="waits")
    queue.settle()
    assert not queue.devices("waits") and len(queue.devices("beside one that waits")) <= 1


@pytest.mark.parametrize("policy", ["fifo", "priority", "las", "srpt", "default", "fair_share", "cost"])
@pytest.mark.parametrize("limits", [Limits(max_devices=1), Limits(max_running=1)])
def test_jobs_that_their_users_limit_keeps_waiting_need_no_devices(policy: str, limits: Limits) -> None:
    queue = Queue(box(8), policy=policy)
    queue.apply(events.LimitsSet(0.0, "bob", limits))
    for _ in range(10):
        queue.submit(1, user="bob")
    queue.submit((1, 8), name="elastic")
    queue.settle()
    assert len(queue.devices("elastic")) == 7


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "goodput"])
@pytest.mark.parametrize("num_waiting", [1, 12])
def test_jobs_need_no_more_devices_of_a_kind_than_are_free(policy: str, num_waiting: int) -> None:
    queue = Queue([*box(8), *box(2, kind="cpu")], policy=policy)
    for _ in range(num_waiting):
        queue.submit(1, kinds=("cpu",))
    queue.submit(2, kinds=("gpu",))
    queue.submit((1, 8), name="elastic", kinds=("gpu",))
    queue.submit(3, kinds=("gpu", "cpu"), name="either")  # it needs what the others leave of the CPUs, and else GPUs
    queue.settle()
    assert len(queue.devices("elastic")) == (3 if num_waiting > 1 else 4)
    assert len(queue.devices("either")) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_many_jobs_of_a_kind_leave_other_kinds_to_a_job_behind_them(policy: str) -> None:
    queue = Queue([*box(8), *box(2, kind="cpu")], policy=policy)
    for _ in range(100):
        queue.submit(1, kinds=("cpu",), total=10.0, rates=(1.0,))
    queue.submit((1, 8), name="elastic", kinds=("gpu",), rates=LINEAR[:8], total=1e6)
    queue.settle()
    assert len(queue.devices("elastic")) == 8 and len(queue.running) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_jobs_that_a_limit_keeps_waiting_do_not_fill_the_line(policy: str) -> None:
    queue = Queue(box(8), policy=policy)
    queue.apply(events.LimitsSet(0.0, "bob", Limits(max_devices=1)))
    for _ in range(100):
        queue.submit(1, user="bob", total=10.0, rates=(1.0,))
    queue.submit((1, 8), name="elastic", rates=LINEAR[:8], total=1e6)
    queue.settle()
    assert len(queue.devices("elastic")) >= (4 if policy == "goodput" else 7)  # its sizes are powers of two
    assert len(queue.running) == 2


@pytest.mark.parametrize("limits", [Limits(max_devices=4), Limits(max_running=1)])
def test_goodput_gives_other_users_what_a_limit_leaves(limits: Limits) -> None:
    queue = Queue(box(8), policy="goodput")
    queue.apply(events.LimitsSet(0.0, "bob", limits))
    for _ in range(4):
        queue.submit((2, 2), user="bob", total=10.0)
    queue.submit((1, 8), name="elastic", rates=LINEAR[:8], total=1e6)
    queue.settle()
    num = 4 if limits.max_devices else 2
    assert len(queue.devices("elastic")) == 8 - num


@pytest.mark.parametrize("limits", [Limits(max_devices=1), Limits(max_running=1)])
def test_goodput_stops_no_job_for_one_that_its_users_limit_keeps_waiting(limits: Limits) -> None:
    queue = Queue(box(8), policy="goodput", min_run_s=0.0)
    queue.apply(events.LimitsSet(0.0, "bob", limits))
    queue.submit(1, user="bob", name="long", total=1e6, rates=(1.0,))
    queue.settle()
    queue.now_s = 1000.0
    queue.submit(1, user="bob", name="short", total=10.0, rates=(1.0,))
    assert queue.decide() == ()


@pytest.mark.parametrize("policy", ["default", "fair_share", "cost", "goodput"])
def test_an_elastic_job_makes_room_below_its_users_limit_for_another_of_the_user(policy: str) -> None:
    queue = Queue(box(8), policy=policy, min_run_s=0.0)
    queue.apply(events.LimitsSet(0.0, "bob", Limits(max_devices=4)))
    queue.submit((1, 8), user="bob", name="elastic", total=1e6, rates=LINEAR[:8])
    queue.settle()
    queue.now_s = 1000.0
    queue.submit(1, user="bob", name="next", total=1e5, rates=(1.0,))
    queue.settle()
    num = 2 if policy == "goodput" else 3  # its sizes are powers of two
    assert (len(queue.devices("elastic")), len(queue.devices("next"))) == (num, 1)


@pytest.mark.parametrize("limits", [Limits(max_devices=2), Limits(max_running=1)])
def test_goodput_stops_no_job_for_a_lower_limit(limits: Limits) -> None:
    queue = Queue(box(8), policy="goodput", min_run_s=0.0)
    for _ in range(2):
        queue.submit(4, user="bob", total=1e5, rates=(1.0,) * 4)
    queue.settle()
    queue.now_s = 1000.0
    queue.queue_state.apply(events.LimitsSet(queue.now_s, "bob", limits))
    assert decide(queue.queue_state.snapshot(), queue.now_s) == ()


@pytest.mark.parametrize("policy", ["fifo", "priority", "las", "srpt"])
def test_an_elastic_job_starts_beside_those_that_may_not_use_reserved_devices(policy: str) -> None:
    """Four devices are bob's: ann's two jobs share the other four, of which the rigid one needs three."""
    queue = Queue(box(8), policy=policy)
    reserved = frozenset(f"gpu0.{n}" for n in range(4))
    queue.apply(events.ReservationSet(0.0, Reservation("r", reserved, 0.0, 1e6, frozenset({"bob"}))))
    queue.submit((1, 8), name="elastic", rates=LINEAR[:8], total=1.0)
    queue.submit(3, name="rigid", total=1e6)
    queue.settle()
    assert queue.running == {"elastic", "rigid"}


def test_a_job_that_waits_for_devices_counts_towards_its_users_limit() -> None:
    """Two devices are coming free; ann may have one, so the other is bob's."""
    queue = Queue(box(2), policy="priority", min_run_s=0.0)
    queue.apply(events.LimitsSet(0.0, "ann", Limits(max_devices=1)))
    queue.submit(2, name="low", user="eve")
    queue.settle()
    for user in ("ann", "ann", "bob"):
        queue.submit(1, user=user, name=f"{user}{queue.num}", priority=1)
    queue.decide()
    assert queue.state("low") is JobState.PREEMPTING
    waits = queue.waits()
    assert "may have 1" in waits["ann2"] and "stopping" in waits["ann1"] and "stopping" in waits["bob3"]


def test_what_a_users_limit_leaves_goes_to_other_users() -> None:
    queue = Queue(box(8), policy="fifo")
    queue.apply(events.LimitsSet(0.0, "ann", Limits(max_devices=3)))
    for user in ("ann", "ann", "bob"):
        queue.submit((1, 8), user=user)
    queue.settle()
    assert [len(queue.devices(job)) for job in ("j1", "j2", "j3")] == [2, 1, 5]


@pytest.mark.parametrize("policy", ["fifo", "priority", "las", "srpt"])
def test_a_job_that_cannot_start_does_not_use_up_its_users_limit(policy: str) -> None:
    queue = Queue([*box(8), *box(4, kind="big")], policy=policy)
    queue.submit(2, name="there", user="bob", kinds=("big",))
    queue.settle()
    queue.apply(events.LimitsSet(0.0, "ann", Limits(max_devices=4)))
    queue.submit(4, name="waits", kinds=("big",))
    queue.submit((1, 8), name="elastic", kinds=("gpu",))
    queue.settle()
    assert not queue.devices("waits") and len(queue.devices("elastic")) == 4


@pytest.mark.parametrize("policy", ["default", "fair_share", "cost"])
def test_a_job_that_runs_stays_large_beside_one_of_its_user_that_cannot_start(policy: str) -> None:
    queue = Queue([*box(16), *box(4, kind="big")], policy=policy, min_run_s=0.0)
    queue.apply(events.LimitsSet(0.0, "ann", Limits(max_devices=8)))
    queue.submit(4, name="there", user="bob", kinds=("big",))
    queue.submit((1, 8), name="elastic", kinds=("gpu",), rates=LINEAR[:8], total=1e6)
    queue.settle()
    assert len(queue.devices("elastic")) == 8
    queue.now_s = 400.0
    queue.submit(4, name="waits", kinds=("big",), priority=-1)
    queue.settle()
    assert len(queue.devices("elastic")) == 8


def test_a_job_that_has_just_started_at_a_high_cost_gives_up_one_device_where_one_is_wanted() -> None:
    queue = Queue(box(8), policy="default", min_run_s=0.0, restart_s=180.0)
    queue.submit((1, 8), name="elastic", rates=LINEAR[:8], total=1e6)
    queue.settle()
    queue.now_s = 400.0
    queue.submit(1, name="rigid")
    queue.settle()
    assert len(queue.devices("elastic")) == 7 and len(queue.devices("rigid")) == 1


def test_priority_puts_classes_first_and_never_swaps_equals() -> None:
    queue = Queue(box(1), policy="priority", min_run_s=0.0)
    queue.submit(1, name="low")
    queue.settle()
    queue.now_s = 10.0
    queue.submit(1, name="equal")
    assert queue.settle() == []
    queue.submit(1, name="high", priority=1)
    queue.settle()
    assert queue.running == {"high"}


class TestFairShare:
    def test_the_users_take_turns_by_what_they_had(self) -> None:
        queue = Queue(box(4), policy="fair_share", min_run_s=0.0)
        for _ in range(8):
            queue.submit(1, user="ann")
        queue.settle()
        queue.now_s = 10.0
        for _ in range(8):
            queue.submit(1, user="bob")
        queue.settle()
        assert sorted(queue.queue_state.jobs[j].spec.user for j in queue.running) == ["ann", "ann", "bob", "bob"]

    def test_a_larger_share_is_worth_more(self) -> None:
        queue = Queue(box(4), policy="fair_share", min_run_s=0.0)
        queue.apply(events.LimitsSet(0.0, "bob", Limits(share=3.0)))
        for _ in range(4):
            queue.submit(1, user="ann")
            queue.submit(1, user="bob")
        queue.settle()
        assert sorted(queue.queue_state.jobs[j].spec.user for j in queue.running) == ["ann", "bob", "bob", "bob"]

    def test_use_is_forgotten_with_its_half_life(self) -> None:
        queue = Queue(box(1), policy="fair_share", min_run_s=0.0, half_life_s=3600.0, starve_after_s=1e9)
        queue.submit(1, user="ann", name="a1")
        queue.settle()
        queue.now_s = 36000.0
        queue.ended("a1")
        queue.submit(1, user="ann", name="a2")
        queue.submit(1, user="bob", name="b1")
        queue.settle()
        assert queue.running == {"b1"}
        queue.ended("b1")
        queue.now_s = 36000.0 + 50 * 3600.0  # ann's ten hours are as good as forgotten, but still more than nothing
        queue.submit(1, user="cyd", name="c1")
        queue.settle()
        assert queue.running == {"c1"}

    def test_equal_users_do_not_swap_devices(self) -> None:
        """No more jobs stop than if all were one user's: for others of the same user, when their work has doubled."""
        swaps = {}
        for policy, users in (("fair_share", ("ann", "bob")), ("default", ("ann", "ann"))):
            queue = Queue(box(3), policy=policy, min_run_s=0.0)
            for index in range(12):
                queue.submit(1, user=users[index % 2])
            swaps[policy] = 0
            for step in range(60):
                queue.now_s = 60.0 * step
                swaps[policy] += sum(is_preemption(c) for c in queue.settle())
        assert swaps["fair_share"] <= swaps["default"] + 3

    def test_a_users_own_jobs_go_as_by_default(self) -> None:
        """Alone in the queue, a user's short jobs don't wait behind a long one of unknown length."""
        queue = Queue(box(1), policy="fair_share", min_run_s=0.0)
        queue.submit(1, name="long")
        queue.settle()
        queue.now_s = 7200.0
        queue.submit(1, name="short")
        queue.settle()
        assert queue.running == {"short"}

    def test_elastic_jobs_get_what_others_leave(self) -> None:
        queue = Queue(box(8), policy="fair_share", min_run_s=0.0)
        queue.submit((1, 8), name="linear", rates=LINEAR[:8], total=1e4)
        queue.submit(2, name="rigid", estimate_s=100.0)
        queue.settle()
        assert (len(queue.devices("linear")), len(queue.devices("rigid"))) == (6, 2)
        queue.ended("rigid")
        queue.now_s = 1000.0
        queue.settle()
        assert len(queue.devices("linear")) == 8


def test_las_sinks_jobs_at_the_thresholds() -> None:
    queue = Queue(box(2), policy="las", min_run_s=0.0, las_thresholds_device_s=(100.0, 1000.0))
    queue.submit(2, name="old")
    queue.settle()
    queue.now_s = 1.0
    queue.submit(2, name="new")
    queue.now_s = 49.0
    assert queue.settle() == []
    queue.now_s = 50.0
    queue.settle()
    assert queue.running == {"new"}
    queue.now_s = 100.0
    queue.settle()  # both have sunk: the order of submission again
    assert queue.running == {"old"}
    queue.now_s = 549.0
    assert queue.settle() == []
    queue.now_s = 550.0
    queue.settle()
    assert queue.running == {"new"}


def test_srpt_counts_devices_and_progress() -> None:
    queue = Queue(box(4), policy="srpt", min_run_s=0.0, restart_s=0.0)
    queue.submit(4, name="wide", estimate_s=100.0)
    queue.now_s = 1.0
    queue.submit(1, name="narrow", estimate_s=300.0)  # 300 device-seconds are less than 400
    queue.settle()
    assert queue.running == {"narrow"}
    queue.report("narrow", done=1.0, total=1001.0, rate=1.0)  # it turns out to be 1,000
    queue.settle()
    assert queue.running == {"wide"}


def test_equals_of_unknown_length_swap_only_when_one_has_doubled() -> None:
    queue = Queue(box(1), policy="srpt", min_run_s=0.0)
    queue.submit(1, name="a")
    queue.submit(1, name="b")
    swaps = 0
    for step in range(600):
        queue.now_s = 60.0 * step
        swaps += sum(is_preemption(c) for c in queue.settle())
    assert 1 <= swaps <= 8


class TestDefault:
    def test_short_before_long_and_whoever_had_less_before_whoever_had_more(self) -> None:
        queue = Queue(box(1), min_run_s=0.0)
        queue.submit(1, user="ann", name="used", estimate_s=1e9)
        queue.settle()
        queue.now_s = 200_000.0
        queue.ended("used")
        queue.submit(1, user="ann", name="ann", estimate_s=1000.0)
        queue.submit(1, user="bob", name="bob", estimate_s=1500.0)
        queue.submit(1, user="bob", name="long", estimate_s=1e5)
        queue.settle()
        assert queue.running == {"bob"}

    def test_waiting_counts(self) -> None:
        queue = Queue(box(1), ageing_s=600.0, restart_s=0.0)
        queue.submit(1, name="blocks", preemptible=False)
        queue.settle()
        queue.submit(1, name="long", estimate_s=1000.0)
        queue.now_s = 1800.0
        queue.submit(1, name="short", estimate_s=300.0)
        queue.ended("blocks")
        queue.settle()
        assert queue.running == {"long"}  # 1000 / (1 + 3) < 300

    def test_elastic_jobs_get_their_minimum_in_order_and_the_rest_where_it_helps(self) -> None:
        queue = Queue(box(8), min_run_s=0.0)
        queue.submit((1, 8), name="flat", rates=FLAT, total=1e4)
        queue.submit((1, 8), name="linear", rates=LINEAR[:8], total=1e4)
        queue.submit(2, name="rigid", estimate_s=100.0)
        queue.settle()
        assert len(queue.devices("rigid")) == 2
        assert len(queue.devices("linear")) >= 4 > len(queue.devices("flat"))

    def test_elastic_jobs_shrink_for_those_who_come(self) -> None:
        queue = Queue(box(8), min_run_s=0.0)
        queue.submit((1, 8), name="linear", rates=LINEAR[:8], total=1e6)
        queue.settle()
        assert len(queue.devices("linear")) == 8
        queue.now_s = 1000.0
        queue.submit(4, name="rigid", estimate_s=100.0)
        commands = queue.settle()
        assert any(isinstance(c, events.ResizeRequested) and c.is_forced for c in commands)
        assert len(queue.devices("rigid")) == 4 and 1 <= len(queue.devices("linear")) <= 4


@pytest.mark.parametrize("policy", ["default", "fair_share"])
def test_a_job_that_was_made_smaller_as_often_as_may_be_still_grows(policy: str) -> None:
    queue = Queue(box(8), policy=policy, min_run_s=0.0, max_preemptions_per_hour=1)
    queue.submit((1, 8), name="elastic", rates=LINEAR[:8], total=1e6)
    queue.settle()
    queue.now_s = 60.0
    short = queue.submit(4, estimate_s=100.0)
    queue.settle()
    assert len(queue.devices(short)) == len(queue.devices("elastic")) == 4
    queue.now_s = 160.0
    queue.ended(short)
    queue.settle()
    assert len(queue.devices("elastic")) == 8
    second = queue.submit(4, estimate_s=100.0)
    queue.settle()
    assert (
        not queue.devices(second) and len(queue.devices("elastic")) == 8
    )  # once more within the hour would be too often


class TestGoodput:
    @pytest.mark.parametrize(("restart_s", "num"), [(30.0, 4), (90.0, 8)])
    def test_elastic_jobs_change_as_soon_and_as_often_as_that_gains(self, restart_s: float, num: int) -> None:
        """Where a restart costs more than usual they keep their devices for a while."""
        queue = Queue(box(8), policy="goodput", max_preemptions_per_hour=2, restart_s=restart_s)
        queue.submit((1, 8), name="elastic", rates=LINEAR[:8], total=1e6)
        queue.settle()
        for _ in range(4):
            queue.now_s += 60.0  # far less than min_run_s
            short = queue.submit((1, 4), rates=LINEAR[:4], total=1000.0)
            queue.settle()
            assert (len(queue.devices("elastic")), len(queue.devices(short))) == (num, 8 - num)
            if num == 8:
                return
            queue.now_s += 60.0
            queue.ended(short)
            queue.settle()
            assert len(queue.devices("elastic")) == 8

    def test_devices_go_where_the_curve_says(self) -> None:
        queue = Queue(box(8, 2), policy="goodput")
        queue.submit((1, 16), name="flat", rates=FLAT, total=1e5)
        queue.submit((1, 16), name="linear", rates=LINEAR, total=1e5)
        queue.settle()
        assert len(queue.devices("linear")) >= 8 > len(queue.devices("flat"))

    def test_a_small_gain_is_not_worth_a_restart(self) -> None:
        queue = Queue(box(4), policy="goodput")
        queue.submit((1, 4), name="flat", rates=FLAT[:1], total=1e6)
        queue.settle()
        assert len(queue.devices("flat")) == 1
        queue.now_s = 1000.0
        queue.report("flat", 1000.0, 1e6, 1.0, rates=(1.0, 1.02, 1.03, 1.03))
        assert queue.settle() == []
        queue.report("flat", 1000.0, 1e6, 1.0, rates=(1.0, 1.9, 2.7, 3.5))
        queue.settle()
        assert len(queue.devices("flat")) == 4

    def test_almost_done_is_not_restarted(self) -> None:
        queue = Queue(box(4), policy="goodput", restart_s=30.0)
        queue.submit((1, 4), name="job", rates=(1.0,), total=1000.0)
        queue.settle()
        queue.now_s = 970.0
        queue.report("job", 970.0, 1000.0, 1.0, rates=(1.0, 2.0, 3.0, 4.0))
        assert queue.settle() == []

    def test_a_higher_class_is_served_first(self) -> None:
        queue = Queue(box(8), policy="goodput", min_run_s=0.0)
        queue.submit((1, 8), name="low", rates=LINEAR[:8], total=1e3)
        queue.submit((1, 8), name="high", rates=LINEAR[:8], total=1e6, priority=1)
        queue.settle()
        assert len(queue.devices("high")) == 8 and "low" not in queue.running


@given(
    st.lists(
        st.tuples(st.floats(0.1, 5.0), st.lists(st.floats(0.01, 3.0), min_size=1, max_size=5)), min_size=1, max_size=4
    ),
    st.integers(0, 10),
)
def test_marginal_gain_is_optimal_on_concave_curves(jobs: list[tuple[float, list[float]]], num: int) -> None:
    queue = Queue(box(10))
    bids = []
    for weight, steps in jobs:
        name = queue.submit(1)
        curve = [0.0, *itertools.accumulate(sorted(steps, reverse=True))]
        values = tuple(weight * v for v in curve[1:])
        bids.append(Bid(queue.queue_state.jobs[name], 0, tuple(range(1, len(curve))), values, 0.0, curve))
    snapshot = queue.queue_state.snapshot()
    left = DevicesLeft(snapshot.layout, PoolChoices(snapshot, 0.0), range(num))
    sizes = share_out(bids, left, LimitUse({}, ()))
    assert sum(sizes.values()) <= num
    own = sum(b.values[sizes[b.job.id] - 1] for b in bids if sizes[b.job.id])
    best = max(
        sum(b.values[k - 1] for b, k in zip(bids, choice, strict=True) if k)
        for choice in itertools.product(*(range(len(b.sizes) + 1) for b in bids))
        if sum(choice) <= num
    )
    assert own == pytest.approx(best)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("fifo", "priority")])
def test_nobody_starves(policy: str) -> None:
    """Short jobs without end against one long gang: it gets devices half of the time once it starves."""
    queue = Queue(box(2), policy=policy, min_run_s=60.0, starve_after_s=3600.0, max_preemptions_per_hour=100)
    gang = queue.submit(2, name="gang", user="ann", estimate_s=7200.0)
    held_s = 0.0
    ends: dict[str, float] = {}
    for step in range(1, 600):
        queue.now_s = 60.0 * step
        for name, time_s in list(ends.items()):
            if time_s <= queue.now_s and name in queue.running:
                queue.ended(name)
                del ends[name]
        while len(queue.queue_state.jobs) < 6:
            queue.submit(1, user="bob", estimate_s=120.0, name=f"s{queue.num}")
        queue.settle()
        held_s = queue.queue_state.jobs[gang].held_until(queue.now_s)
        for name in queue.running - {gang}:
            ends.setdefault(name, queue.now_s + 120.0)
        if held_s >= 7200.0:
            break
    assert held_s >= 7200.0 and queue.now_s <= 3600.0 + 2 * 7200.0 + 600.0


def test_an_elastic_gang_of_a_large_minimum_waits_for_it() -> None:
    queue = Queue(box(4), policy="goodput", min_run_s=0.0)
    queue.submit(spec((3, 4), rates=LINEAR[:4], total=1e4), name="gang")
    queue.submit((1, 2), name="small", rates=(1.0, 1.1), total=1e3)
    queue.settle()
    assert len(queue.devices("gang")) >= 3


@pytest.mark.parametrize("policy", ["default", "goodput"])
@pytest.mark.parametrize("restart_s", [30.0, 95.0, 120.0, 180.0])
def test_a_long_job_grows_whatever_its_restart_costs(policy: str, restart_s: float) -> None:
    """A day's work pays for minutes; a job that is nearly done stays as it is."""
    queue = Queue(box(2), policy=policy, min_run_s=0.0)
    other = queue.submit(1, total=1e6)
    long = queue.submit((1, 2), restart_s=restart_s, total=27 * 3600.0)
    queue.settle()
    queue.now_s = 600.0
    queue.report(long, 600.0, rate=1.0, rates=(1.0, 1.9))
    queue.ended(other)
    queue.settle()
    assert len(queue.devices(long)) == 2
    queue = Queue(box(2), policy=policy, min_run_s=0.0)
    other = queue.submit(1, total=1e6)
    short = queue.submit((1, 2), restart_s=restart_s, total=700.0)
    queue.settle()
    queue.now_s = 600.0
    queue.report(short, 600.0, rate=1.0, rates=(1.0, 1.9))
    queue.ended(other)
    queue.settle()
    assert len(queue.devices(short)) == 1


def test_the_horizon_follows_how_often_jobs_change() -> None:
    calm, busy = Churn(8 * 3600.0, 2), Churn(8 * 3600.0, 200)
    settings = Settings()
    assert calm.until_next_s(30.0, settings) > 4 * busy.until_next_s(30.0, settings)
    waits = [Churn(0.0, 0).until_next_s(cost_s, settings) for cost_s in (10.0, 30.0, 90.0, 180.0)]
    assert waits == pytest.approx([200.0, 200.0, 431.5, 701.0], abs=1.0)


@pytest.mark.parametrize(("at_s", "num"), [(500.0, 1), (700.0, 2)])
def test_a_job_of_costly_restarts_runs_for_a_while_before_it_is_resized(at_s: float, num: int) -> None:
    queue = Queue(box(2), policy="goodput", min_run_s=0.0)
    other = queue.submit(1, total=1e6)
    job = queue.submit((1, 2), restart_s=180.0, total=1e6)
    queue.settle()
    queue.now_s = at_s
    queue.report(job, at_s, 1e6, rate=1.0, rates=(1.0, 1.9))
    queue.ended(other)
    queue.settle()
    assert len(queue.devices(job)) == num
