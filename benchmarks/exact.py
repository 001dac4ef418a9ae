"""How far a training on several ranks is from the same training in one process.

Method: the cases of tests/ranks/exact (20 AdamW steps in float64, splits 24:6:2, 31:1:0 and others each step, several numbers of
micro-batches, ragged batches, token weights, clipping, BatchNorm, a GAN, ...), run by pytest in this process; the
differences are ||theirs - ours|| / ||ours|| over all parameters at the end, over all gradients (the largest of all steps),
and of losses and metrics.

Bar: at most 1e-12 each.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.report import rows

_TESTS = Path(__file__).parents[1] / "tests" / "ranks" / "exact"


def measure(quick: bool) -> dict[str, Any]:
    """Runs the cases and collects their differences."""
    import pytest
    from tests.ranks.exact import measure as measured

    measured.TABLE.clear()
    arguments = [str(_TESTS), "-q", "-p", "no:cacheprovider", "--no-header"]
    code = pytest.main([*arguments, "-k", "test_on_every_split and Clipped"] if quick else arguments)
    cases = [{"case": name, **dataclasses.asdict(found)} for name, found in measured.TABLE]
    worst = max((max(v for k, v in case.items() if k != "case") for case in cases), default=float("inf"))
    return {
        "cases": cases,
        "worst": worst,
        "tests_passed": int(code) == 0,
        "bars": {"all differences at most 1e-12": int(code) == 0 and worst <= 1e-12},
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    names = ("params", "grads", "buffers", "losses", "metrics")
    lines = [[case["case"], *(f"{case[name]:.1e}" for name in names)] for case in result["cases"]]
    return rows(["case", *names], lines)
