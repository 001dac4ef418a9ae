"""Wrong uses of gradients, hooks and optimizers: each would give wrong weights without a word, so each must be refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.ranks.wrong_uses import loss_fn_scripts
from tests.ranks.wrong_uses.gradient_jobs import BATCH, Job, dataset


def raised_and_not_caught_by_all(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer()

    def loss_fn(batch: Any) -> torch.Tensor:
        if job.rank == 1:
            raise ValueError("a bad sample")
        return job.loss(batch)

    for step in job.steps():
        try:
            step.backward(loss_fn if step.index == 1 else job.loss)
        except ValueError:
            continue
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def _updating(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def update(param: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def optimizer_in_a_hook(job: Job) -> Any:
    model = job.prepare(job.network())
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_updating(job.optimizer([p])))
    for step in job.steps():
        step.backward(job.loss)
    return job.weights()


def optimizer_in_a_hook_of_before(job: Job) -> Any:
    """The hooks are there when the model is prepared."""
    model = job.network()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_updating(job.optimizer([p])))
    job.prepare(model)
    for step in job.steps():
        step.backward(job.loss)
    return job.weights()


def accumulate_hook_that_clamps(job: Job) -> Any:
    model = job.prepare(job.network())

    def clamp(param: torch.Tensor) -> None:
        param.grad.clamp_(-1e-2, 1e-2)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clamp)
    return job.train()


def teacher_not_prepared(job: Job) -> Any:
    """Its BatchNorm takes the statistics of this rank's samples."""
    model = job.network(nn.BatchNorm1d(8))
    teacher = copy.deepcopy(model).requires_grad_(False)
    job.prepare(model)
    return job.train(lambda batch: job.loss(batch) + functional.mse_loss(model(batch[0]), teacher(batch[0] + 0.5)))


def own_scaler(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer()
    scaler = torch.amp.GradScaler("cpu")
    for step in job.steps():
        step.backward(lambda batch: scaler.scale(job.loss(batch)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return job.weights()


def optimizer_of_the_head_alone(job: Job) -> Any:
    """The body is not frozen, so its gradients add up from step to step."""
    model = job.prepare(job.network())
    return job.train(parameters=model[4].parameters())


def accumulated_by_hand(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        step.backward(job.loss)
        if step.index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return job.weights()


def two_loaders_in_zip(job: Job) -> Any:
    model = job.network()
    model, one, two = job.run.prepare(model, *(DataLoader(dataset(), batch_size=BATCH) for _ in range(2)))
    for a, b in zip(one, two, strict=True):
        a.backward(job.loss)
        b.backward(job.loss)
    return []


def parameters_that_nobody_sums(job: Job) -> Any:
    model = job.prepare(job.network())
    torch.manual_seed(5)
    head = nn.Linear(1, 1).double()
    return job.train(
        lambda batch: functional.mse_loss(head(model(batch[0])), batch[1]),
        parameters=[*model.parameters(), *head.parameters()],
    )


def sparse_gradient(job: Job) -> Any:
    model = job.prepare(nn.EmbeddingBag(8, 1, mode="mean", sparse=True).double())
    return job.train(lambda batch: model((batch[0] > 0).long()).square().mean(), momentum=0.0)


def plain_backward(job: Job) -> Any:
    job.prepare(job.network())
    for step in job.steps():
        job.loss(next(iter(DataLoader(dataset(), batch_size=4)))).backward()
        step.backward(job.loss)
    return job.weights()


def backward_in_loss_fn(job: Job) -> Any:
    job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        loss = job.loss(batch)
        loss.backward(retain_graph=True)
        return loss

    return job.train(loss_fn)


def zero_grad_to_zeros_between_micro_batches(job: Job) -> Any:
    """loss_fn runs once for each micro-batch: it would erase what the one before gave."""
    return loss_fn_scripts.zero_grad_to_zeros_in_loss_fn(job)


def backward_of_the_returned_loss(job: Job) -> Any:
    job.prepare(job.network())
    for step in job.steps():
        step.backward(job.loss).backward()
    return job.weights()


def backward_inside_of_itself(job: Job) -> Any:
    job.prepare(job.network())
    for step in job.steps():
        step.backward(lambda batch, step=step: step.backward(job.loss))
    return job.weights()


def detached_loss(job: Job) -> Any:
    job.prepare(job.network())
    return job.train(lambda batch: job.loss(batch).detach())


def detached_loss_on_one_rank(job: Job) -> Any:
    job.prepare(job.network())
    return job.train(lambda batch: job.loss(batch).detach() if job.rank == 1 else job.loss(batch))


def under_inference_mode(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        with torch.inference_mode():
            step.backward(job.loss)
        optimizer.step()
    return job.weights()


def imaginary_nan(job: Job) -> Any:
    """Only the imaginary part of a complex gradient is NaN."""
    model = job.prepare(nn.Linear(6, 1, dtype=torch.complex128))

    def loss_fn(batch: Any) -> torch.Tensor:
        loss = model(batch[0].to(torch.complex128)).abs().square().mean()
        return loss + _ImaginaryNan.apply(model.weight)

    return job.train(loss_fn)


class _ImaginaryNan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return torch.zeros((), dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        (weight,) = ctx.saved_tensors
        return torch.complex(torch.zeros_like(weight.real), torch.full_like(weight.imag, torch.nan))


def gradient_changed_on_one_rank(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps(24):
        step.backward(job.loss)
        if job.run.is_main:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def noise_of_each_rank(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    g = torch.Generator().manual_seed(job.rank)
    for step in job.steps(24):
        step.backward(job.loss)
        for p in model.parameters():
            p.grad += 0.01 * torch.randn(p.shape, generator=g, dtype=p.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def frozen_on_one_rank(job: Job) -> Any:
    model = job.prepare(job.network())
    model[0].requires_grad_(job.rank == 0)
    return job.train()


def other_dtype_on_one_rank(job: Job) -> Any:
    model = job.prepare(job.network())
    if job.rank == 1:
        model.float()
    return job.train(lambda batch: job.loss([part.to(model[0].weight.dtype) for part in batch]))


def other_dtype_on_one_rank_later(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = job.optimizer(momentum=0.0)
    for step in job.steps():
        if job.rank == 1 and step.index == 2:
            model.float()
        step.backward(lambda batch: job.loss([part.to(model[0].weight.dtype) for part in batch]))
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def replaced_on_one_rank(job: Job) -> Any:
    """One rank has a new head, of the same shape."""
    model = job.prepare(job.network())
    for step in job.steps(24):
        if job.rank == 1 and step.index == 2:
            model[4] = nn.Linear(8, 1).double()
        step.backward(job.loss)
        for p in model.parameters():
            p.data -= 0.05 * p.grad
        model.zero_grad()
    return job.weights()


def zeroed_on_one_rank(job: Job) -> Any:
    """One rank alone forgets to zero: its weights would move on."""
    job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        step.backward(job.loss)
        optimizer.step()
        if job.rank == 0:
            optimizer.zero_grad()
    return job.weights()


def wrapped_in_ddp_after_prepare(job: Job) -> Any:
    """DistributedDataParallel would average over ranks in each backward, and Evenload sum the averages."""
    model = job.prepare(job.network())
    wrapped = nn.parallel.DistributedDataParallel(model)
    return job.train(lambda batch: functional.mse_loss(wrapped(batch[0]), batch[1]))


def graph_of_an_earlier_call(job: Job) -> Any:
    """With several micro-batches only the last one's output is kept, and used for all."""
    return loss_fn_scripts.output_of_an_earlier_call(job)


def clipped_in_loss_fn(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return job.loss(batch)

    return job.train(loss_fn)


def stepped_in_loss_fn(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer()

    def loss_fn(batch: Any) -> torch.Tensor:
        optimizer.step()
        return job.loss(batch)

    for step in job.steps():
        step.backward(loss_fn)
        optimizer.zero_grad()
    return job.weights()


def other_learning_rate_on_one_rank(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer(lr=0.05 / (1 + job.rank))
    for step in job.steps(24):
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()
