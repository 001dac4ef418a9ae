"""A module in a dataset's transform, such as SimCLR's blur, is no part of the model: its weights may be those of one sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import evenload
from evenload.testing import run_ranks


class Blurred(Dataset[Any]):
    def __init__(self) -> None:
        self.blur = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1, bias=False), nn.BatchNorm1d(1))

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        with torch.no_grad():
            self.blur[0].weight.copy_(torch.rand(3))
            return self.blur(torch.rand(1, 1, 8))[0, 0]


def train(folder: str) -> int:
    run = evenload.init(project_dir=folder, seed=0)
    model, loader = run.prepare(nn.Linear(8, 1), DataLoader(Blurred(), batch_size=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_steps = 0
    for step in loader:
        step.backward(lambda x: model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
    run.close()
    return num_steps


def test_the_weights_of_a_transform_may_differ_between_ranks(tmp_path: Path) -> None:
    assert run_ranks(train, 2, str(tmp_path / "run")) == [4, 4]
