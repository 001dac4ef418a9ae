"""Ranks that die in a loop over `run.batches` with `run.gather`, beside ranks without batches: every sample once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.training.comm.control import Control, Operation
from evenload.training.step.planner import Planner
from tests.ranks.elastic.supervised import Supervised

NUM_SAMPLES, BATCH = 24, 6
LOST = "w1"
AHEAD = "w0"
"""Completes the collective in which `LOST` dies; the others do not know that it is complete."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def inject(worker: str, place: str, at: tuple[Operation, int]) -> None:
    """Kill `LOST` in its n-th exchange of an operation: `before` it, or in the `confirm` after it, which `AHEAD` completes."""
    exchange, confirm = Control._exchange_table, Control.confirm
    numbers: dict[Operation, int] = {}
    now: list[tuple[Operation, int]] = []

    def exchanged(control: Control, operation: Operation, values: Any) -> Any:
        numbers[operation] = numbers.get(operation, 0) + 1
        now[:] = [(operation, numbers[operation])]
        if worker == LOST and place == "before" and now == [at]:
            die()
        return exchange(control, operation, values)

    def confirmed(control: Control) -> None:
        if place == "confirm" and now == [at] and worker in (LOST, AHEAD):
            now.clear()
            if worker == LOST:
                time.sleep(
                    0.5
                )  # until all have the values: a rank completes a confirmation only if all have entered it
                die()
            return
        confirm(control)

    Control._exchange_table, Control.confirm = exchanged, confirmed  # type: ignore[method-assign]


def opened(folder: str, shares: tuple[int, ...]) -> evenload.Run:
    """Train for two steps with these shares; evaluations are divided likewise, a share of 0 gets no batch."""
    run = evenload.init(project_dir=folder, seed=0, timeout_s=20, balance=shares)
    model, loader = run.prepare(nn.Linear(2, 1), DataLoader(TensorDataset(torch.randn(24, 2)), batch_size=12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.resume(model=model, optimizer=optimizer)
    for step in loader:
        step.backward(lambda batch: model(batch[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    Planner.speeds = lambda planner: tuple(map(float, planner.shares))  # type: ignore[method-assign]  # also 0
    return run


def evaluate(
    folder: str, shares: tuple[int, ...], place: str, at: tuple[Operation, int], num_samples: int, every: int = 1
) -> dict[str, Any]:
    """`every`: the batches after which values are gathered."""
    worker = Path(os.environ["EVENLOAD_WORKER"]).stem
    run = opened(folder, shares)
    inject(worker, place, at)
    run.barrier()
    seen: list[int] = []
    joined: list[int] = []
    held: list[torch.Tensor] = []
    for number, batch in enumerate(run.batches(DataLoader(range(num_samples), batch_size=BATCH)), 1):
        seen += batch.tolist()
        held.append(batch)
        if number % every == 0:
            values, twice = run.gather(torch.cat(held)), run.gather(2 * torch.cat(held))
            assert twice.tolist() == (2 * values).tolist()
            joined += values.tolist()
            held.clear()
    joined += run.gather([sample for batch in held for sample in batch.tolist()])
    found = {"seen": seen, "joined": joined, "all": run.gather(seen), "ranks": run.world_size}
    run.close()
    return found


@pytest.mark.parametrize(
    ("place", "at"),
    [
        ("before", (Operation.GATHER_BATCH, 5)),
        ("confirm", (Operation.GATHER_BATCH, 4)),
        ("confirm", (Operation.END_ROUND, 1)),
        ("before", (Operation.END_ROUND, 1)),
        ("confirm", (Operation.EVALUATE, 1)),
        ("before", (Operation.EVALUATE, 1)),
        ("confirm", (Operation.BARRIER, 1)),
    ],
)
@pytest.mark.parametrize("shares", [(4, 4, 0), (4, 4, 4, 0)])
def test_a_rank_is_lost_beside_one_without_batches(
    tmp_path: Path, shares: tuple[int, ...], place: str, at: tuple[Operation, int]
) -> None:
    supervised = Supervised(tmp_path, evaluate, str(tmp_path / "run"), shares, place, at, NUM_SAMPLES)
    supervised.start(len(shares))
    results = supervised.run(60)
    assert supervised.lost == [LOST] and len(results) == len(shares) - 1
    gathered = at[1] // 2 if at[0] is Operation.GATHER_BATCH else 0
    gathered += NUM_SAMPLES // BATCH if at[0] is Operation.END_ROUND else 0
    others = [sample for found in results.values() for sample in found["seen"]]
    assert len(others) == len(set(others)), "evaluated twice"
    for found in results.values():
        assert found["ranks"] == len(shares) - 1
        assert sorted(found["all"]) == sorted(others)
    first = results[AHEAD]["joined"]
    assert sorted(first) == list(range(NUM_SAMPLES)), "gathered twice, or never"
    assert len(set(range(NUM_SAMPLES)) - set(others)) == gathered * BATCH // (len(shares) - 1), "lost with the rank"


@pytest.mark.parametrize(("place", "at"), [("before", 3), ("confirm", 2), ("confirm", 4)])
def test_a_rank_is_lost_that_gathers_after_each_second_batch(tmp_path: Path, place: str, at: int) -> None:
    operation = (Operation.GATHER_BATCH, at)
    supervised = Supervised(tmp_path, evaluate, str(tmp_path / "run"), (4, 4, 0), place, operation, NUM_SAMPLES, 2)
    supervised.start(3)
    results = supervised.run(60)
    assert supervised.lost == [LOST]
    others = [sample for found in results.values() for sample in found["seen"]]
    assert len(others) == len(set(others)), "evaluated twice"
    assert sorted(results[AHEAD]["joined"]) == list(range(NUM_SAMPLES)), "gathered twice, or never"
    gathered = 4 if at == 4 else 2
    assert len(set(range(NUM_SAMPLES)) - set(others)) == gathered * BATCH // 2, "lost with the rank"
