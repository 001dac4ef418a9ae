"""A state is copied to the host and restored bit by bit, any number of times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from evenload.training.checkpoint.host_copy import HostCopy


class _Keeper:
    """Keeps the tensors that it is given."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {"values": [self.values], "note": ("a", 3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.values,) = state["values"]


def _restores(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).to(device)
    average = AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    keeper = _Keeper(torch.ones(5, device=device).t())
    objects: list[Any] = [model, average, optimizer, keeper]

    def step() -> None:
        model(torch.randn(8, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        keeper.values += 1

    def state() -> list[torch.Tensor]:
        values = [*model.state_dict().values(), *average.state_dict().values(), keeper.values]
        return [*values, *(tensor for one in optimizer.state.values() for tensor in one.values())]

    step()
    copies = [HostCopy(value) for value in objects]
    before = [(tensor.clone(), tensor.device) for tensor in state()]
    for _ in range(2):
        step()
        for copy in copies:
            copy.restore()
        for (old, device_before), new in zip(before, state(), strict=True):
            assert torch.equal(old, new)
            assert new.device == device_before


def test_restored_bit_by_bit() -> None:
    _restores("cpu")


@pytest.mark.gpu
def test_restored_on_a_gpu() -> None:
    _restores("cuda")


@pytest.mark.gpu
def test_the_gpu_holds_no_copy() -> None:
    model = nn.Linear(2048, 2048, device="cuda")
    before = torch.cuda.memory_allocated()
    copy = HostCopy(model)
    assert torch.cuda.memory_allocated() == before
    copy.restore()
    assert torch.cuda.memory_allocated() == before
