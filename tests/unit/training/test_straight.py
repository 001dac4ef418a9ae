"""Straight steps (training/step/straight.py) do exactly what usual ones do, whatever the script changes between them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import StepError
from evenload.training.data.randomness import mix
from evenload.training.step import step as step_module
from evenload.training.step import straight
from evenload.training.step.straight import StraightLine

NUM_EPOCHS = 4
_TIMES = ("time", "seconds", "ranks", "write_s", "size_bytes")


class Model(nn.Module):
    """Has buffers, random numbers in its forward, and a part that not every step uses."""

    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout))
        self.head, self.extra = nn.Linear(8, 1), nn.Linear(8, 1)
        self.uses_extra = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        return self.head(hidden) + self.extra(hidden) if self.uses_extra else self.head(hidden)


def draws_put_back() -> list[float]:
    """Draw from generators that are then as before, or are the script's own, seeded by one of them."""
    python, numpy = random.getstate(), np.random.get_state()
    drawn = [random.random(), float(np.random.rand())]
    random.setstate(python)
    np.random.set_state(numpy)
    with torch.random.fork_rng():
        drawn.append(torch.rand(()).item())
    return [*drawn, torch.rand((), generator=torch.Generator().manual_seed(torch.initial_seed())).item()]


class Script:
    """Trains with everything that a script may change from step to step; `seen` holds what it sees.

    `draws_from`: the first step whose loss draws random numbers; each loss draws some that don't show afterwards.
    """

    def __init__(self, folder: Path, draws_from: int) -> None:
        self.draws_from, self.num_losses = draws_from, 0
        self.drawn: list[float] = []
        self.run = evenload.init(project_dir=folder, seed=3)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(203, 6, generator=generator), torch.randn(203, 1, generator=generator))
        loader = DataLoader(data, batch_size=5, shuffle=True)
        self.model, self.loader = self.run.prepare(Model(dropout=0.0 if draws_from else 0.3), loader)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.run.resume(model=self.model, optimizer=self.optimizer)
        self.seen: list[Any] = []
        self.num_straight = 0

    def train(self) -> None:
        for _ in range(NUM_EPOCHS):
            for step in self.loader:
                self.one(step)
                if step.index == 70:
                    break  # the next loop begins another epoch
            with torch.no_grad():
                self.model.eval()
                self.seen += [
                    self.model(x).sum().item() for x, _ in self.run.batches(DataLoader(TensorDataset(*self.rows)))
                ]
                self.model.train()
        self.run.close()

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(3, 6), torch.ones(3, 1)

    def loss(self, batch: Any) -> Any:
        x, y = batch
        loss = (self.model(x) - y).square().mean()
        self.num_losses += 1
        self.drawn = draws_put_back()
        if self.index >= self.draws_from:
            self.drawn += [torch.rand(()).item(), random.random(), float(np.random.rand())]
        if self.index % 11 == 7:
            return loss, float(len(x)) / 3
        if self.index % 11 == 8:
            return {"loss": loss, "weight": x.abs().sum(), "size": x.square().mean()}
        if self.index % 37 == 36:
            return loss * float("nan")
        if self.index % 37 == 31 and not self.has_raised:
            self.has_raised = True
            raise ValueError("the script's own")
        return loss

    def one(self, step: Any) -> None:
        self.index, self.has_raised = step.index, False
        self.model.uses_extra = step.index % 13 not in (5, 6)
        self.model.head.requires_grad_(step.index % 17 != 12)
        hook = self.model.extra.weight.register_hook(lambda grad: grad * 2) if step.index % 19 == 15 else None
        if step.index == 50:
            self.model.head.bias = nn.Parameter(torch.zeros(1))
            self.optimizer.add_param_group({"params": [self.model.head.bias]})
        try:
            loss = step.backward(self.loss)
        except ValueError:
            loss = step.backward(self.loss)
        if step.index % 23 == 20:
            loss = loss + step.backward(lambda batch: self.model(batch[0]).mean())
        if hook is not None:
            hook.remove()
        grads = [None if p.grad is None else p.grad.sum().item() for p in self.model.parameters()]
        self.seen.append(
            (self.drawn, step.index, loss.item(), dict(step.metrics), grads, torch.rand(()).item(), random.random())
        )
        self.seen.append((np.random.rand(), step.shares, step.batch.plan, self.loader.loader.cursor()))
        self.run.log({"loss": loss})
        if step.index % 29 != 26:  # weights stay
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=step.index % 7 != 3)
        if step.index % 40 == 39:
            self.run.checkpoint()


def train(
    folder: Path, monkeypatch: pytest.MonkeyPatch, draws_from: int, *, is_straight: bool
) -> tuple[tuple[Any, dict[str, torch.Tensor], int], list[dict[str, Any]], int]:
    """Return what the script saw with its last weights and number of losses, the records without times, and the number of
    straight steps."""
    num_straight = 0
    compute: Callable[..., Any] = StraightLine.backward

    def counted(*args: Any) -> Any:
        nonlocal num_straight
        num_straight += 1
        return compute(*args)

    with monkeypatch.context() as patch:
        patch.setattr(StraightLine, "backward", counted)
        patch.setattr(straight, "_LASTS_S", 1e9)
        if not is_straight:
            patch.setattr(step_module, "begin_line", lambda *_: None)
        script = Script(folder, draws_from)
        script.train()
    state = {name: value.clone() for name, value in script.model.state_dict().items()}
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    lines += [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    # The later looks at loss_fn, which is a mean over other units at times, are in usual steps.
    lines = [line for line in lines if line.get("kind") != "wrong_units"]
    records = [{name: value for name, value in line.items() if name not in _TIMES} for line in lines]
    return (script.seen, state, script.num_losses), records, num_straight


@pytest.mark.parametrize("draws_from", [0, 65, 10_000])
def test_straight_steps_do_what_usual_ones_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draws_from: int) -> None:
    usual, records, num_straight = train(tmp_path / "usual", monkeypatch, draws_from, is_straight=False)
    assert num_straight == 0
    again, records_again, num_straight = train(tmp_path / "straight", monkeypatch, draws_from, is_straight=True)
    assert num_straight > 40  # the others have something of their own
    assert again[2] == usual[2]
    assert str(usual[0]) == str(again[0])  # NaN is not equal to itself
    assert usual[1].keys() == again[1].keys()
    for name, value in usual[1].items():
        assert torch.equal(value, again[1][name]), name
    assert len(records) > 130
    for one, other in zip(records, records_again, strict=True):
        assert {**one, "fields": None} == {**other, "fields": None}


def straight_steps(folder: Path, monkeypatch: pytest.MonkeyPatch, model: nn.Module, loss_fn: Callable[..., Any]) -> Any:
    """Yield steps, of which those after the first are straight, and the number of straight ones so far."""
    counted = [0]
    compute: Callable[..., Any] = StraightLine.backward

    def backward(*args: Any) -> Any:
        counted[0] += 1
        return compute(*args)

    monkeypatch.setattr(StraightLine, "backward", backward)
    monkeypatch.setattr(straight, "_LASTS_S", 1e9)
    run = evenload.init(project_dir=folder, seed=3)
    model, loader = run.prepare(model, DataLoader(TensorDataset(torch.ones(200, 2)), batch_size=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        for step in loader:
            before = counted[0]
            step.backward(functools.partial(loss_fn, step))
            yield step, counted[0] > before
            optimizer.step()
            optimizer.zero_grad()
    finally:
        run.close()


def test_a_backward_in_loss_fn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 1)

    def loss_fn(step: Any, batch: Any) -> torch.Tensor:
        if step.index == 30:
            model.weight.square().sum().backward()
        return model(batch[0]).mean()

    seen = []
    with pytest.raises(StepError, match="backward"):
        for step, is_straight in straight_steps(tmp_path, monkeypatch, model, loss_fn):
            seen.append((step.index, is_straight))
    assert seen[-1] == (29, True)


def test_a_hook_that_loss_fn_adds_sees_the_mean_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = nn.Linear(2, 1), []

    def loss_fn(step: Any, batch: Any) -> Any:
        if step.index == 30:
            model.weight.register_hook(lambda grad: seen.append(grad.clone()))
        return model(batch[0]).mean(), 2.0 + step.index % 3

    for step, is_straight in straight_steps(tmp_path, monkeypatch, model, loss_fn):
        if step.index == 30:
            assert is_straight and len(seen) == 1 and model.weight.grad is not None
            torch.testing.assert_close(seen[0], model.weight.grad)
            break


def test_a_part_that_is_new_is_cleared_when_a_step_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

    def loss_fn(step: Any, batch: Any) -> torch.Tensor:
        loss = model[0](batch[0]).mean()
        if step.index >= 20:
            loss = loss + model[1](batch[0]).mean()
        return loss * (float("nan") if step.index in (21, 40) else 1.0)

    for step, is_straight in straight_steps(tmp_path, monkeypatch, model, loss_fn):
        if step.index in (21, 40):
            assert step.index == 21 or is_straight
            assert all(param.grad is None for param in model.parameters())


def test_each_step_draws_by_its_own_seeds_and_leaves_the_scripts_generators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drawn = nn.Linear(2, 1), {}

    def loss_fn(step: Any, batch: Any) -> torch.Tensor:
        state = random.getstate()
        drawn.setdefault(step.index, random.random())  # a check of the step computes it again
        random.setstate(state)
        return model(batch[0]).mean()

    before = None
    for step, is_straight in straight_steps(tmp_path, monkeypatch, model, loss_fn):
        assert before is None or random.getstate() == before
        before = random.getstate()
        if step.index == 32:
            assert is_straight
            break
    assert drawn == {index: random.Random(mix(3, index, 0, 0, 0)).random() for index in range(33)}


@pytest.mark.filterwarnings("ignore:loss_fn returned a loss other than 0 with the weight 0")
@pytest.mark.parametrize("error", [ValueError, StepError, KeyboardInterrupt])
def test_a_step_that_fails_leaves_no_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """An exception of loss_fn, one after its backward, and one that is no `Exception`."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))

    def loss_fn(step: Any, batch: Any) -> Any:
        loss = model(batch[0]).mean()
        if step.index == 30:
            if error is StepError:
                return loss, 0.0
            raise error
        return loss

    steps, num_done = straight_steps(tmp_path, monkeypatch, model, loss_fn), 0
    with pytest.raises(error):
        for step, is_straight in steps:
            num_done = step.index + 1
            assert is_straight or num_done < 25
    assert num_done == 30
    assert int(model[0].num_batches_tracked) == 30
