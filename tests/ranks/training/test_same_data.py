"""Real ranks that were given other data end before the first step, all of them, with what to do."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

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
    told = run_ranks(split_before_init, 2, str(tmp_path / "run"), False)
    assert all(text.startswith("the loaders select different samples on rank 1 and on rank 0") for text in told), told
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
    told = run_ranks(other_evaluation, 2, str(tmp_path / "run"))
    assert all("rank 0 has 40 samples in batches of 8, rank 1 has 41 samples" in text for text in told), told
