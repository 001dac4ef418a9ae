"""Count the Python calls of a usual step of two ranks that both compute; see tests/unit/training/test_own_cost.py."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from types import FrameType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.testing import run_ranks
from evenload.training.step import step_recorder
from tests.unit.training.test_own_cost import AT_TIMES, NUM_STEPS, SOURCE

MOST_CALLS = {"plain": 280, "many": 280, "normed": 400}
"""Of Python functions in a step on rank 0, with its record."""
_WAITS = ("_wait", "add_wait")
"""Functions of shared_memory.py that run only where the other rank comes late."""


def model_of(kind: str) -> nn.Module:
    if kind == "normed":
        body = (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        return nn.Sequential(*body, nn.Linear(8, 1))
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(120 if kind == "many" else 2)), nn.Linear(8, 1))


def _count_calls(folder: str, kind: str) -> tuple[float, list[tuple[str, int]]]:
    """Return the calls of a usual step, and those of all steps by function."""
    step_recorder._WRITE_EVERY_S = 0.0  # each step by itself, however long the steps take
    run = evenload.init(project_dir=folder, seed=0)
    data = TensorDataset(torch.randn(400, 8), torch.randn(400, 1))
    model, loader = run.prepare(model_of(kind), DataLoader(data, batch_size=8, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    calls: Counter[str] = Counter()
    after: list[int] = []

    def count(frame: FrameType, event: str, arg: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or not code.co_filename.startswith(SOURCE) or "/balance/" in code.co_filename:
            return  # how many steps the balancer takes as one depends on how long they last
        files = (code.co_filename, "" if caller is None else caller.f_code.co_filename)
        names = (code.co_name, "" if caller is None else caller.f_code.co_name)
        if not any(file.endswith(AT_TIMES) for file in files) and not set(names) & set(_WAITS):
            calls[f"{Path(files[0]).name} {code.co_qualname}"] += 1

    try:
        for step in loader:
            if step.index >= NUM_STEPS:  # without the first steps, in which everything is looked at
                after.append(calls.total())
                sys.setprofile(count)
            step.backward(lambda batch: (model(batch[0]) - batch[1]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step.index == 2 * NUM_STEPS:
                break
    finally:
        sys.setprofile(None)
        run.close()
    return median(late - early for early, late in itertools.pairwise(after)), calls.most_common(60)


@pytest.mark.parametrize("kind", MOST_CALLS)
def test_a_step_of_two_ranks_makes_few_calls(tmp_path: Path, kind: str) -> None:
    (num_calls, by_function), _ = run_ranks(_count_calls, 2, str(tmp_path / "run"), kind)
    assert num_calls <= MOST_CALLS[kind], by_function
