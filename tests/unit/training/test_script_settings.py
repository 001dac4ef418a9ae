"""A resumed script whose values changed: they are taken, reported, and the schedule is that of the new script."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import CheckpointError, DataError
from evenload.records.reader import read_events
from evenload.training import run as run_module
from evenload.training.session.script_settings import ScriptSettings

Make = Callable[[Optimizer], LRScheduler | None]


class Job:
    """Four steps an epoch."""

    def __init__(self, folder: Path, make_optimizer: Callable[[Any], Optimizer], make: Make, **loader: Any) -> None:
        self.run = evenload.init(project_dir=folder, seed=loader.pop("seed", 0))
        dtype = loader.pop("dtype", torch.float32)
        data = TensorDataset(torch.ones(loader.pop("samples", 8), 2, dtype=dtype))
        self.model, self.loader = self.run.prepare(
            nn.Linear(2, 1, dtype=dtype), DataLoader(data, **{"batch_size": 2, "shuffle": True, **loader})
        )
        self.optimizer = make_optimizer(self.model.parameters())
        self.scheduler = make(self.optimizer)
        state = {"scheduler": self.scheduler} if self.scheduler is not None else {}
        self.saved = self.run.resume(model=self.model, optimizer=self.optimizer, **state)

    def train(self, num_steps: int) -> None:
        while num_steps > 0:
            for step in self.loader:
                step.backward(lambda batch: self.model(batch[0]).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
                if isinstance(self.scheduler, ReduceLROnPlateau):
                    self.scheduler.step(1.0)
                elif self.scheduler is not None:
                    self.scheduler.step()
                num_steps -= 1
                if num_steps == 0:
                    break
        self.run.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    def make(optimizer: Callable[[Any], Optimizer], scheduler: Make = lambda _: None, **loader: Any) -> Job:
        return Job(tmp_path, optimizer, scheduler, **loader)

    yield make
    if run_module._open is not None:
        run_module._open.close()


def _sgd(lr: float, **others: Any) -> Callable[[Any], Optimizer]:
    return lambda parameters: SGD(parameters, lr, **others)


def _warmup(total: int) -> Make:
    return lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, total - 3)], [3]
    )


def _halves(step: int) -> float:
    return float(0.5**step)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda optimizer: StepLR(optimizer, 2, 0.5), lambda optimizer: StepLR(optimizer, 2, 0.5)),
        (lambda optimizer: MultiStepLR(optimizer, [2, 5]), lambda optimizer: MultiStepLR(optimizer, [2, 4], 0.3)),
        (lambda optimizer: CosineAnnealingLR(optimizer, 6), lambda optimizer: CosineAnnealingLR(optimizer, 12)),
        (lambda optimizer: LambdaLR(optimizer, _halves), lambda optimizer: LambdaLR(optimizer, _halves)),
        (lambda optimizer: OneCycleLR(optimizer, 0.1, 8), lambda optimizer: OneCycleLR(optimizer, 0.3, 16)),
        (_warmup(8), _warmup(20)),
        (lambda optimizer: StepLR(optimizer, 2, 0.5), lambda optimizer: CosineAnnealingLR(optimizer, 12)),
    ],
    ids=["step", "milestones", "cosine", "lambda", "one cycle", "warm-up", "another class"],
)
def test_the_schedule_is_that_of_the_new_script(job: Callable[..., Job], before: Make, after: Make) -> None:
    job(_sgd(0.1, momentum=0.9), before).train(6)
    now = job(_sgd(0.04, momentum=0.9), after)
    other = SGD(nn.Linear(2, 1).parameters(), 0.04, momentum=0.9)
    expected = after(other)
    assert expected is not None and now.scheduler is not None
    for count in range(10):
        if count < 6:
            other.step()
            expected.step()
            continue
        for key in ("lr", "momentum"):
            assert now.optimizer.param_groups[0][key] == pytest.approx(other.param_groups[0][key], abs=1e-15)
        assert now.scheduler.last_epoch == expected.last_epoch == count
        now.optimizer.step()
        now.scheduler.step()
        other.step()
        expected.step()


def test_new_values_are_taken_and_reported(
    job: Callable[..., Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(lambda parameters: AdamW(parameters, 0.1, weight_decay=0.1)).train(4)
    capsys.readouterr()
    now = job(lambda parameters: AdamW(parameters, 0.02, weight_decay=0.3), seed=3, samples=12, batch_size=3)
    group = now.optimizer.param_groups[0]
    assert group["lr"] == 0.02 and group["weight_decay"] == 0.3 and now.saved
    shown = capsys.readouterr().out
    table = [line.split() for line in shown.partition("the script is not the one of the checkpoint:\n")[2].splitlines()]
    assert table[0] == ["setting", "saved", "now"]
    rows = {row[0]: row[1:] for row in table[1:6]}
    assert rows == {
        "optimizer.lr": ["0.1", "0.02", "taken"],
        "optimizer.weight_decay": ["0.1", "0.3", "taken"],
        "batch_size": ["2", "3", "taken"],
        "samples": ["8", "12", "taken"],
        "seed": ["0", "3", "taken"],
    }
    kept = [event.fields["settings"] for event in read_events(tmp_path) if event.kind == "script_settings"]
    assert [values["optimizer.lr"] for values in kept] == [0.1, 0.02]
    assert "learning rate of optimizer at this step: 0.1 -> 0.02" in shown and "--fresh starts over" in shown
    now.train(4)
    assert now.run._context.loop.steps_done == 8


def test_what_training_changed_is_kept(job: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    first = job(_sgd(0.1))
    first.optimizer.param_groups[0]["lr"] = 0.05  # by the loop's own rule
    first.train(4)
    capsys.readouterr()
    again = job(_sgd(0.1))
    assert again.optimizer.param_groups[0]["lr"] == 0.05 and "setting" not in capsys.readouterr().out
    again.train(4)
    assert job(_sgd(0.2)).optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_scheduler_that_follows_a_metric_is_scaled(job: Callable[..., Job]) -> None:
    job(_sgd(0.1), lambda optimizer: ReduceLROnPlateau(optimizer, patience=1)).train(3)
    now = job(_sgd(0.2), lambda optimizer: ReduceLROnPlateau(optimizer, patience=7))
    assert now.optimizer.param_groups[0]["lr"] == pytest.approx(0.02)
    assert isinstance(now.scheduler, ReduceLROnPlateau) and now.scheduler.patience == 7
    assert now.scheduler.last_epoch == 3


def test_several_groups_have_their_own_rates(job: Callable[..., Job]) -> None:
    def groups(low: float) -> Callable[[Any], Optimizer]:
        def make(parameters: Any) -> Optimizer:
            weight, bias = parameters
            return SGD([{"params": [weight]}, {"params": [bias], "lr": low}], 0.1)

        return make

    halve: Make = lambda optimizer: StepLR(optimizer, 2, 0.5)  # noqa: E731
    job(groups(0.02), halve).train(4)
    now = job(groups(0.04), halve)
    assert [group["lr"] for group in now.optimizer.param_groups] == pytest.approx([0.025, 0.01])


def test_within_an_epoch_data_can_not_change(job: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    job(_sgd(0.1)).train(3)
    capsys.readouterr()
    with pytest.raises(DataError, match="leave the rest of the epoch out with --override, or start anew with --fresh"):
        job(_sgd(0.1), seed=3)
    shown = capsys.readouterr().out
    assert "can't change within an epoch" in shown and "leave the rest of the epoch out with --override" in shown


def test_another_dtype_is_named(job: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    job(_sgd(0.1, momentum=0.9), dtype=torch.float64).train(3)
    capsys.readouterr()
    job(_sgd(0.1, momentum=0.9)).train(1)
    assert ["model.dtype", "float64", "float32", "converted"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]
    job(_sgd(0.1, momentum=0.9)).train(1)
    assert "the script is not the one" not in capsys.readouterr().out


def test_a_model_that_the_checkpoint_lacks_has_no_row() -> None:
    settings = ScriptSettings({"model": nn.Linear(2, 1), "head": nn.Linear(2, 1)}, [], 0)
    rows = settings.compare({}, {"model": nn.Linear(2, 1, dtype=torch.float64).state_dict()})
    assert [row.name for row in rows] == ["model.dtype"]
    assert settings.compare({}, {"model": "no state", "head": None}) == []


def test_a_refused_change_is_not_called_taken(job: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    job(_sgd(0.1)).train(3)
    capsys.readouterr()
    with pytest.raises(CheckpointError, match="is of class SGD, this script's of AdamW"):
        job(lambda parameters: AdamW(parameters, 0.2))
    shown = capsys.readouterr().out
    assert "optimizer.class" in shown and "taken" not in shown and "to keep a saved value" not in shown


def test_a_checkpoint_without_settings_loads(job: Callable[..., Job], tmp_path: Path) -> None:
    from evenload.training.checkpoint import files

    job(_sgd(0.1)).train(4)
    newest = files.newest(tmp_path)
    assert newest is not None
    state = files.read(newest)
    for name in ("settings", "values"):
        del state["evenload"][name]
    files.write(tmp_path, 4, copy.deepcopy(state))
    now = job(_sgd(0.2))
    assert now.saved and len(now.saved) == 0 and now.optimizer.param_groups[0]["lr"] == 0.1
