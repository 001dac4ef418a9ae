"""Tasks whose loop does more than one plain optimizer step: several evaluations, averages, perturbed weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader

from tests.ranks.exact.tasks.base import Backward, Recorder, Task
from tests.ranks.exact.tasks.norms import Normed

NUM_STEPS = 8


class Lbfgs(Task):
    """The closure is called several times in one step: zero_grad and backward each time."""

    num_steps = NUM_STEPS

    def make_optimizers(self) -> None:
        self.optimizers = [
            torch.optim.LBFGS(
                self.models[0].parameters(), lr=0.5, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
            )
        ]

    def body(self, backward: Backward, record: Recorder) -> None:
        (optimizer,) = self.optimizers

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = backward(self.loss)
            record.gradients(loss)
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        optimizer.zero_grad()


class Ema(Normed):
    """An exponential average of the weights and of BatchNorm's buffers."""

    num_steps = NUM_STEPS

    def place(self, models: Sequence[nn.Module]) -> None:
        super().place(models)
        self.averaged = AveragedModel(models[0], multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)

    def body(self, backward: Backward, record: Recorder) -> None:
        super().body(backward, record)
        self.averaged.update_parameters(self.models[0])

    def results(self) -> list[torch.Tensor]:
        return [*self.parameters(), *self.averaged.parameters(), *self.averaged.buffers()]


class Swa(Ema):
    """Stochastic weight averaging with its learning rate, and the pass that sets the average's BatchNorm statistics."""

    since = 3

    def place(self, models: Sequence[nn.Module]) -> None:
        Task.place(self, models)
        self.averaged = AveragedModel(models[0])

    def make_optimizers(self) -> None:
        super().make_optimizers()
        self.schedule = SWALR(self.optimizers[0], swa_lr=5e-3, anneal_epochs=3)

    def body(self, backward: Backward, record: Recorder) -> None:
        Task.body(self, backward, record)
        if self.step_index < self.since:
            return
        self.averaged.update_parameters(self.models[0])
        self.schedule.step()
        if self.step_index == self.num_steps - 1:
            update_bn(DataLoader(self.dataset, batch_size=20), self.averaged)


class Lookahead(Task):
    """Slow weights that follow the fast ones every three steps."""

    num_steps = NUM_STEPS

    def make_optimizers(self) -> None:
        super().make_optimizers()
        self.slow = [p.detach().clone() for p in self.parameters()]

    def body(self, backward: Backward, record: Recorder) -> None:
        super().body(backward, record)
        if self.step_index % 3 == 2:
            with torch.no_grad():
                for p, slow in zip(self.parameters(), self.slow, strict=True):
                    p.copy_(slow.lerp_(p, 0.5))


class Sam(Task):
    """Sharpness-aware minimisation: the second backward of a step is at perturbed weights."""

    num_steps = NUM_STEPS

    def body(self, backward: Backward, record: Recorder) -> None:
        parameters = self.parameters()
        record.gradients(backward(self.loss))
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        with torch.no_grad():
            moves = [p.grad * (0.05 / norm) for p in parameters]
            for p, move in zip(parameters, moves, strict=True):
                p.add_(move)
        self.optimizers[0].zero_grad()
        record.gradients(backward(self.loss))
        with torch.no_grad():
            for p, move in zip(parameters, moves, strict=True):
                p.sub_(move)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()


class SamInPlace(Sam):
    """The same with the perturbation computed inside the gradient's own memory, and kept during the second backward."""

    def body(self, backward: Backward, record: Recorder) -> None:
        parameters = self.parameters()
        record.gradients(backward(self.loss))
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [p.grad.mul_(0.05 / norm) for p in parameters]
        with torch.no_grad():
            for p, move in zip(parameters, moves, strict=True):
                p.add_(move)
        self.optimizers[0].zero_grad()
        record.gradients(backward(self.loss))
        with torch.no_grad():
            for p, move in zip(parameters, moves, strict=True):
                p.sub_(move)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()


class ManyGroups(Task):
    """Parameter groups with settings of their own, a second optimizer for the head, and a schedule for each."""

    num_steps = NUM_STEPS

    def make_optimizers(self) -> None:
        first, _, head = self.models[0]
        groups = [{"params": [first.weight], "weight_decay": 0.1}, {"params": [first.bias], "lr": 3e-2}]
        self.optimizers = [
            torch.optim.AdamW(groups, lr=1e-2, eps=1e-8),
            torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        ]
        self.schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) for optimizer in self.optimizers]

    def body(self, backward: Backward, record: Recorder) -> None:
        record.gradients(backward(self.loss))
        for part in (*self.optimizers, *self.schedules):
            part.step()
        self.models[0].zero_grad()


class ClippedByValue(Task):
    """Clipped by value and then by norm, with noise added that is the same on all ranks."""

    num_steps = NUM_STEPS

    def body(self, backward: Backward, record: Recorder) -> None:
        record.gradients(backward(self.loss))
        parameters = self.parameters()
        torch.nn.utils.clip_grad_value_(parameters, 0.02)
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        g = torch.Generator().manual_seed(self.step_index)
        for p in parameters:
            p.grad += 0.01 * torch.randn(p.shape, generator=g, dtype=p.dtype)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
