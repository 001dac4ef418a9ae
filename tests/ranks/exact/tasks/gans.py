"""Two models and two optimizers in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.exact.tasks.base import Backward, Recorder, Rows, Task


class Gan(Task):
    """Two models, two optimizers, in the order of PyTorch's DCGAN tutorial: D on real, D on fake, step D, G through D."""

    detached = True

    def make_dataset(self) -> Any:
        g = torch.Generator().manual_seed(1)
        real = torch.randn(self.num_samples, 6, generator=g, dtype=self.dtype) * 2 + 1
        noise = torch.randn(self.num_samples, 4, generator=g, dtype=self.dtype)
        return Rows(list(zip(real, noise, strict=True)))

    def build(self) -> None:
        generator = nn.Sequential(nn.Linear(4, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))
        discriminator = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
        self.models = [generator.to(self.dtype), discriminator.to(self.dtype)]

    def place(self, models: Sequence[nn.Module]) -> None:
        self.generator, self.discriminator = models

    def make_optimizers(self) -> None:
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.5, 0.999), eps=1e-8) for model in self.models
        ]

    def on_real(self, batch: Any) -> Any:
        out = self.discriminator(batch[0])
        return F.binary_cross_entropy_with_logits(out, torch.ones_like(out))

    def on_fake(self, batch: Any) -> Any:
        out = self.discriminator(self.generator(batch[1]).detach())
        return F.binary_cross_entropy_with_logits(out, torch.zeros_like(out))

    def fooling(self, batch: Any) -> Any:
        out = self.discriminator(self.generator(batch[1]))
        return F.binary_cross_entropy_with_logits(out, torch.ones_like(out))

    def body(self, backward: Backward, record: Recorder) -> None:
        optimize_g, optimize_d = self.optimizers
        self.models[1].zero_grad()
        record.gradients(backward(self.on_real))
        record.gradients(backward(self.on_fake))
        optimize_d.step()
        self.models[0].zero_grad()
        record.gradients(backward(self.fooling))
        optimize_g.step()


class GanKeepsGradients(Gan):
    """D's loss also flows into G (nothing is detached), and zero_grad comes at the end, of the stepped model only."""

    def on_fake(self, batch: Any) -> Any:
        out = self.discriminator(self.generator(batch[1]))
        return F.binary_cross_entropy_with_logits(out, torch.zeros_like(out))

    def body(self, backward: Backward, record: Recorder) -> None:
        optimize_g, optimize_d = self.optimizers
        record.gradients(backward(self.on_fake))
        optimize_d.step()
        optimize_d.zero_grad()
        record.gradients(backward(self.fooling))
        optimize_g.step()
        optimize_g.zero_grad()
