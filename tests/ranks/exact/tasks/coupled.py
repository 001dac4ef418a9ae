"""Losses over the whole global batch: `backward(encode, batch_loss=fn)`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.ranks.exact.tasks.base import Backward, Recorder, Rows, Task


class _TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 6))
        self.text = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 6))
        self.logit_scale = nn.Parameter(torch.tensor(1.0))


class Clip(Task):
    """Two encoders, one with BatchNorm, and a temperature that only batch_loss uses; metrics, clipping, a ragged batch of 9."""

    num_samples = 32 + 32 + 9
    num_steps = 7
    clip = 0.5

    def make_dataset(self) -> Any:
        g = torch.Generator().manual_seed(1)
        image = torch.randn(self.num_samples, 8, generator=g, dtype=self.dtype)
        text = image[:, :5] + 0.3 * torch.randn(self.num_samples, 5, generator=g, dtype=self.dtype)
        return Rows(list(zip(image, text, strict=True)))

    def make_model(self) -> nn.Module:
        return _TwoTowers()

    def encode(self, batch: Any) -> Any:
        image, text = batch
        return F.normalize(self.model.image(image), dim=-1), F.normalize(self.model.text(text), dim=-1)

    def batch_loss(self, image: torch.Tensor, text: torch.Tensor) -> Any:
        logits = self.model.logit_scale.exp() * image @ text.T
        labels = torch.arange(len(logits), device=logits.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).to(self.dtype).mean()}

    def body(self, backward: Backward, record: Recorder) -> None:
        record.gradients(backward(self.encode, batch_loss=self.batch_loss))
        torch.nn.utils.clip_grad_norm_(self.models[0].parameters(), self.clip or 1.0)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()


class _Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh())
        self.head = nn.Linear(12, 6)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.log_temperature = nn.Parameter(torch.tensor(-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


class SimClr(Clip):
    """Two views through one encoder; labels that are not floats. A second loss, of the usual kind, adds to the gradients."""

    def make_dataset(self) -> Any:
        g = torch.Generator().manual_seed(1)
        x = torch.randn(self.num_samples, 8, generator=g, dtype=self.dtype)
        views = [x + 0.2 * torch.randn(x.shape, generator=g, dtype=self.dtype) for _ in range(2)]
        return Rows(list(zip(*views, torch.randint(0, 3, (self.num_samples,), generator=g), strict=True)))

    def make_model(self) -> nn.Module:
        return _Projected()

    def encode(self, batch: Any) -> Any:
        first, second, label = batch
        # Twice with one micro-batch, four times with several: each step must move the buffers twice.
        return self.model(first), self.model(second), label, label > 1

    def batch_loss(self, first: torch.Tensor, second: torch.Tensor, label: torch.Tensor, flag: torch.Tensor) -> Any:
        assert label.dtype == torch.int64 and flag.dtype == torch.bool and torch.equal(flag, label > 1)
        z = F.normalize(torch.cat([first, second]), dim=-1)
        logits = (z @ z.T / self.model.log_temperature.exp()).fill_diagonal_(float("-inf"))
        n = len(first)
        targets = torch.arange(2 * n, device=z.device).roll(n)
        return F.cross_entropy(logits, targets), 2 * n

    def penalty(self, batch: Any) -> Any:
        return 0.1 * self.model.head(batch[0] @ torch.ones(8, 12, dtype=self.dtype)).square().mean()

    def body(self, backward: Backward, record: Recorder) -> None:
        record.gradients(backward(self.encode, batch_loss=self.batch_loss))
        record.gradients(backward(self.penalty))
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()


class CrossCorrelation(SimClr):
    """Barlow Twins: BatchNorm inside batch_loss, of the whole batch, once."""

    def batch_loss(self, first: torch.Tensor, second: torch.Tensor, *_: torch.Tensor) -> Any:
        c = self.model.norm(first).T @ self.model.norm(second) / len(first)
        off = c - torch.diag(torch.diagonal(c))
        return (torch.diagonal(c) - 1).square().sum() + 0.05 * off.square().sum() + 0 * self.model.log_temperature


class SpectralSimClr(SimClr):
    """A spectral norm, whose buffers change the output of each forward."""

    def make_model(self) -> nn.Module:
        model = _Projected()
        model.body[0] = spectral_norm(model.body[0])
        return model
