"""Totals that the host reads one backward late (docs/decisions/late-reading.md), made on the CPU: each script as with `ddp`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import EvenloadError
from evenload.testing import run_ranks
from evenload.training.step.unread_log import UnreadLog
from tests.ranks.exact import test_on_device as on_device

NUM_STEPS = 12
"""In two epochs."""


class Script:
    """A training loop; the cases replace its parts."""

    bad_steps: tuple[int, ...] = (4,)
    """Steps in which one sample of the last rank makes the loss NaN."""
    optimizer: Callable[..., torch.optim.Optimizer] = staticmethod(
        lambda params: torch.optim.AdamW(params, 0.1, fused=True)
    )
    num_epochs = 2
    late = range(1, NUM_STEPS)
    """Steps that leave the body before the host has read their totals."""

    def __init__(self, project_dir: str, strategy: str) -> None:
        self.run = evenload.init(project_dir=project_dir, seed=0, strategy=strategy, balance="even", micro_batch=3)
        if (log := self.run._context.recorder).writes and strategy == on_device.NAME:
            log._unread_log = UnreadLog(log._write_log, is_late=torch.Tensor)
        data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(0)), torch.arange(48))
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.model, self.loader = self.run.prepare(self.model, DataLoader(data, batch_size=8))
        self.make()
        self.found: dict[str, Any] = {"weights": [], "lrs": [], "unread": [], "error": "", "losses": [], "error_at": -1}
        self.step_index = 0

    def make(self) -> None:
        self.opt = self.optimizer(self.model.parameters())
        self.schedule = StepLR(self.opt, 3, 0.5)
        self.run.resume(model=self.model, optimizer=self.opt, schedule=self.schedule)

    def loss_fn(self, batch: Any) -> Any:
        x, index = batch
        loss = F.cross_entropy(self.model(x.double()), index % 2)
        return {"loss": loss * self.factor(index), "squared": loss.detach() ** 2}

    def factor(self, index: torch.Tensor) -> float:
        return float("nan") if self.step_index in self.bad_steps and bool((index % 8 == 7).any()) else 1.0

    def body(self, step: Any) -> None:
        loss = step.backward(self.loss_fn)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.schedule.step()
        self.opt.zero_grad()
        self.run.log({"loss_again": loss, **{f"{name}_again": value for name, value in step.metrics.items()}})

    def train(self) -> dict[str, Any]:
        found = self.found
        try:
            for _ in range(self.num_epochs):
                for step in self.loader:
                    self.step_index = step.index
                    self.body(step)
                    found["unread"].append(step.stats.unread is not None)
                    found["weights"].append(torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone())
                    found["lrs"].append(self.schedule.get_last_lr()[0])
        except EvenloadError as error:
            found["error"], found["error_at"] = f"{type(error).__name__}: {error}", self.step_index
        found["state"] = [
            {key: torch.as_tensor(value).clone() for key, value in state.items() if value is not None}
            for state in self.opt.state_dict()["state"].values()
        ]
        found["cursor"] = self.run._context.loop.steps_done
        self.run.close()
        return found


class Unweighted(Script):
    pass


class Skipped(Script):
    bad_steps = (0, 1, 4, 6, 7, 11)
    late = range(3, NUM_STEPS)


class FusedSgd(Script):
    optimizer = staticmethod(lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, fused=True))
    bad_steps = (0, 3, 7)
    late = range(2, NUM_STEPS)


class NotFused(Script):
    optimizer = staticmethod(lambda params: torch.optim.SGD(params, 0.1, momentum=0.9))
    late = range(0)


class Decayed(torch.optim.AdamW):
    """Does more in a step than the step that it inherits."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(1.0 if p.grad is None else 0.99)
        return super().step(closure)


class OwnStep(Script):
    optimizer = staticmethod(lambda params: Decayed(params, 0.1, fused=True))
    late = range(0)


class ByHand(Script):
    """No optimizer of torch steps in it."""

    late = range(0)

    def body(self, step: Any) -> None:
        step.backward(self.loss_fn)
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
        self.model.zero_grad()


class Perturbed(Script):
    """SAM by hand from the sixth step on: the first backward is followed by another update than before."""

    bad_steps = (8,)
    late = (1, 2, 3, 4, 5, 7, 8, 9, 10, 11)  # from step 7 on the second backward

    def body(self, step: Any) -> None:
        step.backward(self.loss_fn)
        if step.index >= 6:
            moved = [(p, 0.05 * p.grad) for p in self.model.parameters() if p.grad is not None]
            with torch.no_grad():
                for p, change in moved:
                    p += change
            self.opt.zero_grad()
            step.backward(self.loss_fn)
            with torch.no_grad():
                for p, change in moved:
                    p -= change
        self.opt.step()
        self.schedule.step()
        self.opt.zero_grad()

    def factor(self, index: torch.Tensor) -> float:
        return 1.0 if self.found["weights"] and len(self.found["weights"]) != 8 else super().factor(index)


class Gan(Script):
    """Two optimizers and two backwards; in step 4 the first is not finite, in step 6 the second."""

    bad_steps = (4, 6)

    def make(self) -> None:
        self.opt = torch.optim.AdamW(self.model[2].parameters(), 0.05, fused=True)
        self.other = torch.optim.AdamW(self.model[0].parameters(), 0.05, fused=True)
        self.schedule = StepLR(self.opt, 3, 0.5)
        self.in_second = False

    def body(self, step: Any) -> None:
        for second, optimizer, part in ((False, self.opt, self.model[2]), (True, self.other, self.model[0])):
            self.in_second = second
            self.model.requires_grad_(False)
            part.requires_grad_(True)
            step.backward(self.loss_fn)
            optimizer.step()
            optimizer.zero_grad()
        self.schedule.step()

    def factor(self, index: torch.Tensor) -> float:
        return super().factor(index) if self.in_second == (self.step_index == 6) else 1.0


class Accumulated(Script):
    """Two backwards before the optimizer; in step 4 the first is not finite, in step 6 the second."""

    bad_steps = (4, 6)

    def body(self, step: Any) -> None:
        for self.in_second in (False, True):
            loss = step.backward(self.loss_fn)
            self.found["first_unread"] = [*self.found.get("first_unread", ()), step.stats.unread is not None]
        self.opt.step()
        self.schedule.step()
        self.opt.zero_grad()
        self.run.log({"loss_again": loss})

    def factor(self, index: torch.Tensor) -> float:
        return super().factor(index) if self.in_second == (self.step_index == 6) else 1.0


class PerturbedData(Perturbed):
    """The same through ``.data``, which no version of a parameter shows; the first backward is always read at once."""

    late = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)

    def body(self, step: Any) -> None:
        step.backward(self.loss_fn)
        moved = [(p, 0.05 * p.grad) for p in self.model.parameters() if p.grad is not None]
        for p, change in moved:
            p.data += change
        self.opt.zero_grad()
        step.backward(self.loss_fn)
        for p, change in moved:
            p.data -= change
        self.opt.step()
        self.schedule.step()
        self.opt.zero_grad()


class ZeroedInPlace(Script):
    def body(self, step: Any) -> None:
        step.backward(self.loss_fn)
        self.opt.step()
        self.schedule.step()
        self.opt.zero_grad(set_to_none=False)


class LeftOver(Script):
    """Step 4 begins with the gradients of step 3."""

    bad_steps = ()

    def body(self, step: Any) -> None:
        step.backward(self.loss_fn)
        self.opt.step()
        if self.step_index != 3:
            self.opt.zero_grad()


class NewOptimizer(Script):
    """An optimizer begins in step 5, which is not finite: its momentum must begin in step 6."""

    bad_steps = (5,)
    late = (1, 2, 3, 4, 7, 8, 9, 10, 11)

    def body(self, step: Any) -> None:
        if step.index == 5:
            self.opt = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9, fused=True)
        super().body(step)


class Closure(Script):
    """The optimizer calls step.backward itself."""

    late = range(0)

    def body(self, step: Any) -> None:
        self.opt.step(lambda: step.backward(self.loss_fn))
        self.opt.zero_grad()


class Tokens(Script):
    """Weights on the device; those of whole micro-batches are 0, for which cross_entropy is NaN."""

    bad_steps = (5,)
    late = (1, 2, 4, 5, 6, 7, 8, 9, 10, 11)  # the first weight of 0, in step 3, is looked at

    def loss_fn(self, batch: Any) -> Any:
        x, index = batch
        labels = index % 2
        if self.step_index >= 3:
            labels = torch.where(index % 8 > 2, labels, -100)
        loss = F.cross_entropy(self.model(x.double()), labels, ignore_index=-100)
        return {"loss": loss * self.factor(index), "weight": (labels != -100).sum(), "squared": loss.detach() ** 2}


class Masked(Script):
    """A loss that divides by its weight, which is 0 for a micro-batch in step 3: that step is run again."""

    bad_steps = ()
    late = (1, 2)

    def loss_fn(self, batch: Any) -> Any:
        x, index = batch
        kept = (index % 8 > 2).double() if self.step_index == 3 else torch.ones(len(x), dtype=torch.float64)
        return (self.model(x.double())[:, 0].square() * kept).sum() / kept.sum(), kept.sum()


class ThreeInARow(Script):
    bad_steps = (5, 6, 7, 8, 9)


class AllZero(Script):
    bad_steps = ()

    def loss_fn(self, batch: Any) -> Any:
        x, index = batch
        weight = torch.tensor(0 if self.step_index == 5 else len(x))
        return F.cross_entropy(self.model(x.double()), index % 2), weight


class Negative(AllZero):
    def loss_fn(self, batch: Any) -> Any:
        loss, weight = super().loss_fn(batch)
        return loss, torch.tensor(-1.0) if self.step_index == 5 and int(batch[1][0]) % 8 == 0 else weight


class Saved(Script):
    """A checkpoint in the loop and an export read what is there."""

    late = (1, 2, 3, 5, 6, 7, 9, 10, 11)

    def body(self, step: Any) -> None:
        super().body(step)
        if step.index == 4:
            self.run.checkpoint()
        if step.index == 8:
            self.run.export(f"{self.run._context.folder}/weights.pt")


SAME = (
    *(Unweighted, Skipped, FusedSgd, NotFused, OwnStep, ByHand, Perturbed, Gan, NewOptimizer, Closure, Tokens, Masked),
    *(Saved, Accumulated, PerturbedData, ZeroedInPlace),
)
ERRORS = (ThreeInARow, AllZero, Negative, LeftOver)


def _train_all(folder: str, strategy: str) -> list[dict[str, Any]]:
    on_device.register()
    torch.set_num_threads(1)
    return [case(f"{folder}/{case.__name__}", strategy).train() for case in (*SAME, *ERRORS)]


@pytest.fixture(scope="module", params=[1, 2])
def trained(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Name of the case -> strategy -> what each rank found, and the folder."""
    found: dict[str, Any] = {"num_ranks": request.param}
    for strategy in ("ddp", on_device.NAME):
        folder = tmp_path_factory.mktemp(strategy)
        ranks = run_ranks(_train_all, request.param, str(folder), strategy, timeout_s=100.0)
        for case, *results in zip((*SAME, *ERRORS), *ranks, strict=True):
            found.setdefault(case.__name__, {})[strategy] = (results, folder / case.__name__)
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


@pytest.mark.parametrize("case", SAME, ids=lambda case: case.__name__)
def test_a_script_trains_as_where_the_host_knows_all(case: type[Script], trained: Any) -> None:
    (expected, *_), folder = trained[case.__name__]["ddp"]
    late, late_folder = trained[case.__name__][on_device.NAME]
    for found in late:
        assert not found["error"]
        assert found["lrs"] == expected["lrs"]
        assert found["cursor"] == expected["cursor"] == NUM_STEPS
        for ours, theirs in zip(found["weights"], expected["weights"], strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
        for ours, theirs in zip(found["state"], expected["state"], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.allclose(ours[key], theirs[key], rtol=0, atol=1e-12) for key in ours)
        assert [index for index, unread in enumerate(found["unread"]) if unread] == list(case.late)
        if case is Accumulated:
            assert found["first_unread"] == [False, False] + [True, True] * (NUM_STEPS - 1)
    steps, expected_steps = _lines(late_folder / "steps.jsonl"), _lines(folder / "steps.jsonl")
    assert len(steps) == len(expected_steps) == NUM_STEPS
    for ours, theirs in zip(steps, expected_steps, strict=True):
        assert ours["step"] == theirs["step"]
        assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-12, nan_ok=True)
        ours_logged, theirs_logged = ours.get("metrics", {}), theirs.get("metrics", {})
        assert ours_logged.keys() == theirs_logged.keys()
        for name, value in theirs_logged.items():
            assert float(ours_logged[name]) == pytest.approx(float(value), rel=1e-6, nan_ok=True)
    skipped = [event["step"] for event in _lines(folder / "events.jsonl") if event["kind"] == "skipped"]
    assert [event["step"] for event in _lines(late_folder / "events.jsonl") if event["kind"] == "skipped"] == skipped
    assert sorted(set(skipped)) == list(case.bad_steps)


@pytest.mark.parametrize("case", [Unweighted, NotFused, OwnStep])
def test_an_optimizer_that_makes_the_host_wait_is_named_once(case: type[Script], trained: Any) -> None:
    _, folder = trained[case.__name__][on_device.NAME]
    events = [event for event in _lines(folder / "events.jsonl") if event["kind"] == "reads_at_once"]
    assert len(events) == (case is not Unweighted)
    assert all("fused=True" in event["message"] for event in events)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (ThreeInARow, "in 3 steps in a row, the last at step 7"),
        (AllZero, "step 5: all weights are 0"),
        (Negative, "step 5: loss_fn returned a weight that is negative"),
        (LeftOver, "step 4: gradients were already present before the step's first backward"),
    ],
)
def test_an_error_comes_a_step_later_and_no_weight_has_changed(case: type[Script], message: str, trained: Any) -> None:
    last = {ThreeInARow: 7, LeftOver: 4}.get(case, 5)
    for found in trained[case.__name__][on_device.NAME][0]:
        assert message in found["error"]
        assert found["error_at"] == last + (case is ThreeInARow or found["unread"][last : last + 1] == [True])
        assert all(bool(weights.isfinite().all()) for weights in found["weights"])
        assert torch.equal(found["weights"][-1], found["weights"][3 if case is LeftOver else 4])
