"""Tasks with BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.exact.tasks.base import Backward, Recorder, Rows, Task


class Normed(Task):
    """BatchNorm of all kinds, with and without affine, momentum and running statistics; a ragged last batch of 9."""

    num_samples = 32 + 32 + 9

    def make_dataset(self) -> Any:
        g = torch.Generator().manual_seed(1)
        x = torch.randn(self.num_samples, 3, 6, 6, generator=g, dtype=self.dtype)
        x = x + torch.arange(self.num_samples, dtype=self.dtype).view(-1, 1, 1, 1) / 20  # statistics differ over ranks
        y = torch.randint(0, 4, (self.num_samples,), generator=g)
        return Rows(list(zip(x, y, strict=True)))

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, bias=False),
            nn.BatchNorm2d(6, affine=False, momentum=None),
            nn.Flatten(),
            nn.Linear(24, 12, bias=False),
            nn.BatchNorm1d(12, track_running_stats=False),
            nn.Tanh(),
            nn.Linear(12, 4),
        )


class ChannelsLast(Normed):
    def make_model(self) -> nn.Module:
        return super().make_model().to(memory_format=torch.channels_last)

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self.model(x.to(memory_format=torch.channels_last)), y)


class NormedAtEval(Normed):
    """BatchNorm without running statistics takes the batch's in eval mode too (fine-tuning with frozen BatchNorm)."""

    def place(self, models: Sequence[nn.Module]) -> None:
        super().place(models)
        self.model.eval()


class MeanTeacher(Normed):
    """A frozen teacher with BatchNorm in training mode: the average of the student's weights."""

    def build(self) -> None:
        self.models = [self.make_model().to(self.dtype), self.make_model().to(self.dtype).requires_grad_(False)]

    def place(self, models: Sequence[nn.Module]) -> None:
        self.model, self.teacher = models

    def loss(self, batch: Any) -> Any:
        x, y = batch
        with torch.no_grad():
            target = self.teacher(x)
        out = self.model(x)
        return F.cross_entropy(out, y) + F.mse_loss(out, target)

    def body(self, backward: Backward, record: Recorder) -> None:
        super().body(backward, record)
        with torch.no_grad():
            for average, now in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                average.lerp_(now, 0.1)


class FrozenNorm(Normed):
    """A frozen feature extractor with BatchNorm in training mode below a trained head, in one model."""

    num_steps = 8

    def build(self) -> None:
        super().build()
        self.models[0][:6].requires_grad_(False)


class PenalisedNormed(Normed):
    """A gradient penalty: the backward of a backward through BatchNorm, whose statistics all ranks share."""

    num_steps = 6

    def loss(self, batch: Any) -> Any:
        x, y = batch
        x = x.detach().requires_grad_()
        logits = self.model(x)
        (grad,) = torch.autograd.grad(torch.tanh(logits).sum(), x, create_graph=True)
        return F.cross_entropy(logits, y) + ((grad.flatten(1).norm(dim=1) - 1.0) ** 2).mean()


class NormedFloat32(Normed):
    dtype = torch.float32
    num_steps = 8


class NormedBfloat16(Normed):
    dtype = torch.bfloat16
    num_steps = 4
