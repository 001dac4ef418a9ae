"""What only a GPU can show; two ranks share one GPU over gloo where there is only one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.testing import run_ranks

pytestmark = pytest.mark.gpu


def _devices(rank: int) -> str:
    return f"cuda:{rank % torch.cuda.device_count()}"


def _train(
    project_dir: str, balance: Any, precision: str = "no", limit: int | None = None, steps: int = 10
) -> dict[str, Any]:
    run = evenload.init(project_dir=project_dir, seed=0, balance=balance, precision=precision)
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(320, 16, generator=generator, dtype=torch.float64), torch.randint(0, 4, (320,), generator=generator)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).double()
    if limit is not None or precision != "no":
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(
            torch.float32 if precision != "no" else torch.float64
        )
    model, loader = run.prepare(model, DataLoader(dataset, batch_size=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sizes = []

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        sizes.append(len(x))
        if limit is not None and len(x) > limit:
            torch.empty(1 << 62, dtype=torch.uint8, device=run.device)  # a real CUDA out of memory
        return F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)

    losses = []
    for step in loader:
        losses.append(float(step.backward(loss_fn)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step.index + 1 == steps:
            break
    weights = torch.cat([p.detach().double().flatten().cpu() for p in model.parameters()])
    device = str(run.device)
    run.close()
    return {"weights": weights, "losses": losses, "device": device, "largest": max(sizes[1:], default=0)}


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


def test_two_ranks_give_the_weights_of_one_gpu(tmp_path: Path) -> None:
    alone = run_ranks(_train, 1, str(tmp_path / "one"), "auto", device="cuda:0")[0]
    split = run_ranks(_train, 2, str(tmp_path / "two"), (24, 8), device=_devices, backend="gloo")
    assert alone["device"] == "cuda:0"
    assert _difference(alone["weights"], split[0]["weights"]) <= 1e-12
    assert torch.equal(split[0]["weights"], split[1]["weights"])


def test_a_gpu_and_the_cpu_train_together(tmp_path: Path) -> None:
    alone = run_ranks(_train, 1, str(tmp_path / "one"), "auto", device="cuda:0")[0]
    mixed = run_ranks(
        _train, 2, str(tmp_path / "mix"), (30, 2), device=lambda rank: "cuda:0" if rank == 0 else "cpu", backend="gloo"
    )
    assert {result["device"] for result in mixed} == {"cuda:0", "cpu"}
    assert _difference(alone["weights"], mixed[0]["weights"]) <= 1e-12


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_and_ranks_stay_equal(tmp_path: Path, precision: str) -> None:
    results = run_ranks(_train, 2, str(tmp_path), (20, 12), precision, device=_devices, backend="gloo")
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    assert all(loss == loss and loss < 10 for loss in results[0]["losses"])


def test_out_of_memory_shrinks_the_micro_batch_and_keeps_the_result(tmp_path: Path) -> None:
    free = run_ranks(_train, 2, str(tmp_path / "free"), (24, 8), "no", 1000, device=_devices, backend="gloo")
    tight = run_ranks(_train, 2, str(tmp_path / "tight"), (24, 8), "no", 12, device=_devices, backend="gloo")
    assert tight[0]["largest"] <= 12 < free[0]["largest"]
    assert _difference(free[0]["weights"], tight[0]["weights"]) <= 1e-12
