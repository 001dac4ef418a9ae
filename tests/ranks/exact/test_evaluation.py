"""Metrics by `run.batches` and `run.reduce`: every sample once, none twice, whatever the sizes and shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import evenload
from evenload.testing import run_ranks
from tests.ranks.exact.tasks import TASKS
from tests.ranks.exact.tasks.base import Rows

SIZES = (1, 2, 7, 100)


def _samples(size: int) -> Rows:
    g = torch.Generator().manual_seed(size)
    x = torch.randn(size, 8, generator=g, dtype=torch.float64)
    y = torch.randint(0, 4, (size,), generator=g)
    return Rows([(i, x[i], y[i]) for i in range(size)])


def _evaluate(model: Any, batches: Any) -> tuple[list[int], int, torch.Tensor]:
    seen, right, loss = [], 0, torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for index, x, y in batches:
            out = model(x)
            seen += index.tolist()
            right += int((out.argmax(1) == y).sum())
            loss += F.cross_entropy(out, y, reduction="sum")
    return seen, right, loss


def evaluate_all(balance: tuple[int, ...], folder: str, strategy: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    run = evenload.init(project_dir=folder, seed=0, balance=balance, strategy=strategy)
    task = TASKS["Task"]()
    torch.manual_seed(task.seed)
    task.build()
    model, loader = run.prepare(task.models[0], DataLoader(task.dataset, batch_size=32))
    results = []
    for size in SIZES:
        for options in ({"batch_size": 5}, {"batch_size": 64, "shuffle": True}, {"batch_size": 1}):
            seen, right, loss = _evaluate(model, run.batches(DataLoader(_samples(size), **options)))
            total = run.reduce({"right": right, "seen": len(seen), "loss": loss})
            mean = run.reduce(float(len(seen)), op="mean")
            results.append({"own": seen, "mean": mean, **total})
    for step in loader:  # evaluation is no step: training goes on after it, and between steps
        step.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
        results.append({"between": run.reduce(len(_evaluate(model, run.batches(DataLoader(_samples(7))))[0]))})
        break
    run.close()
    return results


def test_metrics_to_the_last_sample(strategy: str, tmp_path: Path) -> None:
    ranks = run_ranks(evaluate_all, 3, (24, 6, 2), str(tmp_path), strategy)
    task = TASKS["Task"]()
    torch.manual_seed(task.seed)
    task.build()
    for index, size in enumerate(size for size in SIZES for _ in range(3)):
        found = [results[index] for results in ranks]
        _, right, loss = _evaluate(task.models[0], DataLoader(_samples(size), batch_size=size))
        assert sorted(i for rank in found for i in rank["own"]) == list(range(size))
        for rank in found:
            assert (rank["right"], rank["seen"]) == (right, size)
            assert abs(float(rank["loss"]) - float(loss)) <= 1e-12 * float(loss)
            assert rank["mean"] == size / 3
            assert rank["loss"].dtype == torch.float64
    assert [results[-1]["between"] for results in ranks] == [7, 7, 7]
