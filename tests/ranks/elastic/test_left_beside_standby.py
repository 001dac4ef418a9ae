"""A rank that alone computes leaves on request while another stands by; a rank outside a group of the script's loses peers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.balance.rebalance import Decision
from tests.ranks.elastic.supervised import Supervised

STEPS = 60


def _train(folder: str, group: tuple[int, ...], shares: tuple[int, ...], asks: str) -> dict[str, Any]:
    run = evenload.init(project_dir=folder, seed=0, timeout_s=60)
    worker = run._context.spec.worker
    x = torch.randn(6 * STEPS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(0)
    model, loader = run.prepare(torch.nn.Linear(4, 1).double(), DataLoader(TensorDataset(x), batch_size=6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.resume(model=model, optimizer=optimizer)
    loader.planner._balancer = None
    if group:
        run.group(group)
    seen = []

    def loss_fn(batch: Any) -> Any:
        if group and (worker, step.index) in (("w1", 20), ("w0", 40)):
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch[0]).square().mean()

    for step in loader:
        if shares and run.rank == 0 and step.index == 2:
            loader.planner._pending = Decision(shares, 1, "left_out", 1, None, "the test decides", 1.0, 0.5)
        step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((run.world_size, step.shares[run.rank]))
        if asks and step.index == 20:
            Path(asks).touch()
        if asks and step.index > 20:
            time.sleep(0.03)
    run.close()
    return {"weights": model.weight.detach().clone(), "seen": seen}


def _weights() -> torch.Tensor:
    x = torch.randn(6 * STEPS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for index in range(STEPS):
        model(x[6 * index : 6 * index + 6]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


def _assert_exact(found: dict[str, Any]) -> None:
    assert torch.allclose(found["weights"], _weights(), rtol=0, atol=1e-12)


def test_the_only_rank_that_computes_leaves_on_request(tmp_path: Path) -> None:
    """The one that stands by has old weights, and receives its state before."""
    asks = tmp_path / "asks"
    supervised = Supervised(tmp_path, _train, str(tmp_path / "run"), (), (6, 0), str(asks))
    supervised.leaves, supervised.leave_after = {0: "w0"}, asks
    supervised.start(2)
    results = supervised.run(40)
    assert results["w0"] == {"exit": 0}
    seen = results["w1"]["seen"]
    assert seen[20] == (2, 0) and seen[-1] == (1, 6)
    _assert_exact(results["w1"])


def test_a_rank_outside_a_group_of_the_script_goes_on_after_each_loss(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, _train, str(tmp_path / "run"), (0, 1), (), "")
    supervised.start(3)
    results = supervised.run(40)
    assert supervised.lost == ["w1", "w0"] and results.keys() == {"w2"}
    _assert_exact(results["w2"])
