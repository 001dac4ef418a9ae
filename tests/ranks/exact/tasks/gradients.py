"""Tasks that keep gradients, combine them, or take them of gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.exact.tasks.base import Backward, Recorder, Task
from tests.ranks.exact.tasks.gans import Gan
from tests.ranks.exact.tasks.optimizers import NUM_STEPS


class KeepingTask(Task):
    """Gradients are kept as they are, not copied, while further backwards run."""

    num_steps = NUM_STEPS

    def taken(self, backward: Backward, record: Recorder, loss_fn: Any) -> list[torch.Tensor]:
        """The gradients of a backward, taken off the parameters."""
        record.gradients(backward(loss_fn))
        kept = [p.grad for p in self.parameters()]
        self.models[0].zero_grad()
        return kept

    def update(self, grads: list[torch.Tensor]) -> None:
        for p, grad in zip(self.parameters(), grads, strict=True):
            p.grad = grad
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()


class PcGrad(KeepingTask):
    """Two losses; where their gradients conflict, each is projected onto the normal plane of the other."""

    def second(self, batch: Any) -> Any:
        x, y = batch
        return (self.model(x)[:, 0] - y).square().mean()

    def body(self, backward: Backward, record: Recorder) -> None:
        one = self.taken(backward, record, self.loss)
        two = self.taken(backward, record, self.second)
        sums = []
        for a, b in zip(one, two, strict=True):
            dot = (a * b).sum()
            if dot < 0:
                sums.append(a + b - dot * (b / b.square().sum() + a / a.square().sum()))
            else:
                sums.append(a.add_(b))
        self.update(sums)


class Svrg(KeepingTask):
    """Variance reduction: the gradient at earlier weights is subtracted, a kept one of an earlier step added."""

    def body(self, backward: Backward, record: Recorder) -> None:
        parameters = self.parameters()
        if self.step_index % 3 == 0:
            self.snapshot = [p.detach().clone() for p in parameters]
            self.anchor = self.taken(backward, record, self.loss)
        here = self.taken(backward, record, self.loss)
        weights = [p.detach().clone() for p in parameters]
        self._set(self.snapshot)
        there = self.taken(backward, record, self.loss)
        self._set(weights)
        self.update([g - s + a for g, s, a in zip(here, there, self.anchor, strict=True)])

    def _set(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(self.parameters(), values, strict=True):
                p.copy_(value)


class Fisher(KeepingTask):
    """The mean of the last three steps' gradients, weighted by their second_moments."""

    def build(self) -> None:
        super().build()
        self.earlier: list[list[torch.Tensor]] = []

    def body(self, backward: Backward, record: Recorder) -> None:
        self.earlier = [*self.earlier[-2:], self.taken(backward, record, self.loss)]
        columns = list(zip(*self.earlier, strict=True))
        means = [torch.stack(column).mean(0) for column in columns]
        second_moments = [torch.stack(column).square().mean(0) for column in columns]
        self.update([mean / (square.sqrt() + 0.1) for mean, square in zip(means, second_moments, strict=True)])


class CurvatureTerm(Task):
    """Double backward: the loss holds the product of its own gradient with a fixed direction."""

    num_steps = NUM_STEPS

    def loss(self, batch: Any) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        slopes = torch.autograd.grad(loss, list(self.model.parameters()), create_graph=True)
        return loss + 0.1 * sum((slope * torch.ones_like(slope).cumsum(0)).sum() for slope in slopes)


class WganGp(Gan):
    """A critic with a gradient penalty, stepped twice for each step of the generator."""

    num_steps = NUM_STEPS

    def critic_loss(self, batch: Any) -> Any:
        real, noise = batch
        fake = self.generator(noise).detach()
        part = torch.sigmoid(noise[:, :1])
        between = (part * real + (1 - part) * fake).requires_grad_()
        out = self.discriminator(between)
        (slope,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True, retain_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        return self.discriminator(fake).mean() - self.discriminator(real).mean() + 10 * penalty

    def generator_loss(self, batch: Any) -> Any:
        return -self.discriminator(self.generator(batch[1])).mean()

    def body(self, backward: Backward, record: Recorder) -> None:
        optimize_g, optimize_d = self.optimizers
        for _ in range(2):
            optimize_d.zero_grad()
            record.gradients(backward(self.critic_loss))
            optimize_d.step()
        optimize_g.zero_grad()
        record.gradients(backward(self.generator_loss))
        optimize_g.step()


class Pix2Pix(Gan):
    """The discriminator is frozen for the generator's backward, and let go for its own."""

    num_steps = NUM_STEPS

    def body(self, backward: Backward, record: Recorder) -> None:
        optimize_g, optimize_d = self.optimizers
        self.models[1].requires_grad_(True)
        optimize_d.zero_grad()
        record.gradients(backward(self.on_fake))
        record.gradients(backward(self.on_real))
        optimize_d.step()
        self.models[1].requires_grad_(False)
        optimize_g.zero_grad()
        record.gradients(backward(self.fooling))
        optimize_g.step()


class ComplexNet(nn.Module):
    """A spectrum-like layer: complex weights, real outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12, dtype=torch.complex128)
        self.last = nn.Linear(12, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x.to(torch.complex128)).abs())


class ComplexWeights(Task):
    num_steps = NUM_STEPS
    clip = 0.5

    def build(self) -> None:
        self.models = [ComplexNet()]  # a cast of the whole model would take the imaginary parts away
