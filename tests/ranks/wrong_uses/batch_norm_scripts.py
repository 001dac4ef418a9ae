"""Unusual uses of BatchNorm, which depend on the number of micro-batches: each function is a user's script."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.ranks.wrong_uses.gradient_jobs import Job

# normalisation, in one micro-batch


def _normed(job: Job, **settings: Any) -> nn.Sequential:
    torch.manual_seed(5 + job.rank)
    layer = nn.Linear(8, 8)
    return job.network(layer, nn.BatchNorm1d(8, **settings))  # type: ignore[return-value]


def cumulative_batch_norm(job: Job) -> Any:
    job.prepare(_normed(job, momentum=None))
    return job.train()


def batch_norm_without_weights(job: Job) -> Any:
    job.prepare(_normed(job, affine=False))
    return job.train()


def batch_norm_used_twice(job: Job) -> Any:
    model = _normed(job)
    model.insert(2, model[3])
    job.prepare(model)
    return job.train()


def batch_norm_in_a_checkpoint(job: Job) -> Any:
    """Its running statistics move twice, in one process too."""
    model = job.prepare(_normed(job))

    def loss_fn(batch: Any) -> torch.Tensor:
        z = checkpoint(model[:4], batch[0], use_reentrant=False)
        return functional.mse_loss(model[4:](z), batch[1])

    return job.train(loss_fn)


def batch_norm_by_functional_call(job: Job) -> Any:
    model = job.prepare(_normed(job))

    def loss_fn(batch: Any) -> torch.Tensor:
        weights = {name: p * 1.0 for name, p in model.named_parameters()}
        return functional.mse_loss(torch.func.functional_call(model, weights, (batch[0],)), batch[1])

    return job.train(loss_fn)


def batch_norm_of_sequences(job: Job) -> Any:
    class Split(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(len(x), 2, 4)

    job.prepare(job.network(Split(), nn.BatchNorm1d(2, eps=0.1), nn.Flatten()))
    return job.train()


def batch_norm_evaluated_by_turns(job: Job) -> Any:
    model = job.prepare(_normed(job))

    def update(optimizer: Any, step: Any) -> None:
        optimizer.step()
        model[3].train(step.index % 2 == 1)

    return job.train_by(update)
