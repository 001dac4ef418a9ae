"""Caught exceptions, gradients and optimizers in unusual and right uses: each function is a user's script."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tests.ranks.wrong_uses.gradient_jobs import Job


def plain(job: Job) -> Any:
    job.prepare(job.network())
    return job.train()


# exceptions that the script catches


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        raise ValueError("raised in backward")


def _caught(job: Job, ranks: tuple[int, ...], *, in_backward: bool, again: bool) -> Any:
    """Step 1 fails on these ranks; it is computed again, or left out."""
    model = job.prepare(job.network())
    optimizer = job.optimizer()

    def failing(batch: Any) -> torch.Tensor:
        x, y = batch
        if not in_backward:
            job.loss(batch)
            raise ValueError("raised in loss_fn")
        # The last layers' gradients are summed before the first layer's backward raises.
        return functional.mse_loss(model[1:](_Failing.apply(model[0](x))), y)

    for step in job.steps():
        if step.index == 1:
            if job.on_ranks:
                try:
                    step.backward(failing if job.rank in ranks else job.loss)
                except Exception:
                    assert all(p.grad is None for p in model.parameters()), "gradients of a failed backward are left"
                else:
                    raise AssertionError(f"rank {job.rank} was told of no error")
            if not again:
                continue
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def raised_in_loss_fn(job: Job) -> Any:
    return _caught(job, (0, 1), in_backward=False, again=True)


def raised_in_backward(job: Job) -> Any:
    return _caught(job, (0, 1), in_backward=True, again=True)


def raised_in_loss_fn_of_one_rank(job: Job) -> Any:
    return _caught(job, (1,), in_backward=False, again=True)


def raised_in_backward_of_one_rank(job: Job) -> Any:
    return _caught(job, (1,), in_backward=True, again=True)


def raised_in_backward_and_left_out(job: Job) -> Any:
    return _caught(job, (0, 1), in_backward=True, again=False)


# gradients between backward and step


def kept_gradient(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    kept: list[torch.Tensor] = []
    for step in job.steps():
        step.backward(job.loss)
        kept += [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return kept


def kept_views(job: Job) -> Any:
    """Parts of gradients, detached and sliced: they share memory with `.grad`, not the tensor object."""
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    kept: list[torch.Tensor] = []
    for step in job.steps():
        step.backward(job.loss)
        kept += [model[0].weight.grad[:3], model[2].weight.grad.detach()]
        optimizer.step()
        optimizer.zero_grad()
    return kept


def replaced_gradient(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        step.backward(job.loss)
        for p in model.parameters():
            p.grad = p.grad.sign()
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def scaled_gradient(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        step.backward(job.loss)
        for p in model.parameters():
            p.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return job.weights()


def removed_gradient(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        step.backward(job.loss)
        model[0].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def updated_by_hand(job: Job) -> Any:
    model = job.prepare(job.network())
    for step in job.steps():
        step.backward(job.loss)
        for p in model.parameters():
            p.data -= 0.05 * p.grad
        model.zero_grad()
    return job.weights()


def updated_by_new_data(job: Job) -> Any:
    model = job.prepare(job.network())
    for step in job.steps():
        step.backward(job.loss)
        for p in model.parameters():
            p.data = p.data - 0.05 * p.grad
            p.grad = None
    return job.weights()


def zeroed_before_the_step(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        step.backward(job.loss)
        if step.index % 2:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def no_backward_in_a_step(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        if step.index != 2:
            step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def stepped_twice(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        step.backward(job.loss)
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def optimizer_for_each_layer(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizers = [torch.optim.Adam(model[0].parameters(), 1e-2), job.optimizer([*model[2:].parameters()])]
    for step in job.steps():
        step.backward(job.loss)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return job.weights()


def optimizer_with_closure(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():

        def closure(step: Any = step) -> torch.Tensor:
            optimizer.zero_grad()
            return step.backward(job.loss)

        optimizer.step(closure)  # type: ignore[arg-type]
        optimizer.zero_grad()
    return job.weights()


def optimizer_hook_that_clips(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None)
    for step in job.steps():
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def new_optimizer_in_each_step(job: Job) -> Any:
    job.prepare(job.network())
    for step in job.steps():
        optimizer = job.optimizer()
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def two_backwards_of_a_step(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        step.backward(job.loss)
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()
