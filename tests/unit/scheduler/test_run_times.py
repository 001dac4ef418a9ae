"""Remaining run times of jobs of unknown work, from those of jobs that have ended."""

from __future__ import annotations

import pytest

from evenload.balance.run_times import NOTHING_SEEN, PastRuns, _RunTimes
from tests.unit.scheduler.queue import Queue, box


def best_ratio(weights: dict[float, float], age_s: float) -> float:
    """The index by its definition: over all d, expected service over the probability of an end."""
    later = {time_s: weight for time_s, weight in weights.items() if time_s > age_s}
    return min(
        sum(weight * (min(time_s, until_s) - age_s) for time_s, weight in later.items())
        / sum(weight for time_s, weight in later.items() if time_s <= until_s)
        for until_s in later
    )


def test_the_index_is_that_of_its_definition() -> None:
    weights = {40.0: 3.0, 50.0: 1.0, 900.0: 0.5, 1000.0: 2.0, 30000.0: 1.0}
    times = _RunTimes(weights)
    for age_s in (0.0, 40.0, 50.0, 900.0, 1000.0):
        assert times.left_s(age_s) == pytest.approx(best_ratio(weights, age_s), rel=1e-12)
    for age_s in (20.0, 400.0, 990.0, 29999.0):  # between, d is chosen as of the run time before
        exact = best_ratio(weights, age_s)
        assert exact - 1e-9 <= times.left_s(age_s) <= 1.3 * exact
    assert times.left_s(40000.0) == 40000.0


def test_a_job_whose_kind_always_took_as_long_is_near_its_end() -> None:
    past = PastRuns([(1, 1000.0)] * 20)
    assert past.left_s(1, 800.0) < past.left_s(1, 0.0) < past.left_s(1, 2000.0)
    assert past.left_s(1, 0.0) == pytest.approx(1000.0, rel=0.4)


def test_without_any_run_and_for_other_numbers_of_devices_a_job_goes_on_for_as_long_as_it_ran() -> None:
    for age_s in (1000.0, 10_000.0, 100_000.0):
        assert age_s / 2 < NOTHING_SEEN.left_s(1, age_s) < 8 * age_s
    past = PastRuns([(1, 50.0)] * 5 + [(8, 9000.0)] * 5)
    assert 10 * past.left_s(1, 0.0) < past.left_s(8, 0.0)


def test_an_estimate_by_similar_runs_counts_until_it_is_outlived() -> None:
    past = PastRuns([(1, 50.0)] * 50)
    assert past.left_s(1, 100.0, 7000.0) > 1000.0 > 4 * past.left_s(1, 0.0)
    assert past.left_s(1, 100_000.0, 7000.0) > 20_000.0


def test_a_job_waits_for_another_of_its_script_that_runs_long() -> None:
    queue = Queue(box(1), min_run_s=0.0)
    queue.submit(1, name="first", run_key="train")
    queue.settle()
    queue.now_s = 3000.0
    queue.submit(1, name="second", run_key="train")
    queue.submit(1, name="other", run_key="plot")
    queue.settle()
    assert queue.running == {"other"}  # which is likely to be short
    queue.now_s = 3060.0
    queue.ended("other")
    queue.settle()
    assert queue.running == {"first"}  # the second takes as long at least
    queue.now_s = 9000.0
    queue.settle()
    assert queue.running == {"first"}
