"""The user's own collectives are counted on every group but Evenload's, whoever made the default group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.testing import run_ranks
from evenload.training.comm.user_collectives import user_collectives
from evenload.training.launch.environment import detect


def _own(run: Any) -> tuple[dist.ProcessGroup | None, ...]:
    groups = run._context.groups
    return tuple(group for group in groups.own_groups)


def _collectives(some: Any, every: Any, rank: int) -> dict[str, Any]:
    """What a user may call on a group of ranks 0 and 1, on one of all ranks, and on the default group."""
    x = torch.ones(2)
    peer = 1 - rank
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce of a group": lambda: dist.all_reduce(x, group=every),
        "all_reduce of some": lambda: dist.all_reduce(x, group=some),
        "all_gather": lambda: dist.all_gather([torch.empty(2), torch.empty(2)], x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(4), x),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(2), x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "barrier": lambda: dist.barrier(),
        "objects": lambda: dist.all_gather_object([None, None], "x"),
        "send and receive": lambda: dist.send(x, peer) if rank == 0 else dist.recv(x, peer),
    }


def _count(folder: str) -> dict[str, int]:
    run = evenload.init(project_dir=folder)
    some, every = run.group([0, 1]), dist.new_group(backend="gloo")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, loader = run.prepare(model, DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grew = {}
    before = user_collectives(_own(run))
    for step in loader:
        step.backward(lambda batch: F.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
    run.reduce(1.0)
    run.any(False)
    grew["Evenload's own"] = user_collectives(_own(run)) - before
    for name, call in _collectives(some, every, run.rank).items():
        before = user_collectives(_own(run))
        call()
        grew[name] = user_collectives(_own(run)) - before
    run.close()
    return grew


def _count_adopted(folder: str, store: str) -> dict[str, int]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=detect().rank, world_size=2)
    return _count(folder)


@pytest.mark.parametrize("adopted", [False, True])
def test_collectives_of_the_users_own(adopted: bool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    found = run_ranks(_count_adopted, 2, folder, str(tmp_path / "store")) if adopted else run_ranks(_count, 2, folder)
    for grew in found:
        assert grew.pop("Evenload's own") == 0
        assert {name for name, count in grew.items() if count == 0} == set()


def test_without_groups() -> None:
    assert user_collectives(()) == 0
