"""Straight steps of rank 0 while another rank stands by: all ranks see what they see in usual steps, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.balance.rebalance import Decision
from evenload.errors import EvenloadError
from evenload.testing import run_ranks
from evenload.training.launch.environment import detect
from evenload.training.step import step as step_module
from evenload.training.step import straight
from evenload.training.step.straight import StraightLine
from tests.ranks.elastic.supervised import Supervised

BATCH, STEPS, EPOCHS = 8, 25, 4
DECISIONS = {3: (BATCH, 0), 41: (5, 3), 50: (BATCH, 0)}
"""Step -> shares, which are sent in the next one and hold two steps later."""
_TIMES = ("time", "seconds", "ranks", "write_s", "size_bytes")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2))
        self.head, self.extra = nn.Linear(12, 1), nn.Linear(12, 1)
        self.register_buffer("num_calls", torch.zeros(()))
        self.uses_extra = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        out: torch.Tensor = self.head(hidden) + self.extra(hidden) if self.uses_extra else self.head(hidden)
        return out


def _data(num_samples: int = BATCH * STEPS - 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


class Script:
    """Trains with what a script may do from step to step; `seen` holds what it sees."""

    def __init__(self, folder: str) -> None:
        self.run = evenload.init(project_dir=folder, seed=0, timeout_s=60, check_every=3)
        torch.manual_seed(0)
        self.model, self.loader = self.run.prepare(Net(), DataLoader(_data(), batch_size=BATCH, shuffle=True))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.run.resume(model=self.model, optimizer=self.optimizer)
        self.loader.planner._balancer = None  # the test decides alone
        self.seen: list[Any] = []
        self.has_raised = False

    def train(self) -> list[Any]:
        for _ in range(EPOCHS):
            for step in self.loader:
                loss = self.one(step)
                if step.index > 70 and loss < 1.0:
                    self.seen.append(("break", step.index))
                    break
            self.model.eval()
            self.seen.append(sum(self.model(x).sum().item() for x, _ in self.run.batches(DataLoader(_data(7)))))
            self.model.train()
        self.run.close()
        return self.seen

    def loss(self, batch: Any) -> Any:
        x, y = batch
        loss, index = (self.model(x) - y).square().mean(), self.index
        self.model.num_calls += 1
        if index % 11 == 7:
            return loss, float(len(x)) / 3
        if index % 11 == 8:
            return {"loss": loss, "weight": x.abs().sum(), "size": x.square().mean()}
        if index == 36:
            return loss * float("nan")
        if index in (31, 60) and not self.has_raised:
            self.has_raised = True
            raise ValueError("the script's own")
        if index == 84 and len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    def one(self, step: Any) -> float:
        self.index, self.has_raised = step.index, False
        self.model.uses_extra = step.index % 13 not in (5, 6)
        self.model.head.requires_grad_(step.index % 17 != 12)
        if step.index % 9 == 2:
            self.seen.append(self.run.any(self.run.rank == 1))
        hook = self.model.extra.weight.register_hook(lambda grad: grad * 2) if step.index % 19 == 15 else None
        try:
            loss = step.backward(self.loss)
        except (ValueError, EvenloadError):
            self.seen.append(("raised", step.index))
            loss = step.backward(self.loss)
        if step.index % 23 == 20:
            loss = loss + step.backward(lambda batch: self.model(batch[0]).mean())
        if hook is not None:
            hook.remove()
        self.seen.append((step.index, loss.item(), dict(step.metrics), step.shares, torch.rand(()).item()))
        self.seen.append((step.batch.plan.out, self.loader.loader.cursor()))
        self.run.log({"loss": loss})
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=step.index % 7 != 3)
        if step.index % 40 == 34:
            self.run.checkpoint()
        if self.run.rank == 0 and step.index in DECISIONS:
            shares = DECISIONS[step.index]
            self.loader.planner._pending = Decision(shares, 1, "left_out", 1, None, "the test decides", 1.0, 0.5)
        return loss.item()


def _count_straight() -> list[int]:
    """Return the number of straight steps from now on, as it will be."""
    num_straight, compute = [0], StraightLine.backward

    def counted(*args: Any) -> Any:
        num_straight[0] += 1
        return compute(*args)

    StraightLine.backward = counted  # type: ignore[method-assign]
    return num_straight


def _train(folder: str, is_straight: bool) -> tuple[str, dict[str, torch.Tensor], int]:
    """Return what the script saw, its last weights, and the number of straight steps."""
    torch.set_num_threads(1)
    compute, begin, num_straight = StraightLine.backward, step_module.begin_line, _count_straight()
    straight._LASTS_S = 1e9
    if not is_straight:
        step_module.begin_line = lambda *_: None  # type: ignore[assignment]
    script = Script(folder)
    seen = script.train()
    StraightLine.backward, step_module.begin_line = compute, begin  # type: ignore[method-assign]
    return str(seen), {name: value.clone() for name, value in script.model.state_dict().items()}, num_straight[0]


def _both(folder: str) -> tuple[Any, Any]:
    return _train(f"{folder}/usual", False), _train(f"{folder}/straight", True)


def _records(folder: Path) -> list[dict[str, Any]]:
    lines = [
        json.loads(line) for name in ("steps", "events") for line in (folder / f"{name}.jsonl").read_text().splitlines()
    ]
    return [{name: value for name, value in line.items() if name not in _TIMES} for line in lines]


def test_all_ranks_see_what_usual_steps_show(tmp_path: Path) -> None:
    ranks = run_ranks(_both, 2, str(tmp_path), timeout_s=100)
    for rank, (usual, again) in enumerate(ranks):
        assert usual[0] == again[0]
        assert all(torch.equal(value, again[1][name]) for name, value in usual[1].items())
        assert usual[2] == 0 and (again[2] > 30 if rank == 0 else again[2] == 0)
    records = _records(tmp_path / "usual")
    assert len(records) > 80
    for one, other in zip(records, _records(tmp_path / "straight"), strict=True):
        assert {**one, "fields": None} == {**other, "fields": None}


def _train_long(folder: str, dies_at: int) -> tuple[int, int, torch.Tensor]:
    """Train for two seconds with rank 1 out from step 5 on; worker w1 dies in a step."""
    torch.set_num_threads(1)
    num_straight = _count_straight()
    run = evenload.init(project_dir=folder, seed=0, timeout_s=30)
    model, loader = run.prepare(nn.Linear(6, 1), DataLoader(_data(4000), batch_size=BATCH, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.resume(model=model, optimizer=optimizer)
    for step in loader:
        if run.rank == 0 and step.index == 3:
            loader.planner._pending = Decision((BATCH, 0), 1, "left_out", 1, None, "the test decides", 1.0, 0.5)
        step.backward(lambda batch: (model(batch[0]) - batch[1]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.004)
        if step.index == dies_at and detect().worker == "w1":
            os.kill(os.getpid(), signal.SIGKILL)
    run.close()
    return num_straight[0], run.world_size, model.weight.detach().clone()


def test_a_rank_that_stands_by_dies_and_another_joins_in_a_straight_line(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, _train_long, str(tmp_path / "run"), 60)
    supervised.start(2)
    results = supervised.run(60, {1: "w2"})
    assert supervised.lost == ["w1"] and set(results) == {"w0", "w2"}
    assert results["w0"][0] > 40 and results["w0"][1] == 2
    assert torch.equal(results["w0"][2], results["w2"][2])
