"""The table of docs/on-which-device.md: what lies on the device of a rank, and what on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.testing import run_ranks


def look(folder: str) -> dict[str, Any]:
    """The devices of everything in the table, by its name there; numbers by their type."""
    run = evenload.init(project_dir=folder)
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    model, loader = run.prepare(model, DataLoader(data, batch_size=8))
    optimizer = torch.optim.Adam(model.parameters())
    average = AveragedModel(model)
    run.resume(model=model, optimizer=optimizer, average=average)
    found: dict[str, Any] = {}

    def loss_fn(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        x, y = batch
        found["batch"] = {x.device.type, y.device.type}
        found["run.device in loss_fn"] = {run.device.type}
        loss = (model(x) - y).pow(2).mean()
        return {"loss": loss, "again": loss}

    for step in loader:
        loss = step.backward(loss_fn)
        found["gradients"] = {p.grad.device.type for p in model.parameters() if p.grad is not None}
        found["metrics"] = {type(value).__name__ for value in step.metrics.values()}
        found["loss"] = {loss.device.type}
        optimizer.step()
        optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    found["optimizer"] = {value.device.type for value in states}
    found["model"] = {value.device.type for value in model.state_dict().values()}
    found["average"] = {value.device.type for value in average.module.state_dict().values()}
    found["run.batches"] = {x.device.type for x, _ in run.batches(DataLoader(data, batch_size=4))}
    found["reduced"] = {run.reduce(torch.ones(1, device=run.device)).device.type, type(run.reduce(1.0)).__name__}
    found["gathered"] = {run.gather(torch.ones(1, device=run.device)).device.type, type(run.gather([1])).__name__}
    run.close()
    return found


def check(found: dict[str, Any], device: str) -> None:
    on_device = ("batch", "run.device in loss_fn", "gradients", "optimizer", "model", "average", "run.batches")
    assert {name: found.pop(name) for name in on_device} == {name: {device} for name in on_device}
    assert found == {
        "metrics": {"float"},
        "loss": {device},
        "reduced": {device, "float"},
        "gathered": {device, "list"},
    }


def test_on_the_cpu(tmp_path: Any) -> None:
    for found in run_ranks(look, 2, str(tmp_path / "run"), settings={"balance": (6, 2)}):
        check(found, "cpu")


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Any) -> None:
    (found,) = run_ranks(look, 1, str(tmp_path / "run"), device="cuda:0")
    check(found, "cuda")
