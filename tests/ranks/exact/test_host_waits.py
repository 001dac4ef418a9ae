"""What would make a host wait for its GPU in a usual step, counted on the CPU, where the same code runs (`on_device`).

Each use of a tensor as a number of the host is noted with the function of Evenload that made it. Those allowed are listed.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.testing import run_ranks
from evenload.training.compute.device_read import DeviceRead
from evenload.training.parallel.factory import STRATEGIES
from evenload.training.step.unread_log import UnreadLog

SOURCE = Path(evenload.__file__).parent
NUM_STEPS, FIRST = 10, 7
"""The steps before `FIRST` prepare; loss_fn is looked at in the first, and from the fifth on in up to three."""
CONVERSIONS = {
    *("item", "tolist", "numpy", "cpu", "is_nonzero", "nonzero", "masked_select", "equal", "allclose", "unique"),
    *("__float__", "__bool__", "__int__", "__index__", "__contains__", "__array__"),
}
ALLOWED = {
    "training/compute/device_read.py:read": "of an earlier step, see below",
    "training/compute/batchnorm_kernels.py:combine": "on a CPU only",
    "training/compute/micro_steps.py:add_result": "of a loss on a CPU only",
    "training/comm/statistics.py:gather_in": "on a CPU only, or on a GPU beside CPU ranks",
    "training/comm/subset.py:exchange": "a row of the host's numbers",
    "training/comm/groups.py:exchange_row": "a row of the host's numbers",
    "training/comm/host_exchange.py:exchange_row": "a row of the host's numbers",
    "training/parallel/arrivals.py:agree": "summed by the hosts",
    "training/data/randomness.py:save": "the state of the host's generators",
    "training/data/randomness.py:get_global_state": "the state of the host's generators",
}


class Conversions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in CONVERSIONS:
            self.found[_place(func.__name__)] += 1
        return func(*args, **(kwargs or {}))


def _place(name: str) -> str:
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith((str(SOURCE), __file__)):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename == __file__:
        return f"the script: {name}"
    return f"{Path(frame.f_code.co_filename).relative_to(SOURCE)}:{frame.f_code.co_name}"


class Script:
    """The most usual loop."""

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, project_dir: str) -> None:
        settings = {"balance": "even", "micro_batch": 3, **self.settings}
        self.run = evenload.init(project_dir=project_dir, seed=0, **settings)
        if (log := self.run._context.recorder).writes:
            log._unread_log = UnreadLog(log._write_log, is_late=torch.Tensor)
        data = TensorDataset(
            torch.randn(8 * NUM_STEPS, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8 * NUM_STEPS)
        )
        torch.manual_seed(1)
        self.model = self.make_model()
        self.model, self.loader = self.run.prepare(self.model, DataLoader(data, batch_size=8))
        self.opt = self.make_optimizer()
        self.schedule = StepLR(self.opt, 3, 0.5)
        self.run.resume(model=self.model, optimizer=self.opt, schedule=self.schedule)

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), 0.1, fused=True)

    def loss_fn(self, batch: Any) -> Any:
        x, index = batch
        loss = F.cross_entropy(self.model(x).float(), index % 2)
        return {"loss": loss, "squared": loss.detach() ** 2}

    def body(self, step: Any) -> None:
        loss = step.backward(self.loss_fn)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.schedule.step()
        self.opt.zero_grad()
        self.run.log({"loss_again": loss, **step.metrics})

    def train(self) -> dict[str, Any]:
        conversions, engine = Conversions(), self.run._context.engine
        backward, begin, read = engine.backward, DeviceRead.__init__, DeviceRead.read
        calls, early, found, made = 0, 0, (0, Counter[str]()), {}

        def counted(attempt: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return backward(attempt)

        def noted(self: DeviceRead, values: torch.Tensor) -> None:
            made[id(self)] = calls
            begin(self, values)

        def checked(self: DeviceRead) -> list[float]:
            nonlocal early
            early += made[id(self)] == calls  # nothing was queued since
            return read(self)

        engine.backward, DeviceRead.__init__, DeviceRead.read = counted, noted, checked  # type: ignore[method-assign]
        try:
            with conversions:
                for step in self.loader:
                    self.body(step)
                    found = early, Counter(conversions.found)
                    if step.index < FIRST:
                        early = 0
                        conversions.found.clear()
        finally:
            DeviceRead.__init__, DeviceRead.read = begin, read  # type: ignore[method-assign]
        self.run.close()
        return {"early": found[0], "found": found[1]}


class BFloat16(Script):
    settings: ClassVar = {"precision": "bf16"}


class Normalized(Script):
    """BatchNorm over ranks."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


class TwoGroups(Script):
    def make_optimizer(self) -> torch.optim.Optimizer:
        first, _, last = self.model
        groups = [{"params": first.parameters(), "lr": 0.01}, {"params": last.parameters()}]
        return torch.optim.AdamW(groups, 0.1, fused=True)


class ZeroedInPlace(Script):
    """Gradients stay, as zeros."""

    def body(self, step: Any) -> None:
        step.backward(self.loss_fn)
        self.opt.step()
        self.opt.zero_grad(set_to_none=False)


class TwoBackwards(Script):
    """Gradients of two losses add up."""

    def body(self, step: Any) -> None:
        step.backward(self.loss_fn)
        step.backward(self.loss_fn)
        self.opt.step()
        self.opt.zero_grad()


class Measured(Script):
    """The norms of gradients are measured in every fourth step."""

    settings: ClassVar = {"batch_max": 16}


class Weighted(Script):
    """The weight of a micro-batch lies on the device."""

    def loss_fn(self, batch: Any) -> Any:
        x, index = batch
        return F.cross_entropy(self.model(x), index % 2), (index >= 0).sum()


class TouchedInTurns(Script):
    """Each rank trains another part of the model in each step."""

    def make_model(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(4, 2) for _ in range(3)])

    def loss_fn(self, batch: Any) -> Any:
        x, index = batch
        part = self.model[(self.run.rank + self.run._context.loop.steps_done) % 3]  # type: ignore[index]
        return F.cross_entropy(part(x), index % 2)


SCRIPTS = (*(Script, BFloat16, Normalized, TwoGroups, ZeroedInPlace, TwoBackwards, Measured, Weighted, TouchedInTurns),)


def _train_all(folder: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    open_ddp = STRATEGIES["ddp"]
    STRATEGIES["ddp"] = lambda parts: open_ddp(replace(parts, on_device=True))  # this process ends with the test
    return [script(f"{folder}/{script.__name__}").train() for script in SCRIPTS]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_step_waits(num_ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(_train_all, num_ranks, str(tmp_path), timeout_s=100.0):
        waits = {
            script.__name__: (sorted(one["found"].keys() - ALLOWED), one["early"])
            for script, one in zip(SCRIPTS, found, strict=True)
        }
        # A weight of 0 is looked for after the forward, while the GPU has the backward to do.
        assert waits.pop("Weighted") == ([], NUM_STEPS - FIRST)
        assert waits == dict.fromkeys(waits, ([], 0))
