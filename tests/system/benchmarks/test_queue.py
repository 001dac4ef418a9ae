"""The queue's benchmarks run to their end; no figure is judged here."""

from __future__ import annotations

from pathlib import Path

from benchmarks import queue_real

from tests.system.benchmarks.test_benchmarks import quick


def test_queue_decide(tmp_path: Path) -> None:
    cases = quick(tmp_path, "queue_decide")["cases"]
    assert {case["policy"] for case in cases} == {
        "default", "fifo", "priority", "fair_share", "las", "srpt", "goodput", "cost"
    }  # fmt: skip
    assert all(case["commands_per_call"] > 1 and case["median_s"] > 0 for case in cases)


def test_queue_policies_says_what_it_needs(tmp_path: Path) -> None:
    assert "--traces" in quick(tmp_path, "queue_policies")["left_out"]


def test_queue_real_predicts_each_job() -> None:
    """From the submissions and what was measured before alone; the real half hour is not run here."""
    workload = queue_real.submissions(1.0)
    expected_s, slots = queue_real.predicted(workload, queue_real.Measured(0.6, 4.0, 1.0, 3.8, 0.95))
    assert sorted(expected_s) == sorted(slots) == sorted(one.name for one in workload) and len(workload) == 13
    assert all(held[-1][1] == 0 and max(num for _, num in held) <= 4 for held in slots.values())
    assert all(expected_s[one.name] > one.lasts_s / (4 if one.is_elastic else 1) for one in workload)
    assert 1500 < max(one.at_s + expected_s[one.name] for one in workload) < 2100
