"""The bars on recorded workloads, where they are there: ``pytest --traces DIR tests/system/benchmarks/test_traces.py``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.pollux.workload import pollux_workload
from benchmarks.queue_policies import AS_TIRESIAS, pollux_folder

from evenload.scheduler.core.values import Settings
from evenload.scheduler.simulator.arrivals import JobArrival, capped, thinned
from evenload.scheduler.simulator.cluster import devices_of
from evenload.scheduler.simulator.report import mean, percentile, slowdowns
from evenload.scheduler.simulator.simulate import Conditions, simulate


@pytest.fixture
def traces(request: pytest.FixtureRequest) -> Path:
    folder = request.config.getoption("--traces")
    if folder is None or not Path(folder).is_dir():
        pytest.skip("needs a folder of recorded workloads: EVENLOAD_TRACES or --traces")
    return pollux_folder(Path(folder))


def workload(traces: Path, number: int, elastic: bool = False) -> list[JobArrival]:
    return pollux_workload(traces / "workloads" / f"workload-{number}.csv", elastic=elastic)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_las_gives_what_tiresias_published(traces: Path, number: int) -> None:
    published = json.loads((traces / "results" / "tiresias.json").read_text())["jcts"][f"workload-{number}"]
    conditions = Conditions(devices_of("16x4"), AS_TIRESIAS, at_events=False, remaining="unknown")
    outcome = simulate(workload(traces, number), conditions)
    ours = {job.job: job.jct_s for job in outcome.jobs}
    assert ours.keys() == published.keys()
    assert mean(list(ours.values())) == pytest.approx(mean(list(published.values())), rel=0.05)


def test_one_box_of_eight(traces: Path) -> None:
    times: dict[str, list[float]] = {}
    slower: list[float] = []
    for number in (1, 2, 3, 4):
        jobs = capped(thinned(workload(traces, number), 8), 8)
        runs = {
            policy: simulate(jobs, Conditions(devices_of("2x4"), Settings(policy=policy), remaining=remaining))
            for policy, remaining in (("fifo", "unknown"), ("las", "unknown"), ("default", "known"))
        }
        for policy, outcome in runs.items():
            times.setdefault(policy, []).extend(job.jct_s for job in outcome.jobs)
        slower += slowdowns(runs["default"].jobs, runs["fifo"].jobs)
    assert mean(times["fifo"]) >= 2.0 * mean(times["default"])
    assert mean(times["las"]) >= 1.4 * mean(times["default"])
    assert percentile(slower, 99) <= 3.0


def test_goodput_beats_pollux_on_a_workload_it_was_tuned_on(traces: Path) -> None:
    published = json.loads((traces / "results" / "pollux.json").read_text())["jcts"]["workload-2"]
    conditions = Conditions(devices_of("16x4"), Settings(policy="goodput"), at_events=False)
    outcome = simulate(workload(traces, 2, elastic=True), conditions)
    assert mean([job.jct_s for job in outcome.jobs]) <= 0.95 * mean(list(published.values()))
