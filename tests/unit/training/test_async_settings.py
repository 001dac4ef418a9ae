"""Check the opening lines of a run under strategy ``async``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evenload.config import Config
from evenload.training.session.async_run import describe


@pytest.mark.parametrize(("staleness", "idle"), [(1, "1 of the workers wait"), (2, ""), (4, "")])
def test_a_bound_that_leaves_workers_without_work_is_named(staleness: int, idle: str) -> None:
    spec: Any = SimpleNamespace(world_size=4, has_server=True)
    text = describe(Config(strategy="async", staleness=staleness), spec)
    assert ("wait at any time" in text) == bool(idle) and idle in text


def test_one_worker_is_one() -> None:
    spec: Any = SimpleNamespace(world_size=2, has_server=False)
    text = describe(Config(strategy="async"), spec)
    assert "1 worker computes whole global batches; no gradient is applied that is more than 4 updates behind" in text
    assert "The device of rank 0 is idle" in text
