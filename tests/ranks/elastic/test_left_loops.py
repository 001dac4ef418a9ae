"""Loops over `run.batches` that are left before their end, beside a rank without batches: all ranks go on together."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import evenload
from evenload.testing import run_ranks
from evenload.training.step.planner import Planner
from tests.ranks.elastic.supervised import Supervised

NUM_SAMPLES, BATCH = 24, 6
SHARES = (6, 6, 0)
WAYS = ("break", "islice", "return", "next", "kept", "close", "raise", "any", "times", "one")
NEXT = ("any", "reduce", "gather", "barrier", "checkpoint", "step", "batches")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_SAMPLES))


def _first_two(run: evenload.Run, loader: Any) -> int:
    for number, _ in enumerate(run.batches(loader), 1):
        if number == 2:
            return number
    return 0


def leave(run: evenload.Run, loader: Any, way: str, kept: list[Any]) -> None:
    """Begin a loop, and leave it after one batch or two, on the ranks that have batches."""
    if way == "islice":
        assert len(list(itertools.islice(run.batches(loader), 2))) in (0, 2)
    elif way == "return":
        assert _first_two(run, loader) in (0, 2)
    elif way == "next":
        next(run.batches(loader), None)
    elif way in ("kept", "close"):
        kept.append(run.batches(loader))
        next(kept[-1], None)
        if way == "close":
            kept.pop().close()
    elif way == "raise":
        try:
            for _ in run.batches(loader):
                raise ValueError("the script's own")
        except ValueError:
            pass
    else:
        for number, _ in enumerate(run.batches(loader), 1):
            if way == "any" and run.any(number == 2 and run.rank == 0):
                break
            if number == {"break": 2, "any": 9, "times": 1 + run.rank, "one": 9 if run.rank else 1}[way]:
                break


def script(
    folder: str, stream: bool, lost_at: tuple[str, str] | None = None, wire: str = "fp32", pairs: Any = None
) -> dict[str, Any]:
    """Leave loops in each way, and do something else; `lost_at`: after leaving so, and before this, worker w1 is lost."""
    run = evenload.init(project_dir=folder, seed=0, timeout_s=20, balance=SHARES, wire=wire)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, loader = run.prepare(model, DataLoader(TensorDataset(torch.randn(24, 2)), batch_size=12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.resume(model=model, optimizer=optimizer)

    def train() -> None:
        for step in loader:
            step.backward(lambda batch: model(batch[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    train()
    Planner.speeds = lambda planner: tuple(map(float, planner.shares))  # type: ignore[method-assign]  # also 0
    found: Any = DataLoader(Stream() if stream else range(NUM_SAMPLES), batch_size=BATCH)  # type: ignore[arg-type]
    kept: list[Any] = []
    num_batches = []
    num_ranks = 3
    for way, then in pairs or itertools.product(WAYS, NEXT):
        if (way == "kept" and then in ("any", "gather", "reduce", "barrier")) or (stream and way in ("times", "one")):
            continue  # the loop could go on; of an iterable dataset each batch is read together
        leave(run, found, way, kept)
        if (way, then) == lost_at:
            num_ranks = 2
            if os.environ.get("EVENLOAD_WORKER", "").endswith("w1.json"):
                os.kill(os.getpid(), signal.SIGKILL)
        if then == "any":
            assert run.any(run.rank == num_ranks - 1) and not run.any(False)
        elif then == "reduce":
            assert run.reduce(1) == num_ranks
        elif then == "gather":
            assert run.gather([run.rank]) == [*range(num_ranks)]
        elif then == "barrier":
            run.barrier()
        elif then == "checkpoint":
            run.checkpoint()
        elif then == "step":
            train()
        batches = [batch.tolist() for batch in run.batches(found)]
        num_batches.append(len(batches))
        assert run.gather([sample for batch in batches for sample in batch]) == [*range(NUM_SAMPLES)], (way, then)
    leave(run, found, "break", kept)
    run.close()
    return {"rank": run.rank, "batches": num_batches}


@pytest.mark.parametrize("stream", [False, True])
def test_ranks_leave_loops_beside_one_without_batches(tmp_path: Path, stream: bool) -> None:
    supervised = Supervised(tmp_path, script, str(tmp_path / "run"), stream)
    supervised.start(len(SHARES))
    results = supervised.run(60)
    assert supervised.lost == [] and len(results) == 3
    assert all(bool(max(found["batches"])) == (found["rank"] < 2) for found in results.values()), results


@pytest.mark.parametrize("stream", [False, True])
def test_ranks_that_no_loss_may_change_leave_loops(tmp_path: Path, stream: bool) -> None:
    results = run_ranks(script, 3, str(tmp_path / "run"), stream)
    assert all(bool(max(found["batches"])) == (found["rank"] < 2) for found in results), results


@pytest.mark.parametrize(
    "lost_at",
    [
        ("any", "step"),
        *(
            pytest.param(at, marks=pytest.mark.long)
            for at in (("break", "any"), ("one", "batches"), ("raise", "checkpoint"))
        ),
    ],
)
def test_a_rank_is_lost_when_loops_were_left(tmp_path: Path, lost_at: tuple[str, str]) -> None:
    supervised = Supervised(tmp_path, script, str(tmp_path / "run"), False, lost_at)
    supervised.start(len(SHARES))
    results = supervised.run(60)
    assert supervised.lost == ["w1"] and len(results) == 2


def test_a_checkpoint_after_a_loop_that_was_left_gathers_the_errors_of_a_wire_format(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, script, str(tmp_path / "run"), False, None, "int8", [("break", "checkpoint")])
    supervised.start(len(SHARES))
    results = supervised.run(60)
    assert supervised.lost == [] and len(results) == 3
