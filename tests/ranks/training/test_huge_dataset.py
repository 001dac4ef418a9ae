"""A run over a billion samples: no rank holds their order, and a resume in mid-epoch continues it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import evenload
from evenload.records.reader import read_events
from evenload.testing import run_ranks

NUM_SAMPLES = 10**9


class Computed(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.full((1,), index / NUM_SAMPLES, dtype=torch.float64)


def train(folder: str, until: int) -> tuple[list[float], int]:
    run = evenload.init(project_dir=folder, seed=0)
    model = nn.Linear(1, 1).double()
    model, loader = run.prepare(model, DataLoader(Computed(), batch_size=64, shuffle=True))
    before_bytes = psutil.Process().memory_info().rss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.resume(model=model, optimizer=optimizer)
    losses = []
    for step in loader:
        losses.append(float(step.backward(lambda x: (model(x) - x).square().mean())))
        optimizer.step()
        optimizer.zero_grad()
        if step.index + 1 == until:
            break
    run.checkpoint()
    used_bytes = psutil.Process().memory_info().rss - before_bytes
    run.close()
    return losses, used_bytes


def test_a_billion_samples(tmp_path: Path) -> None:
    ((whole, _),) = run_ranks(train, 1, str(tmp_path / "whole"), 6)
    first = run_ranks(train, 2, str(tmp_path / "parts"), 3)
    second = run_ranks(train, 3, str(tmp_path / "parts"), 6)
    losses = torch.tensor(first[0][0] + second[0][0], dtype=torch.float64)
    assert torch.allclose(losses, torch.tensor(whole, dtype=torch.float64), rtol=1e-12, atol=0)
    assert len(set(whole)) == 6
    assert all(used_bytes < 200 << 20 for _, used_bytes in [*first, *second])
    (event,) = [event for event in read_events(tmp_path / "whole") if event.kind == "order"]
    assert event.message.startswith("1,000,000,000 samples are shuffled by a permutation that is computed")
