"""Resumed in mid-epoch on other devices, with other shares: the weights of the run that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import evenload
from evenload.testing import run_ranks
from tests.ranks.exact.measure import relative
from tests.ranks.exact.ranks import EpochOrder, run_split
from tests.ranks.exact.tasks import TASKS

STEPS = 10  # 3 steps an epoch: 32, 32, 7


def sit(folder: str, balance: Any, micro_batch: Any, until: int, strategy: str) -> dict[str, Any]:
    """One session of a run, to the step `until`, in the middle of an epoch."""
    torch.set_num_threads(1)
    run = evenload.init(project_dir=folder, seed=0, balance=balance, micro_batch=micro_batch, strategy=strategy)
    task = TASKS["Ragged"]()
    torch.manual_seed(task.seed)
    task.build()
    model, loader = run.prepare(
        task.models[0], DataLoader(task.dataset, batch_size=task.batch_size, sampler=EpochOrder(task))
    )
    task.place([model])
    task.make_optimizers()
    (optimizer,) = task.optimizers
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    resumed = bool(run.resume(model=model, optimizer=optimizer, scheduler=scheduler, averaged=averaged))
    steps, losses, drawn = [], [], []
    for _ in range(loader.epoch, 4):
        for step in loader:
            losses.append(float(step.backward(task.loss)))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
            steps.append(step.index)
            drawn.append(float(torch.rand(())))  # the user's own randomness, outside of loss_fn
            run.checkpoint(every=4)
            if step.index + 1 == until:
                break
        if steps and steps[-1] + 1 == until:
            break
    run.checkpoint()
    result = {
        "resumed": resumed,
        "steps": steps,
        "losses": losses,
        "drawn": drawn,
        "lr": scheduler.get_last_lr()[0],
        "params": nn.utils.parameters_to_vector(model.parameters()).detach(),
        "averaged": nn.utils.parameters_to_vector(averaged.module.parameters()).detach(),
        "n_averaged": int(averaged.n_averaged),
        "moments": torch.cat([s["exp_avg"].flatten() for s in optimizer.state_dict()["state"].values()]),
    }
    run.close()
    return result


def test_three_ranks_then_two_then_one(strategy: str, tmp_path: Path) -> None:
    (whole,) = run_ranks(sit, 1, str(tmp_path / "whole"), "even", "auto", STEPS, strategy)
    folder = str(tmp_path / "parts")
    parts = [
        run_ranks(sit, 3, folder, (24, 6, 2), 8, 4, strategy),  # ends after the first step of epoch 1
        run_ranks(sit, 2, folder, (5, 27), "auto", 8, strategy),
        run_ranks(sit, 1, folder, "even", 10, STEPS, strategy),
    ]
    _compare(whole, parts)


def test_from_replicas_of_one_process_to_ranks_and_back(tmp_path: Path) -> None:
    (whole,) = run_ranks(sit, 1, str(tmp_path / "whole"), "even", "auto", STEPS, "ddp")
    folder = str(tmp_path / "parts")
    parts = [
        run_split(sit, 3, "dp", folder, (24, 6, 2), 8, 4, "dp"),
        run_split(sit, 2, "ddp", folder, (5, 27), "auto", 7, "ddp"),
        run_split(sit, 2, "dp", folder, (0, 32), 20, STEPS, "dp"),
    ]
    _compare(whole, parts)


def _compare(whole: dict[str, Any], parts: list[list[dict[str, Any]]]) -> None:
    """The sessions of `parts` together are the one of `whole`."""
    assert whole["steps"] == [step for part in parts for step in part[0]["steps"]] == list(range(STEPS))
    assert [part[0]["resumed"] for part in parts] == [False, True, True]
    for part in parts:
        assert all(torch.equal(rank["params"], part[0]["params"]) for rank in part)
        assert all(rank["drawn"] == part[0]["drawn"] for rank in part)
    assert [value for part in parts for value in part[0]["drawn"]] == whole["drawn"]
    last = parts[-1][0]
    assert last["lr"] == whole["lr"]
    assert last["n_averaged"] == whole["n_averaged"] == STEPS
    for key in ("params", "averaged", "moments"):
        assert relative(last[key], whole[key]) <= 1e-12, key
    losses = torch.tensor([loss for part in parts for loss in part[0]["losses"]], dtype=torch.float64)
    assert relative(losses, torch.tensor(whole["losses"], dtype=torch.float64)) <= 1e-12
    assert not torch.equal(whole["params"], whole["averaged"])
