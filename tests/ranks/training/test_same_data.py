"""Real ranks that were given other data end before the first step, all of them, with what to do."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

import evenload
from evenload.errors import EvenloadError
from evenload.testing import run_ranks


def split_before_init(folder: str, seeded: bool) -> Any:
    """As many scripts do: a split and a shuffle at random, before anything else."""
    indices = list(range(64))
    random.Random(3 if seeded else None).shuffle(indices)
    data = Subset(TensorDataset(torch.arange(64.0).view(64, 1)), indices[:48])
    try:
        run = evenload.init(project_dir=folder, seed=0)
        run.prepare(nn.Linear(1, 1), DataLoader(data, batch_size=16))
        found = sorted(x for (batch,) in run.batches(DataLoader(data, batch_size=16)) for x in batch.flatten().tolist())
        run.close()
    except EvenloadError as error:
        return str(error)
    return found


def test_a_split_that_differs_between_processes_is_refused(tmp_path: Path) -> None:
    errors = run_ranks(split_before_init, 2, str(tmp_path / "run"), False)
    assert all(text.startswith("the loaders select different samples on rank 1 and on rank 0") for text in errors), (
        errors
    )
    both = run_ranks(split_before_init, 2, str(tmp_path / "seeded"), True)
    assert len(both[0] + both[1]) == len({*both[0], *both[1]}) == 48


def other_evaluation(folder: str) -> str:
    run = evenload.init(project_dir=folder, seed=0)
    try:
        list(run.batches(DataLoader(TensorDataset(torch.zeros(40 + run.rank)), 8)))
    except EvenloadError as error:
        return str(error)
    return "went on"


def test_loaders_of_an_evaluation_are_compared_too(tmp_path: Path) -> None:
    errors = run_ranks(other_evaluation, 2, str(tmp_path / "run"))
    assert all("rank 0 has 40 samples in batches of 8, rank 1 has 41 samples" in text for text in errors), errors


def weights_from_losses(folder: str, agreed: bool) -> str:
    """A sampler that prefers samples of large loss."""
    run = evenload.init(project_dir=folder, seed=0, balance=(5, 3))
    index = torch.arange(64)
    sampler = WeightedRandomSampler(torch.ones(64, dtype=torch.float64), 32)
    data = TensorDataset(index.double().view(64, 1) / 64, index)
    model, loader = run.prepare(nn.Linear(1, 1).double(), DataLoader(data, batch_size=8, sampler=sampler))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []

    def encode(batch: Any) -> Any:
        return model(batch[0])[:, 0].square(), batch[1]

    def batch_loss(losses: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        seen[:] = [rows, losses.detach()]
        return losses.mean()

    try:
        for _ in range(3):
            for step in loader:
                if agreed:
                    step.backward(encode, batch_loss=batch_loss)
                else:
                    step.backward(lambda batch: batch_loss(*encode(batch)))
                sampler.weights[seen[0]] = seen[1] + 0.01
                optimizer.step()
                optimizer.zero_grad()
    except EvenloadError as error:
        return f"in epoch {loader.epoch}: {error}"
    run.close()
    return "went on"


def test_a_sampler_that_each_rank_changes_by_its_own_losses_is_refused(tmp_path: Path) -> None:
    errors = run_ranks(weights_from_losses, 2, str(tmp_path / "own"), False)
    assert all(text.startswith("in epoch 1: ") for text in errors), errors
    assert "WeightedRandomSampler drew the same samples on all ranks before, and now others on rank 1" in errors[1]
    assert run_ranks(weights_from_losses, 2, str(tmp_path / "agreed"), True) == ["went on"] * 2


HELD: list[torch.Tensor] = []


class OfAVariable(Dataset[Any]):
    """Reads from what the script has made, such as a replay buffer."""

    def __len__(self) -> int:
        return len(HELD)

    def __getitem__(self, index: int) -> Any:
        return HELD[index]


def own_buffer(folder: str) -> str:
    run = evenload.init(project_dir=folder, seed=0)
    HELD[:] = torch.randn(32, 1, generator=torch.Generator().manual_seed(run.rank)).unbind()
    try:
        run.prepare(nn.Linear(1, 1), DataLoader(OfAVariable(), 8))
    except EvenloadError as error:
        return str(error)
    return "went on"


def test_data_in_a_variable_of_the_script_is_compared(tmp_path: Path) -> None:
    errors = run_ranks(own_buffer, 2, str(tmp_path / "run"))
    assert all(text.startswith("the dataset holds different values on rank 1 and on rank 0") for text in errors), errors
