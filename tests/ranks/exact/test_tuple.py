"""A tuple of loaders through a whole run: resumed on other ranks, measured, verified, shown by a dry run."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.records.reader import read_events, read_steps
from evenload.testing import run_ranks
from tests.ranks.exact.measure import relative

STEPS = 11
"""4 steps an epoch of 12, 12, 12 and 6 samples; beside them 18, 18, 18 and 9 of 50, of which 36 are whole batches."""


def _rows(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 6, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (count,), generator=generator),
    )


def joint(
    folder: str, until: int, balance: Any = "even", micro_batch: Any = "auto", num_workers: int = 0, **settings: Any
) -> dict[str, Any]:
    """One session of a run, to the step `until`: 12 labeled and 18 other samples a step, 6 units of 2 + 3."""
    torch.set_num_threads(1)
    run = evenload.init(project_dir=folder, seed=3, balance=balance, micro_batch=micro_batch, **settings)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    loaders = (
        DataLoader(_rows(42, 1), batch_size=12, shuffle=True, num_workers=num_workers),
        DataLoader(_rows(50, 2), batch_size=18, shuffle=True),
    )
    model, loader = run.prepare(model, loaders)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.resume(model=model, optimizer=optimizer)
    seen: dict[str, list[Any]] = {"shares": [], "arms": []}

    def loss_fn(batch: Any) -> Any:
        (x, y), (u, _) = batch
        assert 3 * len(x) == 2 * len(u)
        return F.cross_entropy(model(x), y) + 0.5 * (model(u) ** 2).mean()

    losses = []
    while run._context.loop.steps_done < until:
        for step in loader:
            loss = step.backward(loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            seen["arms"].append(step.arm)
            if not step.arm:
                losses.append(float(loss))
                seen["shares"].append(step.shares)
                if step.index + 1 == until:
                    break
    run.checkpoint()
    found = {
        "losses": losses,
        "params": nn.utils.parameters_to_vector(model.parameters()).detach(),
        "loader": (len(loader), loader.batch_size, [len(one) for one in loader.dataset]),
        **seen,
    }
    run.close()
    return found


def _compare(parts: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    losses = torch.tensor([loss for part in parts for loss in part["losses"]], dtype=torch.float64)
    assert relative(losses, torch.tensor(whole["losses"], dtype=torch.float64)) <= 1e-12
    assert relative(parts[-1]["params"], whole["params"]) <= 1e-12


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run_ranks(joint, 1, str(tmp_path_factory.mktemp("whole")), STEPS)
    return found


def test_three_ranks_then_two_then_one(whole: dict[str, Any], tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = run_ranks(joint, 3, folder, 5, (4, 1, 1), 2)
    second = run_ranks(joint, 2, folder, 8, (1, 5), "auto", 1)
    third = run_ranks(joint, 1, folder, STEPS, "even", 4)
    assert first[0]["shares"] == [(4, 1, 1)] * 3 + [(2, 1, 0)] + [(4, 1, 1)]
    assert all(torch.equal(rank["params"], first[0]["params"]) for rank in first)
    assert whole["loader"] == first[0]["loader"] == (4, (12, 18), [42, 50])
    _compare([first[0], second[0], third[0]], whole)


def test_measured_in_the_middle(whole: dict[str, Any], tmp_path: Path) -> None:
    options = {"after_steps": 3, "num_rounds": 1, "block_s": 0.05, "arms": ["even", "solo", "static:5,1"]}
    ranks = run_ranks(joint, 2, str(tmp_path), STEPS, (4, 2), mode="measure", options=options)
    assert {"even", "solo", "static:5,1"} <= set(ranks[0]["arms"])
    _compare([ranks[0]], whole)


def test_workers_by_measurement(whole: dict[str, Any], tmp_path: Path) -> None:
    ranks = run_ranks(joint, 2, str(tmp_path), STEPS, (4, 2), settings={"num_workers": "auto"})
    _compare([ranks[0]], whole)


def test_the_records_count_units(tmp_path: Path) -> None:
    run_ranks(joint, 2, str(tmp_path), 4, (4, 2))
    event = next(event for event in read_events(tmp_path) if event.kind == "loader")
    assert "global batch 6 units of 2 + 3 samples, 4 steps an epoch" in event.message
    assert "share 4 of 6" in event.message
    assert [step.num_samples for step in read_steps(tmp_path)] == [6, 6, 6, 3]


def _verify(folder: str) -> Any:
    try:
        joint(folder, STEPS, "auto")
    except SystemExit as leave:
        return leave.code
    return "by itself"


def test_verify_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert run_ranks(_verify, 2, str(tmp_path / "run"), mode="verify", options={"report": str(path)}) == [0, 0]
    report = json.loads(path.read_text())
    assert report["equal"]
    (call,) = report["calls"]
    assert call["dtype"] == "float64" and call["num_samples"] == 6 and sum(call["shares"]) == 6


def _show(folder: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit, match="0"):
        joint(folder, STEPS)
    return shown.getvalue()


def test_a_dry_run_tells_the_units(tmp_path: Path) -> None:
    first, second = run_ranks(_show, 2, str(tmp_path), settings={"dry_run": True})
    assert "first step: 6 units of 2 + 3 samples, shares [3, 3], 1 micro-batches" in first
    assert "first step" not in second
