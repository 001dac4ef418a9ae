"""The queue's benchmarks run to their end; no figure is judged here."""

from __future__ import annotations

from pathlib import Path

from tests.system.benchmarks.test_benchmarks import quick


def test_queue_decide(tmp_path: Path) -> None:
    cases = quick(tmp_path, "queue_decide")["cases"]
    assert {case["policy"] for case in cases} == {
        "default", "fifo", "priority", "fair_share", "las", "srpt", "goodput", "cost"
    }  # fmt: skip
    assert all(case["commands_per_call"] > 1 and case["median_s"] > 0 for case in cases)


def test_queue_policies_says_what_it_needs(tmp_path: Path) -> None:
    assert "--traces" in quick(tmp_path, "queue_policies")["left_out"]
