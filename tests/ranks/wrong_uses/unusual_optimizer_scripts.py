"""Unusual and right uses of gradients after the backward, of optimizers and of hooks: each function is a user's script."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.ranks.wrong_uses.gradient_jobs import Job


def _train(job: Job, update: Callable[[Any], object], *, clears: bool = True) -> list[torch.Tensor]:
    """Trains; `update` is called with the model when its gradients are there."""
    model = job.prepare(job.network())
    for step in job.steps():
        step.backward(job.loss)
        update(model)
        if clears:
            model.zero_grad()
    return job.weights()


# optimizers from outside of torch


class _ByData:
    """As scripts of 2017 do: through `.data`, and with gradients that stay as zeros."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        for p in self.parameters:
            if p.grad is not None:
                p.data.add_(p.grad.data, alpha=-0.05)

    def zero_grad(self) -> None:
        for p in self.parameters:
            if p.grad is not None:
                p.grad.data.zero_()


def optimizer_of_no_class_of_torch(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = _ByData(model.parameters())
    for step in job.steps():
        optimizer.zero_grad()
        step.backward(job.loss)
        optimizer.step()
        if step.index % 2:
            model.zero_grad()
    return job.weights()


class _WithoutInit(torch.optim.Optimizer):
    """A subclass that never calls `Optimizer.__init__`, so that torch's hooks of its step are not there."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.05)


def optimizer_without_init(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = _WithoutInit(model.parameters())
    for step in job.steps():
        step.backward(job.loss)
        optimizer.step()
        model.zero_grad()
    return job.weights()


class _Sam(torch.optim.Optimizer):
    """As published: an optimizer around another, whose step takes a closure."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        closure()
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [p.grad * (0.05 / norm) for p in parameters]
        torch._foreach_add_(parameters, moves)
        self.zero_grad()
        closure()
        torch._foreach_sub_(parameters, moves)
        self.base.step()
        self.zero_grad()


def sam_as_published(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = _Sam(model.parameters())
    for step in job.steps():
        optimizer.step(lambda step=step: step.backward(job.loss))
    return job.weights()


def schedule_free(job: Job) -> Any:
    """The weights are exchanged before and after each gradient."""
    model = job.prepare(job.network())
    averages, fast = ([p.detach().clone() for p in model.parameters()] for _ in range(2))
    for step in job.steps():
        with torch.no_grad():
            for p, x, z in zip(model.parameters(), averages, fast, strict=True):
                p.copy_(0.1 * z + 0.9 * x)
        step.backward(job.loss)
        for p, x, z in zip(model.parameters(), averages, fast, strict=True):
            z.sub_(0.05 * p.grad)
            x.lerp_(z, 1 / (step.index + 1))
        model.zero_grad()
    return [*averages, *fast]


def several_kinds_of_torch(job: Job) -> Any:
    model = job.prepare(job.network())
    weights = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizers = [
        torch.optim.Muon(weights[:2], lr=0.01),
        torch.optim.Adadelta(weights[2:], foreach=True),
        torch.optim.RAdam(others[:2], foreach=False),
        torch.optim.Rprop(others[2:], lr=1e-3),
    ]
    for step in job.steps():
        step.backward(job.loss)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return job.weights()


def step_by_the_size_of_the_loss(job: Job) -> Any:
    """Polyak's step."""
    model = job.prepare(job.network())
    for step in job.steps():
        loss = step.backward(job.loss)
        square = sum(p.grad.square().sum() for p in model.parameters())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * float(loss) / square * p.grad
        model.zero_grad()
    return job.weights()


def weights_put_back(job: Job) -> Any:
    """Reptile: two steps by hand, the gradient there, and a step with it from where it began."""
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            step.backward(job.loss)
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            model.zero_grad()
        step.backward(job.loss)
        with torch.no_grad():
            for p, value in zip(model.parameters(), before, strict=True):
                p.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


# weights beside the model's, to which the script copies gradients


def master_weights(job: Job) -> Any:
    """As apex's FP16_Optimizer does."""
    model = job.prepare(job.network())
    masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = job.optimizer(masters)
    for step in job.steps():
        step.backward(job.loss)
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    return job.weights()


def parameters_as_views_of_a_vector(job: Job) -> Any:
    model = job.prepare(job.network())
    flat = torch.nn.Parameter(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.nn.utils.vector_to_parameters(flat.data, model.parameters())
    optimizer = job.optimizer([flat])
    for step in job.steps():
        step.backward(job.loss)
        flat.grad = torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
    return job.weights()


# the memory of gradients


def views_of_a_vector_of_the_scripts_own(job: Job) -> Any:
    model = job.prepare(job.network())
    flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p)
    optimizer = job.optimizer()
    for step in job.steps():
        flat.zero_()
        step.backward(job.loss)
        flat.mul_(0.3 / flat.norm())
        optimizer.step()
    return job.weights()


def gradients_that_require_gradients(job: Job) -> Any:
    """As for a learning rate that is learned."""
    model = job.prepare(job.network())
    optimizer, slopes = job.optimizer(), list[torch.Tensor]()
    for step in job.steps():
        step.backward(job.loss)
        grads = [p.grad.requires_grad_() for p in model.parameters()]
        slopes += torch.autograd.grad(sum(g.square().sum() for g in grads), grads)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step.index % 2 == 0)
    return [*job.weights(), *slopes]


def filtered_gradients(job: Job) -> Any:
    """Grokfast: the first gradients are kept as they are, and `.grad.data` is replaced."""
    kept: dict[str, torch.Tensor] = {}
    optimizers: list[torch.optim.Optimizer] = []

    def update(model: Any) -> None:
        kept.update({name: p.grad.data.detach() for name, p in model.named_parameters() if name not in kept})
        for name, p in model.named_parameters():
            kept[name] = kept[name] * 0.9 + p.grad.data.detach() * 0.1
            p.grad.data = p.grad.data + 2 * kept[name]
        optimizers[:] = optimizers or [job.optimizer()]
        optimizers[0].step()

    return _train(job, update)


def accumulated_in_memory_of_its_own(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for step in job.steps():
        step.backward(job.loss)
        torch._foreach_add_(sums, [p.grad / 2 for p in model.parameters()])
        model.zero_grad()
        if step.index % 2:
            for p, total in zip(model.parameters(), sums, strict=True):
                p.grad = total.clone()
                total.zero_()
            optimizer.step()
            optimizer.zero_grad()
    return job.weights()


def accumulated_by_moving_aside(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer, aside = job.optimizer(), list[torch.Tensor]()
    for step in job.steps():
        step.backward(job.loss)
        if step.index % 2 == 0:
            aside = [p.grad for p in model.parameters()]
            model.zero_grad()
            continue
        for p, grad in zip(model.parameters(), aside, strict=True):
            p.grad.add_(grad)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def accumulated_over_steps_of_two_models(job: Job) -> Any:
    """With one model it is refused (`accumulated_by_hand`); of several, each may have a zero_grad of its own."""
    one, other = job.prepare(job.network(), job.network())
    optimizer = job.optimizer([*one.parameters(), *other.parameters()])
    for step in job.steps():
        step.backward(lambda batch: (one(batch[0]) - other(batch[0] + 1) - batch[1]).square().mean() / 2)
        if step.index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return job.weights()


def first_gradient_thrown_away(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        step.backward(lambda batch: 5 * job.loss(batch))
        optimizer.zero_grad(set_to_none=step.index % 2 == 0)
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


# hooks


def hook_added_in_each_forward(job: Job) -> Any:
    """A mask of the gradient."""
    model = job.prepare(job.network())
    mask = torch.arange(64, dtype=torch.float64).view(8, 8) % 2

    def loss_fn(batch: Any) -> torch.Tensor:
        model[2].weight.register_hook(lambda slope: (slope * mask).clamp(-0.01, 0.01))
        return job.loss(batch)

    return job.train(loss_fn)


def hook_that_removes_itself(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer, handles = job.optimizer(), list[Any]()

    def hook(slope: torch.Tensor) -> torch.Tensor:
        handles.pop().remove()
        return slope * 3

    for step in job.steps():
        handles.append(model[2].weight.register_hook(hook))
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def weights_changed_in_loss_fn(job: Job) -> Any:
    """A decay in each call: of one micro-batch it is right, however often a look at loss_fn calls it."""
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
        return job.loss(batch)

    return job.train(loss_fn)
