"""Run times estimated from a user's earlier jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job, JobSpec, Needs, Settings
from evenload.scheduler.runtime_history import RunKey, RuntimeHistory, run_keys
from evenload.scheduler.simulator.arrivals import JobArrival, timed_program
from evenload.scheduler.simulator.cluster import devices_of
from evenload.scheduler.simulator.report import mean
from evenload.scheduler.simulator.simulate import Conditions, simulate
from tests.unit.scheduler.queue import spec

TRAIN = ("python", "train.py", "--lr=0.1")


def ended(held_s: float, what: JobSpec | None = None, state: JobState = JobState.SUCCEEDED) -> Job:
    return Job("1", what or spec(), 0.0, state, held_s=held_s)


def history_of(*runs: Job, command: Sequence[str] = TRAIN) -> RuntimeHistory:
    history = RuntimeHistory()
    for job in runs:
        history.add(job, run_keys(job.spec, command))
    return history


def test_the_nearest_runs_count_and_are_named() -> None:
    history = history_of(ended(100.0), ended(5000.0), ended(120.0))
    history.add(ended(900.0), run_keys(spec(), ("python", "train.py", "--lr=1")))
    same = history.estimate(spec(), run_keys(spec(), TRAIN))
    other = history.estimate(spec(), run_keys(spec(), ("python", "train.py", "--lr=7")))
    assert same is not None and (same.seconds, same.source) == (120.0, "3 runs of the same command")
    assert other is not None and (other.seconds, other.source) == (510.0, "4 runs of the same script")
    element = spec(array="7")
    history.add(ended(60.0, element), run_keys(element, TRAIN))
    of_array = history.estimate(element, run_keys(element, TRAIN))
    assert of_array is not None and (of_array.seconds, of_array.source) == (60.0, "1 run of its array")
    assert history.estimate(spec(user="bob"), run_keys(spec(user="bob"), TRAIN)) is None
    assert history.estimate(spec(), run_keys(spec(), ("python", "other.py"))) is None


def test_runs_that_failed_count_nothing_and_numbers_of_devices_are_converted() -> None:
    assert history_of(ended(9.0, state=JobState.FAILED)).estimate(spec(), run_keys(spec(), TRAIN)) is None
    found = history_of(ended(100.0, spec(4))).estimate(spec(1), run_keys(spec(), TRAIN))
    assert found is not None and found.seconds == pytest.approx(100.0 * 4**0.9, rel=1e-4)
    elastic = replace(ended(100.0, spec((2, 8))), rates=(1.0, 2.0, 3.0), done=500.0)
    found = history_of(elastic).estimate(spec(2), run_keys(spec(2), TRAIN))
    assert found is not None and found.seconds == pytest.approx(250.0)


def test_a_number_of_steps_counts_beside_runs_of_other_numbers() -> None:
    """A trial of 30 steps says how long one takes, not how long 3,000 take."""
    trial = replace(ended(25.0), done=30.0, rate_per_s=3.0)
    elastic = replace(ended(40.0, spec((1, 4))), done=90.0, rates=(4.0, 6.0), rate_per_s=6.0)
    history = history_of(trial, elastic, ended(500.0))
    found = history.estimate(spec((1, 4), total=3000.0), run_keys(spec(), ("python", "train.py", "3000")))
    assert found is not None and found.seconds == pytest.approx(3000.0 * (1 / 3 + 1 / 4) / 2, rel=1e-6)
    unknown = history.estimate(spec(), run_keys(spec(), ("python", "train.py", "3000")))
    assert unknown is not None and unknown.seconds == 25.0
    silent = history_of(ended(500.0)).estimate(spec(total=3000.0), run_keys(spec(), TRAIN))
    assert silent is not None and silent.seconds == 500.0


def test_the_owners_estimate_stays_and_a_small_change_is_none() -> None:
    history, keys = history_of(ended(100.0)), run_keys(spec(), TRAIN)
    own = spec(estimate_s=7.0)
    assert history.with_estimate(own, keys) == replace(own, run_key="script ann python train.py")
    first = history.with_estimate(spec(), keys)
    assert (first.estimate_s, first.estimate_source) == (100.0, "1 run of the same command")
    history.add(ended(105.0), keys)
    assert history.with_estimate(first, keys) is first
    history.add(ended(150.0), keys)
    history.add(ended(150.0), keys)
    assert history.with_estimate(first, keys).estimate_s == 127.5


def test_an_ended_job_changes_those_that_are_like_it() -> None:
    jobs = {"2": Job("2", spec(), 0.0), "3": Job("3", spec(), 0.0), "4": Job("4", spec(user="bob"), 0.0)}
    commands = {"1": TRAIN, "2": TRAIN, "3": ("sleep", "9"), "4": TRAIN}

    def keys_of(job: Job) -> tuple[RunKey, ...]:
        return run_keys(job.spec, commands[job.id])

    changes = RuntimeHistory().learn(ended(100.0), jobs, keys_of, 5.0)
    assert [(change.job, change.spec.estimate_s) for change in changes] == [("2", 100.0)]


def test_in_a_simulation_history_shortens_the_mean() -> None:
    arrivals = [
        JobArrival(
            10.0 * number,
            f"j{number}",
            JobSpec("ann", Needs(1, 1)),
            timed_program(seconds, 1),
            ("python", f"{int(seconds)}.py"),
        )
        for number in range(30)
        for seconds in [(3000.0, 300.0)[number % 3 > 0]]
    ]
    mean_s = {}
    for policy, knows in (("las", "unknown"), ("default", "unknown"), ("default", "history"), ("default", "known")):
        conditions = Conditions(devices_of("1x2"), Settings(policy=policy), remaining=knows)
        mean_s[policy, knows] = mean([job.jct_s for job in simulate(arrivals, conditions).jobs])
    assert mean_s["default", "unknown"] < 0.9 * mean_s["las", "unknown"]
    assert mean_s["default", "known"] < 1.1 * mean_s["default", "history"] < 0.85 * mean_s["default", "unknown"]
