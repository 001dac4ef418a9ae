"""An exception of the user's code inside `step.backward`, caught by the script: all ranks give the step up, and go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import PeerLostError
from evenload.testing import run_ranks

STEPS = 6
FAILS_AT = 2


class Net(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.more = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.last = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        for layer in self.more:
            x = torch.tanh(layer(x))
        out: torch.Tensor = self.last(x)
        return out


class _Broken(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken in the backward")


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24 * STEPS, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def _train(where: str, on: list[int], norm: bool, folder: str) -> tuple[list[str], torch.Tensor]:
    torch.set_default_dtype(torch.float64)
    run = evenload.init(project_dir=folder, seed=0, balance=(12, 7, 5), timeout_s=60, micro_batch=6)
    model = Net(norm)
    model, loader = run.prepare(model, DataLoader(_data(), batch_size=24))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    caught = []
    for step in loader:
        calls = 0

        def loss_fn(batch: Any, fails: bool = step.index == FAILS_AT and run.rank in on) -> torch.Tensor:
            nonlocal calls
            calls += 1
            x, y = batch
            if fails and where == "forward" and calls == 2:
                raise ValueError("broken in the forward")
            hidden = model.first(x)
            if fails and where == "early backward":
                hidden = _Broken.apply(hidden)  # most buckets have left by then
            hidden = torch.tanh(model.norm(hidden))
            if fails and where == "middle":
                raise ValueError("broken in the middle")
            for index, layer in enumerate(model.more):
                hidden = torch.tanh(layer(hidden))
                if fails and where == "late backward" and index == 4:
                    hidden = _Broken.apply(hidden)
            return nn.functional.mse_loss(model.last(hidden), y)

        try:
            step.backward(loss_fn)
        except (ValueError, PeerLostError) as error:
            caught.append(f"{type(error).__name__}: {error}")
            assert all(p.grad is None for p in model.parameters())
            continue
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return caught, torch.cat([p.detach().flatten() for p in model.parameters()])


def _train_all(jobs: list[tuple[str, list[int], bool]], folder: str) -> list[tuple[list[str], torch.Tensor]]:
    torch.set_num_threads(1)
    return [_train(*job, f"{folder}/{index}") for index, job in enumerate(jobs)]


def _plain(norm: bool) -> torch.Tensor:
    """The same steps in one process, without the one that failed."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)  # as init(seed=0) does
        model = Net(norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        x, y = _data().tensors
        for index in range(STEPS):
            if index == FAILS_AT:
                continue
            for low in range(24 * index, 24 * (index + 1), 12):  # K = 2: the largest share is 12, the cap 6
                high = low + 12
                (nn.functional.mse_loss(model(x[low:high]), y[low:high]) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])
    finally:
        torch.set_default_dtype(torch.float32)


JOBS = [
    (where, on, norm)
    for norm in (False, True)
    for where in ("forward", "middle", "late backward", "early backward")
    for on in ([1], [0, 1, 2])
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[list[str], torch.Tensor]]]:
    return run_ranks(_train_all, 3, JOBS, str(tmp_path_factory.mktemp("exceptions")), timeout_s=200)


@pytest.mark.parametrize("index", range(len(JOBS)), ids=["-".join(map(str, job)).replace(" ", "_") for job in JOBS])
def test_all_ranks_give_the_step_up_and_go_on_exactly(outcomes: Any, index: int) -> None:
    _, on, norm = JOBS[index]
    for rank, outcome in enumerate(outcomes):
        (message,), weights = outcome[index]
        if rank in on:
            assert message.startswith("ValueError: broken in the"), message
        else:
            assert message.startswith("PeerLostError: rank 1 raised an exception in step.backward at step 2"), message
        expected = _plain(norm)
        assert float((weights - expected).norm() / expected.norm()) <= 1e-12
