"""The report of an attempt: which times count as measurements."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenload.training.comm.clock import StepClock
from evenload.training.comm.control import Control
from evenload.training.comm.generation import Membership
from evenload.training.comm.groups import Groups
from evenload.training.parallel.strategy import LocalResult
from evenload.training.step.consistency import Consistency
from evenload.training.step.exchange import ReportExchange
from evenload.training.step.stats import StepStats


@pytest.mark.parametrize(
    ("kind", "benchmark", "tuned"), [("cuda", True, [0, 2]), ("cuda", False, []), ("cpu", True, [])]
)
def test_a_step_in_which_cudnn_tries_its_kernels_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch, kind: str, benchmark: bool, tuned: list[int]
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    control = Control(Groups(Membership(0, ("w",), ""), 0, backend="gloo", timeout_s=1))
    clock = StepClock(torch.device("cpu"))
    exchange = ReportExchange(control, clock, Consistency(0, control, print), torch.device(kind))
    coarsened: list[int] = []
    planner: Any = SimpleNamespace(rank=0, world_size=1, has_decision=False, coarsen=lambda: coarsened.append(1))
    found = []
    for step, rows in enumerate([((16, 4), (15, 4)), ((15, 4), (16, 4)), ((16, 4), (12, 4)), ((0, 20),), ((12, 4),)]):
        batch: Any = SimpleNamespace(plan=SimpleNamespace(micro=rows), reading=SimpleNamespace(code=lambda: 0.0))
        stats = StepStats()
        exchange.begin()
        with clock.segment("compute"):
            pass
        stats.add(exchange.run([LocalResult(memory_bytes=1)], batch, planner, stats))
        if stats.unusual:
            found.append(step)
    expected = [*tuned, 3] if tuned else []  # a rank without samples computes one of weight 0
    assert found == expected
    assert len(coarsened) == len(expected)
