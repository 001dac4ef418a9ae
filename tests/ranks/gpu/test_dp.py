"""Replicas of one process and data_parallel where a GPU is one of the devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload import data_parallel
from evenload.testing import run_ranks

pytestmark = pytest.mark.gpu


def _replicas(*devices: str) -> tuple[dict[str, Any], ...]:
    return tuple({"device": device, "name": device, "num_threads": 2} for device in devices)


def _devices(with_cpu: bool = True) -> tuple[str, ...]:
    gpus = tuple(f"cuda:{index}" for index in range(min(2, torch.cuda.device_count())))
    return (*gpus, "cpu") if with_cpu or len(gpus) == 1 else gpus


class Net(nn.Module):
    """Convolution, BatchNorm, a recurrent layer, and a part that is computed again in the backward."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1, bias=False), nn.BatchNorm1d(8)
        self.lstm, self.middle, self.last = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 12), nn.Linear(12, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.conv(x)))
        h, _ = self.lstm(h.transpose(1, 2))
        h = checkpoint(lambda v: self.dropout(torch.tanh(self.middle(v))), h[:, -1], use_reentrant=False)
        return self.last(h)


def _train(folder: str, balance: Any, strategy: str, dropout: float = 0.0, precision: str = "no") -> dict[str, Any]:
    torch.backends.cudnn.deterministic = True
    run = evenload.init(project_dir=folder, seed=0, balance=balance, strategy=strategy, precision=precision)
    dtype = torch.float64 if precision == "no" else torch.float32
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(256, 4, 10, generator=g, dtype=dtype), torch.randint(0, 3, (256,), generator=g))
    torch.manual_seed(0)
    model, loader = run.prepare(Net(dropout).to(dtype), DataLoader(data, batch_size=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: set[str] = set()

    def loss_fn(batch: Any) -> Any:
        assert batch[0].device == run.device == next(model.parameters()).device
        seen.add(str(run.device))
        return F.cross_entropy(model(batch[0]), batch[1])

    losses = []
    for step in loader:
        losses.append(float(step.backward(loss_fn)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    state = torch.cat([v.detach().double().flatten().cpu() for v in model.state_dict().values()])
    home = str(next(model.parameters()).device)
    run.close()
    return {"state": state, "losses": losses, "seen": seen, "home": home, "shares": step.shares}


def _far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_gpus_and_the_cpu_in_one_process_give_the_weights_of_one_gpu(tmp_path: Path) -> None:
    (alone,) = run_ranks(_train, 1, str(tmp_path / "one"), "even", "ddp", device="cuda:0")
    devices = _devices()
    for index, shares in enumerate(((20, 12, 0), (7, 0, 25), (0, 3, 29))):
        balance = shares if len(devices) == 3 else (shares[0] + shares[1], shares[2])
        (mixed,) = run_ranks(
            _train, 1, str(tmp_path / str(index)), balance, "dp", replicas=_replicas(*devices), device="cuda:0"
        )
        assert mixed["seen"] == {device for device, share in zip(devices, balance, strict=True) if share}
        assert mixed["home"] == "cuda:0"
        assert _far(mixed["state"], alone["state"]) <= 1e-11  # two kinds of devices: convolutions round differently


def test_the_users_model_may_lie_on_the_cpu(tmp_path: Path) -> None:
    (alone,) = run_ranks(_train, 1, str(tmp_path / "one"), "even", "ddp", device="cpu")
    (mixed,) = run_ranks(
        _train, 1, str(tmp_path / "two"), (4, 28), "dp", replicas=_replicas("cpu", "cuda:0"), device="cpu"
    )
    assert mixed["home"] == "cpu" and _far(mixed["state"], alone["state"]) <= 1e-11


def test_dropout_is_repeated_and_recomputed_equally(tmp_path: Path) -> None:
    runs = [
        run_ranks(
            _train,
            1,
            str(tmp_path / str(index)),
            (24, 8),
            "dp",
            0.3,
            replicas=_replicas("cuda:0", "cpu"),
            device="cuda:0",
        )[0]
        for index in range(2)
    ]
    assert torch.equal(runs[0]["state"], runs[1]["state"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains(tmp_path: Path, precision: str) -> None:
    (found,) = run_ranks(
        _train, 1, str(tmp_path), (24, 8), "dp", 0.0, precision, replicas=_replicas("cuda:0", "cpu"), device="cuda:0"
    )
    assert all(loss == loss and loss < 10 for loss in found["losses"])


def test_what_only_slows_the_rest_is_left_out(tmp_path: Path) -> None:
    """Beside a GPU the CPU gets what it is worth; a checkpoint of it goes on under ddp."""
    (found,) = run_ranks(
        _balanced, 1, str(tmp_path), replicas=_replicas("cuda:0", "cpu"), device="cuda:0", timeout_s=110
    )
    assert found["shares"][0] > found["shares"][1] and sum(found["shares"]) == 64


def _balanced(folder: str) -> dict[str, Any]:
    run = evenload.init(project_dir=folder, seed=0, strategy="dp")
    data = TensorDataset(torch.randn(64 * 60, 512), torch.randint(0, 3, (64 * 60,)))
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 3))
    model, loader = run.prepare(model, DataLoader(data, batch_size=64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in loader:
        step.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return {"shares": step.shares}


@pytest.mark.parametrize("home", ["cuda:0", "cpu"])
def test_data_parallel_over_gpu_and_cpu(home: str) -> None:
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    module = Net().double().to(home)
    reference = Net().double().to(home)
    reference.load_state_dict(module.state_dict())
    x = torch.randn(13, 4, 10, dtype=torch.float64, device=home)
    output = data_parallel(module, x, _devices(), (9, 4) if len(_devices()) == 2 else (5, 4, 4))
    expected = reference(x)
    assert output.device == x.device
    (output**2).sum().backward()
    (expected**2).sum().backward()
    assert _far(output.detach().cpu(), expected.detach().cpu()) <= 1e-11
    for own, other in zip(module.parameters(), reference.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        assert _far(own.grad.cpu(), other.grad.cpu()) <= 1e-11
    for own, other in zip(module.buffers(), reference.buffers(), strict=True):
        assert torch.allclose(own.double(), other.double(), atol=1e-12)


def test_data_parallel_takes_every_gpu_by_itself() -> None:
    module = nn.Linear(4, 2).cuda()
    x = torch.randn(6, 4)
    assert data_parallel(module, x).device == x.device
    assert data_parallel(module, x.cuda(), [0, "cpu"], (5, 1)).is_cuda
