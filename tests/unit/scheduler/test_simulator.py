"""The simulator against results worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenload.errors import ConfigError
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import JobSpec, Needs, Settings
from evenload.scheduler.simulator.arrivals import JobArrival
from evenload.scheduler.simulator.cluster import devices_of
from evenload.scheduler.simulator.outcome import SimulationOutcome
from evenload.scheduler.simulator.programs import TimedProgram
from evenload.scheduler.simulator.report import percentile, report_of, slowdowns
from evenload.scheduler.simulator.simulate import Conditions, simulate
from evenload.scheduler.simulator.workloads import read_workload


def timed(name: str, time_s: float, duration_s: float, num: int = 1, **rest: object) -> JobArrival:
    spec = JobSpec(user="ann", needs=Needs(num, num), **rest)  # type: ignore[arg-type]
    return JobArrival(time_s, name, spec, lambda: TimedProgram(duration_s, num, 1.0))


def run(arrivals: list[JobArrival], cluster: str, policy: str = "fifo", **rest: object) -> SimulationOutcome:
    settings = {name: rest.pop(name) for name in list(rest) if name in Settings.__dataclass_fields__}
    conditions = Conditions(devices_of(cluster), Settings(policy=policy, **settings), **rest)  # type: ignore[arg-type]
    return simulate(arrivals, conditions)


def ends(outcome: SimulationOutcome) -> dict[str, float]:
    return {job.job: job.ended_s for job in outcome.jobs}


def test_one_job_takes_its_start_and_its_duration() -> None:
    outcome = run([timed("a", 100.0, 500.0, 2)], "1x4", restart_s=30.0)
    (job,) = outcome.jobs
    assert (job.began_s, job.ended_s, job.jct_s) == (130.0, 630.0, 530.0)
    assert job.service_device_s == 2 * 530.0 and outcome.useful_device_s == 1000.0
    report = report_of(outcome)
    assert report.utilisation == pytest.approx(1000 / (4 * 530)) and report.held == pytest.approx(1060 / (4 * 530))


def test_deciding_at_ticks_only_rounds_starts_up() -> None:
    outcome = run([timed("a", 61.0, 10.0), timed("b", 120.0, 10.0)], "1x4", at_events=False, restart_s=0.0)
    assert ends(outcome) == {"a": 130.0, "b": 130.0}


def test_fifo_queues_and_srpt_preempts_at_no_loss_of_work() -> None:
    jobs = [timed("long", 0.0, 1000.0), timed("short", 100.0, 50.0)]
    assert ends(run(jobs, "1x1", restart_s=0.0)) == {"long": 1000.0, "short": 1050.0}
    assert ends(run(jobs, "1x1", "srpt", restart_s=0.0, min_run_s=0.0)) == {"short": 150.0, "long": 1050.0}
    preempted = run(jobs, "1x1", "srpt", restart_s=10.0, min_run_s=0.0, save_s=5.0)
    # long runs 10..100, saves until 105; short starts until 115 and runs until 165; long starts until 175.
    assert ends(preempted) == {"short": 165.0, "long": 175.0 + 910.0}
    assert {j.job: (j.num_restarts, j.num_preemptions) for j in preempted.jobs} == {"long": (1, 1), "short": (0, 0)}


def test_a_resize_in_place_costs_less_than_a_start() -> None:
    """The second job ends at 130 s; then the first gets the second device, after a restart or 1 s later."""
    spec = JobSpec(user="ann", needs=Needs(1, 2), rates=(1.0, 2.0))
    first = JobArrival(0.0, "first", spec, lambda: TimedProgram(1000.0, 1, 1.0, (1.0, 2.0)))
    last = {}
    for resize_s in (None, 1.0):
        outcome = run(
            [first, timed("second", 0.0, 100.0)], "1x2", "goodput", restart_s=30.0, min_run_s=0.0, resize_s=resize_s
        )
        last[resize_s] = ends(outcome)["first"]
    assert last[1.0] == pytest.approx(last[None] - 29.0, abs=2.0)


def test_what_is_not_known_cannot_help() -> None:
    jobs = [timed("long", 0.0, 1000.0), timed("short", 1.0, 50.0)]
    known = run(jobs, "1x1", "srpt", min_run_s=0.0, restart_s=0.0)
    unknown = run(jobs, "1x1", "srpt", min_run_s=0.0, restart_s=0.0, remaining="unknown")
    assert ends(known)["short"] < ends(unknown)["short"]


def test_noise_is_the_seeds_own() -> None:
    jobs = [timed(f"j{i}", 10.0 * i, 100.0 + 37 * i % 500) for i in range(30)]

    def order(seed: int) -> list[str]:
        outcome = run(jobs, "1x1", "srpt", remaining="noisy", noise=2.0, seed=seed)
        return sorted(ends(outcome), key=ends(outcome).__getitem__)

    assert order(1) == order(1) != order(2)


def test_dependencies_limits_and_prices_hold_in_a_simulation(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(
        "job,submitted_s,devices,duration_s,after,hard_limit_s,user\n"
        "first,0,1,100,,,ann\nthen,0,1,100,first,,ann\nendless,0,1,1000,,300,bob\nnever,0,1,10,endless,,bob\n"
    )
    from evenload.scheduler.simulator.cluster import KindFacts

    devices = devices_of("1x4", {"gpu": KindFacts(price_per_hour=3.6, power_w=500.0)})
    outcome = simulate(read_workload(path), Conditions(devices, Settings(policy="fifo", restart_s=0.0)))
    jobs = {job.job: job for job in outcome.jobs}
    assert jobs["then"].began_s == 100.0
    assert jobs["endless"].state is JobState.FAILED and jobs["endless"].ended_s == 300.0
    assert jobs["never"].state is JobState.CANCELLED
    assert jobs["first"].cost == pytest.approx(0.1) and jobs["first"].energy_kwh == pytest.approx(0.5 * 100 / 3600)
    report = report_of(outcome)
    assert report.num_failed == 2 and report.cost == pytest.approx(0.5)


def test_a_job_that_can_never_run_is_an_error() -> None:
    with pytest.raises(ConfigError, match="job a of the workload: it asks for 5 devices; this queue has 4"):
        run([timed("a", 0.0, 10.0, 5)], "1x4")


def test_fairness_is_against_an_equal_part() -> None:
    alone = run([timed("a", 0.0, 1000.0, 4)], "1x4", restart_s=0.0)
    assert alone.jobs[0].fair_s == 1000.0 and report_of(alone).worst_unfairness == 1.0
    jobs = [timed("a", 0.0, 1000.0, 4), timed("b", 0.0, 1000.0, 4)]
    shared = run(jobs, "1x4", restart_s=0.0)
    # a: 1,000 s beside b all the time: an equal part would have taken 2,000 s; b: 2,000 s, half of them alone.
    assert [job.fair_s for job in shared.jobs] == [2000.0, 1500.0]


def test_figures_of_a_report() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5 and percentile([], 99) == 0.0
    assert percentile(list(map(float, range(101))), 99) == 99.0
    base = run([timed("a", 0.0, 100.0), timed("b", 0.0, 100.0)], "1x1", restart_s=0.0)
    wider = run([timed("a", 0.0, 100.0), timed("b", 0.0, 100.0)], "1x2", restart_s=0.0)
    assert sorted(slowdowns(wider.jobs, base.jobs)) == [0.5, 1.0]
