"""More unusual uses that no split can compute: state and losses of a whole batch, weights of no model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.ranks.wrong_uses.gradient_jobs import Job


class _WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 1)
        self.register_buffer("scale", torch.ones(1, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


def trainable_buffer(job: Job) -> Any:
    torch.manual_seed(0)
    model = job.prepare(_WithBuffer().double())
    model.scale = model.scale.detach().requires_grad_()
    optimizer = job.optimizer([*model.parameters(), model.scale])
    for step in job.steps():
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return [*job.weights()]


def loss_over_itself(job: Job) -> Any:
    job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        loss = job.loss(batch)
        return loss / loss.detach()

    return job.train(loss_fn)


def balanced_by_gradient_norms(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        out = model(x)
        a, b = functional.mse_loss(out, y), functional.l1_loss(out, y)
        norms = [torch.autograd.grad(one, model[2].weight, retain_graph=True)[0].norm() for one in (a, b)]
        return a + b * (norms[0] / norms[1]).detach()

    return job.train(loss_fn)


def hardest_half(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        losses = (model(x) - y).square().flatten()
        return losses.topk(max(1, len(losses) // 2)).values.mean()

    return job.train(loss_fn)


def normalised_advantages(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        adv = (y - y.mean()) / (y.std(correction=0) + 1e-6)
        return -(adv * model(x)).mean() + 0.1 * model(x).square().mean()

    return job.train(loss_fn)


class _Observer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.most.copy_(0.9 * self.most + 0.1 * x.detach().abs().max())
        scale = self.most.clamp(min=0.1) / 8
        return x + ((x / scale).round() * scale - x).detach()


def fake_quantised(job: Job) -> Any:
    job.prepare(job.network(nn.Linear(8, 8), _Observer()))
    return job.train()


def functional_optimizer(job: Job) -> Any:
    model = job.prepare(job.network())
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}

    def loss_fn(batch: Any) -> torch.Tensor:
        return functional.mse_loss(torch.func.functional_call(model, weights, (batch[0],)), batch[1])

    for step in job.steps():
        step.backward(loss_fn)
        with torch.no_grad():
            for w in weights.values():
                w -= 0.05 * w.grad
                w.grad = None
    return list(weights.values())


def gated_by_the_loss(job: Job) -> Any:
    """Flooding by a branch of Python."""
    job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        loss = job.loss(batch)
        return loss if loss > 0.6 else 1.2 - loss

    return job.train(loss_fn)
