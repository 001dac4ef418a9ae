"""Policy `cost`: the cheapest devices and hours that meet a deadline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import ConfigError
from evenload.scheduler.core import events
from evenload.scheduler.core.values import Device, Settings
from evenload.scheduler.forecast.forecast import forecast
from evenload.scheduler.queue_settings import settings_from
from evenload.scheduler.simulator.arrivals import JobArrival, timed_program
from evenload.scheduler.simulator.outcome import SimulationOutcome
from evenload.scheduler.simulator.report import report_of
from evenload.scheduler.simulator.simulate import Conditions, simulate
from evenload.scheduler.store.event_rows import from_row
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.usage import usage_rows
from evenload.scheduler.store.writer import QueueStore
from evenload.scheduler.tariff import tariff_of
from evenload.views.queue.usage import report_lines
from tests.unit.scheduler.queue import Queue, box, spec

HOUR_S = 3600.0


def fast_and_slow() -> list[Device]:
    return [
        *box(4, 1, "fast", price_per_hour=3.0),
        *box(4, 1, "slow", speed=0.5, price_per_hour=1.0),
    ]


def by_the_hour(num: int = 4) -> list[Device]:
    return box(num, 1, price_per_hour=2.0, cheap_price_per_hour=0.5)


def kinds_of(queue: Queue, job: str) -> set[str]:
    return {device[:4] for device in queue.devices(job)}


def run(devices: list[Device], *jobs: dict[str, Any], policy: str = "cost", **settings: Any) -> SimulationOutcome:
    """Simulate jobs of 1 hour each on one device unless they say otherwise."""
    arrivals = []
    for number, job in enumerate(jobs):
        job = {"time_s": 0.0, "hours": 1.0, "num": 1, **job}
        time_s, seconds, num = job.pop("time_s"), job.pop("hours") * HOUR_S, job.pop("num")
        arrivals.append(JobArrival(time_s, f"j{number}", spec(num, **job), timed_program(seconds, num)))
    return simulate(arrivals, Conditions(tuple(devices), Settings(policy=policy, **settings)))


def test_a_job_takes_the_cheap_kind_if_its_deadline_allows_that() -> None:
    queue = Queue(fast_and_slow(), policy="cost")
    queue.submit(spec(2, estimate_s=HOUR_S, deadline_s=3 * HOUR_S), name="patient")
    queue.submit(spec(2, estimate_s=HOUR_S, deadline_s=1.5 * HOUR_S), name="hurried")
    queue.submit(spec(1, estimate_s=HOUR_S), name="without")
    queue.settle()
    assert kinds_of(queue, "patient") == {"slow"}
    assert kinds_of(queue, "hurried") == kinds_of(queue, "without") == {"fast"}


def test_a_job_that_is_ahead_moves_to_the_cheap_kind_and_is_still_in_time() -> None:
    (job,) = run(fast_and_slow(), {"hours": 10, "deadline_s": 18 * HOUR_S}).jobs
    assert 15 * HOUR_S < job.ended_s < 18 * HOUR_S and job.num_restarts == 1
    (usual,) = run(fast_and_slow(), {"hours": 10, "deadline_s": 18 * HOUR_S}, policy="default").jobs
    assert job.cost < 0.85 * usual.cost


@pytest.mark.parametrize(("left_s", "kind"), [(7950.0, "fast"), (8100.0, "slow")])
def test_a_job_moves_to_the_cheap_kind_once_it_can_afford_the_restart(left_s: float, kind: str) -> None:
    """Half of two hours is done, which takes 7920 s there with the margin, and a restart 30 s."""
    queue = Queue(fast_and_slow(), policy="cost")
    job = queue.submit(spec(1, estimate_s=2 * HOUR_S, deadline_s=3 * HOUR_S))
    queue.settle()
    assert kinds_of(queue, job) == {"fast"}
    queue.now_s = 3 * HOUR_S - left_s
    queue.report(job, 3600.0, 7200.0, rate=1.0)
    queue.settle()
    assert kinds_of(queue, job) == {kind}


def test_an_elastic_job_has_as_many_devices_as_its_deadline_needs() -> None:
    devices, costs = box(8, 1, price_per_hour=1.0), {}
    for times in (1.3, 4.0):
        program = timed_program(8 * HOUR_S, 1, 0.7)
        arrival = JobArrival(0.0, "elastic", spec((1, 8)), program)
        conditions = Conditions(tuple(devices), Settings(policy="cost"), deadline_times=times)
        outcome = simulate([arrival], conditions)
        assert report_of(outcome).deadlines_met == 1.0
        costs[times] = report_of(outcome).cost
    assert costs[4.0] < 0.8 * costs[1.3]


def test_a_job_starts_on_fewer_devices_than_its_deadline_plan_where_no_more_are_left() -> None:
    rates = tuple(float(k) for k in range(1, 9))
    queue = Queue(box(8), policy="cost", min_run_s=0.0)
    queue.submit(1, user="x", preemptible=False, total=1e6, rates=(1.0,))
    queue.submit(4, user="y", name="ends", total=1e6, rates=(1.0,) * 4)
    queue.submit((1, 8), name="elastic", total=3e4, rates=rates)
    queue.settle()
    queue.now_s = 1000.0
    queue.ended("ends")
    queue.submit((1, 8), user="bob", name="in time", total=10 * 8 * HOUR_S, rates=rates, deadline_s=46_000.0)
    queue.settle()
    assert len(queue.devices("in time")) >= 4 and queue.devices("elastic")


def test_work_waits_for_cheap_hours_and_pauses_between_them() -> None:
    """Of six hours of work before the second midnight, five fit into the cheap hours."""
    outcome = run(by_the_hour(), {"hours": 6, "deadline_s": 48 * HOUR_S}, cheap_hours="2-5", deadline_margin=1.0)
    (job,) = outcome.jobs
    assert job.ended_s < 48 * HOUR_S
    assert job.cost == pytest.approx(6 * 0.5, abs=1.0)
    assert report_of(outcome).deadlines_met == 1.0


def test_a_held_job_says_until_when() -> None:
    queue = Queue(by_the_hour(), policy="cost", cheap_hours="4-8")
    job = queue.submit(spec(1, estimate_s=HOUR_S, deadline_s=10 * HOUR_S))
    assert queue.settle() == []
    assert queue.waits()[job] == "waits for cheap hours, which begin in 4.0 h"
    assert forecast(queue.queue_state.snapshot(), 0.0)[job].start_s == 4 * HOUR_S
    queue.now_s = 4 * HOUR_S
    queue.settle()
    assert job in queue.running


def test_low_priority_waits_for_cheap_hours_up_to_the_limit() -> None:
    for limit_s, began_s in ((86400.0, 6 * HOUR_S), (2 * HOUR_S, 2 * HOUR_S)):
        jobs = run(by_the_hour(), {"priority": -1}, {}, cheap_hours="6-8", cheap_wait_s=limit_s).jobs
        low, usual = sorted(jobs, key=lambda job: job.job)
        assert low.began_s == began_s + 30.0 and usual.began_s == 30.0


@pytest.mark.parametrize("rest", [{"priority": -1}, {"estimate_s": HOUR_S, "deadline_s": 9 * HOUR_S}])
def test_a_job_that_must_be_on_one_host_is_offered_kinds_that_fill_one(rest: dict[str, Any]) -> None:
    mixed = [Device(f"mixed-{n}", "h0", kind="slow" if n % 2 else "fast", price_per_hour=1.0 + n % 2) for n in range(4)]
    queue = Queue([*mixed, Device("far", "h1", kind="fast")], policy="cost")
    queue.submit(spec(3, one_host=True, **rest), name="near")
    queue.decide()
    assert len(queue.devices("near")) == 3


def test_a_deadline_out_of_reach_is_reported_and_the_job_runs_all_the_same() -> None:
    queue = Queue(fast_and_slow(), policy="cost")
    late = queue.submit(spec(1, estimate_s=2 * HOUR_S, deadline_s=HOUR_S))
    unknown = queue.submit(spec(1, deadline_s=HOUR_S))
    notes = {name: found.deadline_note for name, found in forecast(queue.queue_state.snapshot(), 0.0).items()}
    assert "can't be met: on 1 × fast, its fastest choice, it would end 60 min late" in notes[late]
    assert "isn't known" in notes[unknown]
    queue.decide()
    assert "can't be met" in forecast(queue.queue_state.snapshot(), 0.0)[late].reason  # while it is being started
    assert queue.running >= {late, unknown}


def test_the_speed_on_slow_devices_does_not_count_as_that_on_fast_ones_once_a_job_waits() -> None:
    queue = Queue(fast_and_slow(), policy="cost")
    job = queue.submit(spec(1, estimate_s=HOUR_S, deadline_s=3 * HOUR_S))
    queue.settle()
    assert kinds_of(queue, job) == {"slow"}
    queue.now_s = 3 * HOUR_S - 2700.0
    queue.report(job, 1800.0, 3600.0, rate=0.5)
    queue.apply(events.StopRequested(queue.now_s, job, reason="another job goes first"))
    queue.yielded(job)
    assert not forecast(queue.queue_state.snapshot(), queue.now_s)[job].deadline_note
    queue.settle()
    assert kinds_of(queue, job) == {"fast"}


def test_a_job_without_time_to_lose_goes_first() -> None:
    queue = Queue(box(1), policy="cost", min_run_s=0.0)
    queue.submit(spec(1, estimate_s=600.0), name="short")
    queue.settle()
    queue.now_s = 60.0
    queue.submit(spec(1, estimate_s=2 * HOUR_S, deadline_s=8040.0), name="urgent")
    queue.settle()
    assert queue.running == {"urgent"}


def test_without_deadlines_and_low_priorities_it_is_default() -> None:
    jobs = [{"time_s": 60.0 * n, "num": 1 + n % 3, "hours": 1 + n % 5} for n in range(20)]
    ends = [
        [job.ended_s for job in run(fast_and_slow(), *jobs, policy=name, cheap_hours="2-5").jobs]
        for name in ("default", "cost")
    ]
    assert ends[0] == ends[1]


@given(
    began_h=st.floats(-30, 60), hours=st.floats(0, 60), midnight_h=st.integers(-5, 5),
    text=st.sampled_from(["22-6", "1:30-2,12-14", "0-24", ""]),
)  # fmt: skip
def test_cheap_seconds_are_those_of_the_hours(began_h: float, hours: float, midnight_h: int, text: str) -> None:
    tariff, steps = tariff_of(text, midnight_h * HOUR_S), 200
    span_s = hours * HOUR_S
    times = [began_h * HOUR_S + span_s * (n + 0.5) / steps for n in range(steps)]
    counted = sum(tariff.next_change_s(time_s)[0] for time_s in times) / steps * span_s
    assert tariff.cheap_s(times[0] - span_s / steps / 2, began_h * HOUR_S + span_s) == pytest.approx(
        counted, abs=8 * span_s / steps + 1e-6
    )


def test_wrong_hours_prices_and_removed_settings_are_named() -> None:
    for text in ("6", "25-3", "3-3", "1-4,3-5", "a-b"):
        with pytest.raises(ConfigError, match="cheap_hours"):
            Settings(cheap_hours=text)
    with pytest.raises(ConfigError, match="cheap_price_per_hour 2"):
        Device("a", "b", price_per_hour=1.0, cheap_price_per_hour=2.0)
    with pytest.raises(ConfigError, match=r"price_weight=0.5: this setting was removed.*policy=cost"):
        settings_from({"price_weight": 0.5})


def test_a_queue_stored_with_a_removed_setting_opens() -> None:
    row = {"kind": "SettingsSet", "time_s": 1.0, "settings": {"price_weight": 0.5, "min_run_s": 60.0}}
    event = from_row(row)
    assert isinstance(event, events.SettingsSet) and event.settings == Settings(min_run_s=60.0)


def test_the_report_names_cost_and_what_was_saved(tmp_path: Path) -> None:
    """Two hours on a device of half the speed, which the fastest would have done in one, for 3."""
    with QueueStore(tmp_path, holder="test") as store:
        for device in fast_and_slow():
            store.record(events.DeviceAdded(0.0, device))
        store.record(events.Submitted(0.0, "1", spec(1, deadline_s=9 * HOUR_S)), extra={"command": ["true"]})
        store.record(events.Placed(HOUR_S, "1", ("slow0.0",), 1))
        store.record(events.JobStarted(HOUR_S, "1"))
        store.record(events.Ended(3 * HOUR_S, "1", is_success=True))
        store.commit()
    with Reader(tmp_path) as reader:
        (row,) = usage_rows(reader, {}, ("user",))
    assert (row.cost, row.saved) == pytest.approx((2.0, 1.0))
    table = {"by": ["user"], "rows": [{name: getattr(row, name) for name in row.__slots__}]}
    assert report_lines(table).splitlines()[0].split()[-2:] == ["cost", "saved"]


def test_no_policy_is_below_the_bound_and_a_lone_job_reaches_it() -> None:
    """An hour's work on fast devices, of which slow ones do the half in time; and half of it in cheap hours."""
    bounds = pytest.importorskip("benchmarks.bounds")
    kinds = {"fast": bounds.PricedKind(4, 3.0, 3.0), "slow": bounds.PricedKind(4, 1.0, 1.0)}
    job = bounds.DeadlineJob(2, 0.0, {"fast": HOUR_S, "slow": 2 * HOUR_S}, 1.5 * HOUR_S + bounds.START_S)
    starts = 2 * bounds.START_S / 3600.0
    assert bounds.least_cost([job], kinds, tariff_of("")) == pytest.approx(2 * (0.5 * 3 + 1.0) + starts)
    late = bounds.DeadlineJob(1, 0.0, {"gpu": HOUR_S}, HOUR_S + bounds.START_S)
    found = bounds.least_cost([late], {"gpu": bounds.PricedKind(1, 2.0, 1.0)}, tariff_of("0:30-1"))
    assert found == pytest.approx(1.5, abs=0.02)
    with pytest.raises(ValueError, match="infeasible"):
        bounds.least_cost([late, late], {"gpu": bounds.PricedKind(1, 2.0, 1.0)}, tariff_of(""))
    jobs = [bounds.ElasticJob(0.0, {1: 3600.0, 2: 2000.0}) for _ in range(2)]
    least_s = bounds.least_mean_s(jobs, 2, 60.0)
    assert 2000.0 + bounds.START_S <= least_s <= 3600.0


def test_a_deadline_plan_makes_no_job_smaller_that_can_not_be_stopped_or_is_young() -> None:
    rates = tuple(float(k) ** 0.5 for k in range(1, 9))
    for is_preemptible, after_s in ((False, 2 * 3600.0), (True, 100.0)):
        queue = Queue(box(8, 1, price_per_hour=1.0), policy="cost")
        job = queue.submit((1, 8), total=8 * HOUR_S, rates=rates, deadline_s=4 * HOUR_S, preemptible=is_preemptible)
        queue.settle()
        assert len(queue.devices(job)) == 8
        queue.now_s = after_s
        queue.report(job, 7 * HOUR_S, 8 * HOUR_S, rate=8.0**0.5)  # fewer are enough now
        assert queue.decide() == ()
