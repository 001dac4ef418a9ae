"""Shares that the user set to 0: the rank computes nothing, exactly as one that the balancer leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.testing import run_ranks

BATCH, STEPS, MAY_COMPUTE = 16, 20, 5


def _train(
    folder: str, balance: Any, batch: int, is_registered: bool, num_more: int = 0, num_epochs: int = 1
) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    run = evenload.init(project_dir=folder, seed=0, balance=balance, timeout_s=60)
    norm = nn.BatchNorm1d(12) if batch > 8 else nn.Identity()  # of two samples it would blow up rounding
    model = nn.Sequential(nn.Linear(6, 12), norm, nn.Tanh(), nn.Linear(12, 1))
    x = torch.randn(batch * STEPS + num_more, 6, generator=torch.Generator().manual_seed(1))
    model, loader = run.prepare(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if is_registered:
        run.resume(model=model, optimizer=optimizer)
    num_calls, losses = 0, []

    def loss_fn(batch: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    for _ in range(num_epochs):
        for step in loader:
            losses.append(float(step.backward(loss_fn)))
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.cat([value.detach().flatten().double() for value in model.state_dict().values()])
    run.close()
    return {"calls": num_calls, "losses": losses, "weights": weights}


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("balance", "batch", "world"), [((1, 0), BATCH, 2), ((3, 0, 5), BATCH, 3), ("even", 2, 3)])
def test_a_rank_with_a_fixed_share_of_0_computes_nothing(tmp_path: Path, balance: Any, batch: int, world: int) -> None:
    ranks = run_ranks(_train, world, str(tmp_path / "ranks"), balance, batch, True, timeout_s=60)
    (one,) = run_ranks(_train, 1, str(tmp_path / "one"), "auto", batch, True, timeout_s=60)
    idle = 2 if balance == "even" else 1
    for rank, found in enumerate(ranks):
        assert float((found["weights"] - one["weights"]).norm() / one["weights"].norm()) <= 1e-12
        assert found["losses"] == ranks[0]["losses"]
        assert found["calls"] <= MAY_COMPUTE if rank == idle else found["calls"] >= STEPS
    messages = [event["message"] for event in _events(tmp_path / "ranks") if event.get("kind") == "balance"]
    assert f"rank {idle} left out with a share of 0" in messages


@pytest.mark.parametrize(
    ("balance", "is_registered", "reason"),
    [((1, 0), False, "run.resume was not called"), ((0, 1), True, "rank 0 never leaves the steps")],
)
def test_one_that_must_stay_is_named(tmp_path: Path, balance: Any, is_registered: bool, reason: str) -> None:
    ranks = run_ranks(_train, 2, str(tmp_path), balance, BATCH, is_registered, timeout_s=60)
    assert all(found["calls"] >= STEPS for found in ranks)
    (event,) = [event for event in _events(tmp_path) if event.get("kind") == "stays"]
    assert reason in event["message"]


def test_a_small_last_batch_names_nobody(tmp_path: Path) -> None:
    """Of one sample: the rank with the smaller share has none, in one step of each epoch."""
    run_ranks(_train, 2, str(tmp_path), (7, 1), 8, False, 1, 7, timeout_s=60)
    assert not [event for event in _events(tmp_path) if event.get("kind") == "stays"]
