"""The model stays the user's: its keys, its copies, and what a backward by habit does to it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import evenload
from evenload.errors import StepError
from evenload.testing import run_ranks
from evenload.training.compute.buffers import BufferGuard
from tests.ranks.exact.measure import check, relative
from tests.ranks.exact.ranks import Setting, run_split, train_all
from tests.ranks.exact.reference import Reference
from tests.ranks.exact.tasks import TASKS


def live_with_copies(folder: str, strategy: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    task = TASKS["Normed"]()
    torch.manual_seed(task.seed)
    task.build()
    keys, kinds = list(task.models[0].state_dict()), [isinstance(m, nn.BatchNorm2d) for m in task.models[0]]
    run = evenload.init(project_dir=folder, seed=0, balance=(24, 6, 2), strategy=strategy)
    model, loader = run.prepare(task.models[0], DataLoader(task.dataset, batch_size=32))
    task.place([model])
    task.make_optimizers()
    same_keys = list(model.state_dict()) == keys and [isinstance(m, nn.BatchNorm2d) for m in model] == kinds
    ema = copy.deepcopy(model).requires_grad_(False)
    swa = AveragedModel(model)
    found: dict[str, Any] = {"same_keys": same_keys and list(ema.state_dict()) == keys}
    for step in loader:
        step.backward(task.loss)
        found["grads"] = [p.grad.clone() for p in model.parameters()]
        second = copy.deepcopy(model)  # in mid-step, gradients and all
        second.load_state_dict(model.state_dict())
        task.optimizers[0].step()
        with pytest.raises(StepError, match=r"step\.backward"):
            task.loss(next(iter(DataLoader(task.dataset, batch_size=4)))).backward()
        task.optimizers[0].zero_grad()
        with torch.no_grad():
            for old, new in zip(ema.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.5)
        swa.update_parameters(model)
        # A copy is a plain model: it has its own backward, with this rank's statistics.
        x, y = next(iter(DataLoader(task.dataset, batch_size=8)))
        F.cross_entropy(second(x), y).backward()
        found["copy_has_gradients"] = all(p.grad is not None for p in second.parameters())
        found["untouched"] = all(p.grad is None for p in model.parameters())
    found["restored"] = None
    found["params"] = nn.utils.parameters_to_vector(model.parameters()).detach()
    found["pickles"] = len(pickle.dumps(copy.deepcopy(model))) > 1000
    run.close()
    found["restored"] = [type(m) for m in model] == [type(m) for m in TASKS["Normed"]().make_model()]
    F.cross_entropy(model(x), y).backward()  # after close it is a plain model again
    found["plain_again"] = all(p.grad is not None for p in model.parameters())
    return found


@pytest.mark.every_strategy
def test_keys_copies_and_plain_backwards(strategy: str, tmp_path: Path) -> None:
    ranks = run_split(live_with_copies, 3, strategy, str(tmp_path), strategy)
    for found in ranks:
        for name in ("same_keys", "copy_has_gradients", "untouched", "restored", "pickles", "plain_again"):
            assert found[name], name
        assert torch.equal(found["params"], ranks[0]["params"])


@pytest.mark.parametrize("name", ["Clipped", "Momentum", "Ragged", "GanKeepsGradients", "Unused"])
def test_a_world_of_one_is_plain_pytorch_to_the_bit(name: str, strategy: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        settings = [Setting(strategy=strategy), Setting(strategy=strategy, optimizer_first=True)]
        (records,) = run_ranks(train_all, 1, [(name, setting) for setting in settings], str(tmp_path))
        expected = Reference(TASKS[name](), 1).train()
    finally:
        torch.set_num_threads(threads)
    for record in records:
        assert torch.equal(record.params, expected.params)
        assert all(torch.equal(a, b) for a, b in zip(record.grads, expected.grads, strict=True))
        assert record.losses == expected.losses
        assert record.present == expected.present


def test_optimizer_built_before_prepare(strategy: str, tmp_path: Path) -> None:
    setting = Setting((24, 6, 2), strategy=strategy, optimizer_first=True)
    jobs = [("Clipped", setting), ("Momentum", setting)]
    ranks = run_ranks(train_all, 3, jobs, str(tmp_path))
    for index, (name, _) in enumerate(jobs):
        records = [results[index] for results in ranks]
        check(f"{name} optimizer first", records, Reference(TASKS[name](), 1).train())


def test_buffers_that_change_late_are_put_back_too() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("table", torch.zeros(4))
    model.register_buffer("count", torch.zeros(1))
    guard = BufferGuard([model])

    def attempt(good: bool, *changes: Any) -> None:
        guard.save()
        for change in changes:
            change()
        guard.forget() if good else guard.restore()

    attempt(True, lambda: model.running_mean.add_(1))
    attempt(False, lambda: model.running_mean.add_(1), lambda: setattr(model, "count", torch.ones(1)))
    assert (model.running_mean == 1).all()
    assert model.count == 0
    attempt(True, lambda: model.count.add_(1))
    attempt(False, lambda: model.count.add_(1))
    assert model.count == 1
    assert relative(model.running_mean, torch.ones(3)) == 0
