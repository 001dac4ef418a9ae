"""A step that is done again: memory ran out on one rank, or a gradient came after its bucket had left."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.testing import run_ranks
from tests.ranks.exact.measure import check
from tests.ranks.exact.ranks import Setting, run_split, train, train_all
from tests.ranks.exact.reference import Reference
from tests.ranks.exact.tasks import TASKS, Recorder


def _train_drawing(setting: Setting, folder: str) -> tuple[Recorder, list[tuple[int, int, float]]]:
    torch.set_num_threads(1)
    task = TASKS["LateDrawing"]()
    return train(task, setting, folder), task.drawn  # type: ignore[attr-defined]


@pytest.mark.every_strategy
def test_out_of_memory_on_one_rank(strategy: str, tmp_path: Path) -> None:
    names = ["OutOfMemory", "OutOfMemoryLate", "OutOfMemoryTokens"]
    setting = Setting((24, 6, 2), strategy=strategy)
    ranks = run_split(train_all, 3, strategy, [(name, setting) for name in names], str(tmp_path))
    for index, name in enumerate(names):
        records = [results[index] for results in ranks]
        first = 3 if name == "OutOfMemoryLate" else 0
        # at most 5 of rank 0's 24 fit: 24 at once, 12, 6, and at last 3
        assert records[0].num_micro == [1] * first + [8] * (10 - first)
        assert records[0].redone == [step == first for step in range(10)]
        events = [event for event in records[0].events if event.get("kind") == "memory"]
        assert [event["fields"]["num_micro"] for event in events] == [2, 4, 8]
        assert all(event["step"] == first and "rank 0 ran out of memory" in event["message"] for event in events)
        check(f"{name} {setting}", records, Reference(TASKS[name](), records[0].num_micro).train())


def test_out_of_memory_alone_puts_buffers_back(strategy: str, tmp_path: Path) -> None:
    """In a world of one BatchNorm may be done again too: its running statistics count each micro-batch once."""
    (records,) = run_ranks(train_all, 1, [("OutOfMemoryNormed", Setting("even", strategy=strategy))], str(tmp_path))
    assert records[0].redone == [True] + [False] * 9
    assert max(records[0].num_micro) == 2
    expected = Reference(TASKS["OutOfMemoryNormed"](), records[0].num_micro).train()
    check("OutOfMemoryNormed world of one", records, expected)


def test_a_late_gradient_and_the_same_randomness_again(strategy: str, tmp_path: Path) -> None:
    """A parameter that is used for the first time in step 3, after its bucket was recorded as complete without it."""
    setting = Setting((24, 6, 2), 8, strategy=strategy, bucket_bytes=None)
    ranks = run_ranks(_train_drawing, 3, setting, str(tmp_path))
    records = [record for record, _ in ranks]
    assert [step for step, redone in enumerate(records[0].redone) if redone] == [3]
    check(f"LateDrawing {setting}", records, Reference(TASKS["LateDrawing"](), records[0].num_micro).train())
    for _, drawn in ranks:
        first, again = [[row for row in drawn if row[0] == 3][part] for part in (slice(0, 3), slice(3, 6))]
        assert first == again, "loss_fn drew other numbers when the step was done again"
        assert len({value for *_, value in drawn}) == len(drawn) - 3
    everyone = [value for _, drawn in ranks for *_, value in drawn]
    assert len(set(everyone)) == len(everyone) - 9, "two ranks, steps or micro-batches drew the same numbers"


def _hold_activations(folder: str) -> list[bool]:
    """Return for the first call of each repeated attempt whether tensors of the failed one were still alive."""
    run = evenload.init(project_dir=folder, seed=0)
    model, loader = run.prepare(nn.Linear(4, 1), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=16))
    alive: list[weakref.ref[torch.Tensor]] = []
    found: list[bool] = []

    def loss_fn(batch: Any) -> torch.Tensor:
        (x,) = batch
        if alive and len(x) < 16:
            found.append(alive.pop()() is not None)
        activation = model(x).square()
        if len(x) > 4:
            alive[:] = [weakref.ref(activation)]
            raise torch.OutOfMemoryError("injected")
        return activation.mean()

    for step in loader:
        step.backward(loss_fn)
        model.zero_grad()
        break
    return found


def test_a_failed_attempt_keeps_no_activations(tmp_path: Path) -> None:
    assert run_ranks(_hold_activations, 1, str(tmp_path)) == [[False, False]]
