"""A rank that leaves the groups of gradients and returns: exact, with the state of rank 0, and never where it must stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.balance.rebalance import Decision
from evenload.testing import run_ranks

BATCH, STEPS, EPOCHS = 16, 12, 2
LEAVES_AT, RETURNS_AT = 3, 17  # decided in this step; in force two steps later

JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"kind": "momentum"},
    "norm": {"norm": True, "kind": "momentum"},  # AdamW would blow up the rounding of a bias before BatchNorm
    "metrics": {"returns": "dict"},
    "new metrics": {"returns": "more"},
    "raised": {"raises_at": 8},
    "frozen": {"freezes_at": 8, "kind": "momentum"},
    "unregistered": {"registered": False},
    "collective": {"collective": True},
    "lbfgs": {"kind": "lbfgs"},
}


class Net(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 1)
        self.norm = nn.BatchNorm1d(12) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * STEPS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def _optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "lbfgs":
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    if kind == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(
    folder: str,
    kind: str = "adamw",
    norm: bool = False,
    returns: str = "loss",
    raises_at: int = -1,
    freezes_at: int = -1,
    registered: bool = True,
    collective: bool = False,
) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    run = evenload.init(project_dir=folder, seed=0, timeout_s=60, micro_batch=8, check_every=1)
    model = Net(norm)
    model, loader = run.prepare(model, DataLoader(_data(), batch_size=BATCH))
    optimizer = _optimizer(model, kind)
    if registered:
        run.resume(model=model, optimizer=optimizer)
    seen: dict[str, Any] = {"computed": [], "shares": [], "losses": [], "evaluated": [], "after_epoch": []}

    def decide(shares: tuple[int, ...]) -> None:
        if run.rank == 0:
            loader.planner._pending = Decision(shares, 2, "left_out", 1, None, "the test decides", 1.0, 0.5)

    loader.planner._balancer = None  # the test decides alone
    for _ in range(loader.epoch, EPOCHS):
        for step in loader:
            calls = [0]

            def loss_fn(batch: Any, calls: list[int] = calls, index: int = step.index) -> Any:
                calls[0] += 1
                if collective:
                    dist.all_reduce(torch.ones(1))
                if index == raises_at and run.rank == 0:
                    raise ValueError("broken")
                x, y = batch
                loss = nn.functional.mse_loss(model(x), y)
                if returns == "more" and index >= 10:
                    return {"loss": loss, "late": loss.detach()}
                return {"loss": loss, "twice": 2 * loss.detach()} if returns == "dict" else loss

            def closure(step: Any = step, loss_fn: Any = loss_fn) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = step.backward(loss_fn)
                return loss

            if step.index == freezes_at:
                model.first.requires_grad_(False)
            if step.index == LEAVES_AT:
                decide((BATCH, 0))
            if step.index == RETURNS_AT:
                decide((9, 7))
            try:
                if kind == "lbfgs":
                    optimizer.step(closure)  # type: ignore[arg-type]
                else:
                    seen["losses"].append(float(step.backward(loss_fn)))
                    optimizer.step()
            except (ValueError, evenload.EvenloadError) as error:
                assert step.index == raises_at, error
            if returns == "dict":
                assert step.metrics["twice"] == pytest.approx(2 * seen["losses"][-1])
            optimizer.zero_grad()
            seen["computed"].append(calls[0] > 0)
            seen["shares"].append(step.shares)
        seen["after_epoch"].append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        seen["evaluated"].append(sum(len(x) for x, _ in run.batches(DataLoader(_data(), batch_size=5))))
    seen["weights"] = torch.cat([v.detach().flatten().double() for v in model.state_dict().values()])
    run.close()
    return seen


def _train_all(folder: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [_train(f"{folder}/{name}", **job) for name, job in JOBS.items()]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("leaving")
    ranks = run_ranks(_train_all, 2, str(folder), timeout_s=240)
    return folder, [dict(zip(JOBS, results, strict=True)) for results in ranks]


def _plain(kind: str = "adamw", norm: bool = False, skips: int = -1, freezes_at: int = -1) -> torch.Tensor:
    """One process with the same micro-batches: one of 16 with equal shares, then two of 8."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model = Net(norm)
        optimizer = _optimizer(model, kind)
        x, y = _data().tensors
        for index in range(STEPS * EPOCHS):
            low = index % STEPS * BATCH
            if index == freezes_at:
                model.first.requires_grad_(False)

            size = BATCH if index < LEAVES_AT + 2 else 8

            def closure(low: int = low, size: int = size) -> torch.Tensor:
                optimizer.zero_grad()
                total = torch.zeros(())
                for first in range(low, low + BATCH, size):
                    loss = nn.functional.mse_loss(model(x[first : first + size]), y[first : first + size])
                    loss = loss * (size / BATCH)
                    loss.backward()
                    total = total + loss.detach()
                return total

            if index != skips:
                optimizer.step(closure)  # type: ignore[arg-type]
        return torch.cat([v.detach().flatten().double() for v in model.state_dict().values()])
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", JOBS)
def test_the_weights_are_those_of_one_process_on_all_ranks(outcomes: Any, name: str) -> None:
    job = JOBS[name]
    expected = _plain(
        job.get("kind", "adamw"), job.get("norm", False), job.get("raises_at", -1), job.get("freezes_at", -1)
    )
    for rank in outcomes[1]:
        weights = rank[name]["weights"]
        assert float((weights - expected).norm() / expected.norm()) <= 1e-12


@pytest.mark.parametrize("name", ["plain", "momentum", "norm", "metrics", "new metrics", "raised", "frozen"])
def test_a_rank_without_samples_computes_nothing_until_it_returns(outcomes: Any, name: str) -> None:
    folder, (zero, one) = outcomes
    gone = range(LEAVES_AT + 2, RETURNS_AT + 2)
    assert one[name]["computed"] == [index not in gone for index in range(STEPS * EPOCHS)]
    assert all(zero[name]["computed"]) and zero[name]["shares"][LEAVES_AT + 2] == (BATCH, 0)
    assert zero[name]["losses"] == one[name]["losses"] or name == "raised"
    # The epoch ends while rank 1 is away: it has the weights, and nothing to evaluate.
    assert torch.equal(zero[name]["after_epoch"][0], one[name]["after_epoch"][0])
    assert (zero[name]["evaluated"][0], one[name]["evaluated"][0]) == (BATCH * STEPS, 0)
    assert one[name]["evaluated"][1] > 0 and zero[name]["evaluated"][1] + one[name]["evaluated"][1] == BATCH * STEPS
    events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
    kinds = [(event["kind"], event["step"]) for event in events if event.get("kind") in ("left", "returned", "stays")]
    assert kinds == [("left", LEAVES_AT + 2), ("returned", RETURNS_AT + 2)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unregistered", "run.resume was not called"),
        ("collective", "loss_fn runs collectives of its own"),
        ("lbfgs", "LBFGS calls step.backward itself"),
    ],
)
def test_a_rank_stays_where_leaving_would_change_the_result(outcomes: Any, name: str, reason: str) -> None:
    folder, (_, one) = outcomes
    assert all(one[name]["computed"]) and (BATCH, 0) in one[name]["shares"]
    events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event.get("kind") in ("left", "returned", "stays")]
    assert event["kind"] == "stays" and reason in event["message"]
