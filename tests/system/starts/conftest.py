from __future__ import annotations

from typing import Any

import pytest

TABLE: dict[str, float] = {}
"""Each way to start: the relative difference of its weights to those of `python train.py`."""


@pytest.fixture
def table() -> dict[str, float]:
    return TABLE


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not TABLE or terminalreporter.verbosity < 1:
        return
    terminalreporter.section("weights by way to start, against `python train.py` (relative, 2-norm)")
    for way, difference in TABLE.items():
        terminalreporter.write_line(f"{way:72s} {difference:.1e}")
