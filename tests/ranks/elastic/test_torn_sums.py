"""A rank is lost when a backward whose totals are read late was summed on some ranks only; docs/decisions/torn-sums.md.

Over NCCL a group that is aborted leaves such sums. Here the code of a GPU runs on the CPU, and one rank's totals stay its own.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.training.comm.groups import Groups
from evenload.training.compute.device_sums import DeviceSums
from tests.ranks.elastic.supervised import Supervised
from tests.ranks.exact import test_on_device as on_device

BATCH, STEPS, TORN_AT = 12, 10, 5


def _data() -> TensorDataset:
    x = torch.randn(BATCH * STEPS, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def _loss(model: nn.Module, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _train(folder: str, torn: tuple[str, ...]) -> dict[str, Any]:
    on_device.register()
    run = evenload.init(project_dir=folder, seed=0, strategy=on_device.NAME, balance="even", timeout_s=20.0)
    worker, own_sums, now = run._context.spec.worker, set[int](), -1
    make, sum_async = DeviceSums.__init__, Groups.sum_async

    def made(sums: DeviceSums, *args: Any) -> None:
        make(sums, *args)
        if worker in torn and now == TORN_AT:
            own_sums.add(sums.vector.data_ptr())

    def summed(groups: Groups, tensor: torch.Tensor, *, on_host: bool = False) -> Any:
        # The others receive this rank's part, and it receives nothing.
        is_torn = tensor.data_ptr() in own_sums
        own_sums.clear()  # another tensor may lie there later
        return sum_async(groups, tensor.clone() if is_torn else tensor, on_host=on_host)

    DeviceSums.__init__, Groups.sum_async = made, summed  # type: ignore[method-assign]
    model, loader = run.prepare(_model(), DataLoader(_data(), batch_size=BATCH))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    run.resume(model=model, optimizer=optimizer)
    late = []
    for step in loader:
        now = step.index

        def loss_fn(batch: Any) -> Any:
            if worker == "w2" and run.world_size == 3 and step.index == TORN_AT + 1:  # noqa: B023
                os.kill(os.getpid(), signal.SIGKILL)
            return _loss(model, batch), torch.tensor(float(len(batch[0])))

        step.backward(loss_fn)
        late.append(step.stats.unread is not None)
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]
    run.close()
    return {"weights": weights, "late": late}


@pytest.mark.parametrize("torn", [(), ("w0",), ("w1",)], ids=["no rank", "rank 0", "rank 1"])
def test_a_rank_whose_sum_is_torn_takes_the_state_of_one_that_has_it(tmp_path: Path, torn: tuple[str, ...]) -> None:
    supervised = Supervised(tmp_path, _train, str(tmp_path / "run"), torn)
    supervised.start(3)
    found = supervised.run(50.0)
    assert supervised.lost == ["w2"] and found.keys() == {"w0", "w1"}
    model, data = _model(), _data()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    for index in range(STEPS):
        _loss(model, data[BATCH * index : BATCH * (index + 1)]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for one in found.values():
        assert one["late"][2:TORN_AT] == [True] * (TORN_AT - 2)
        for own, expected in zip(one["weights"], model.parameters(), strict=True):
            assert torch.allclose(own, expected, rtol=0, atol=1e-12)
