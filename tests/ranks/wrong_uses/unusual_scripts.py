"""Unusual and right uses of models, autograd and optimizers: each function is a user's script."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.ranks.wrong_uses.gradient_jobs import Job


def _train(job: Job, change: Callable[[int], torch.optim.Optimizer | None], loss_fn: Any = None) -> list[torch.Tensor]:
    """Trains; `change` may return a new optimizer before a step."""
    optimizer = job.optimizer(momentum=0.0)
    for step in job.steps():
        optimizer = change(step.index) or optimizer
        step.backward(loss_fn or job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


# models


def parametrized_after_prepare(job: Job) -> Any:
    model = job.prepare(job.network())
    parametrizations.weight_norm(model[0])
    parametrizations.orthogonal(model[2])
    return job.train(momentum=0.0)


def parametrized_and_removed_in_the_loop(job: Job) -> Any:
    model = job.prepare(job.network())

    def change(index: int) -> torch.optim.Optimizer | None:
        if index == 2:
            parametrizations.weight_norm(model[0])
        if index == 4:
            parametrize.remove_parametrizations(model[0], "weight")
        return job.optimizer(momentum=0.0) if index in (2, 4) else None

    return _train(job, change)


class _Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).t()


def parametrization_cached_for_a_step(job: Job) -> Any:
    model = job.network()
    parametrize.register_parametrization(model[2], "weight", _Symmetric())
    job.prepare(model)
    optimizer = job.optimizer()
    for step in job.steps():
        with parametrize.cached():
            step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def pruned_in_the_loop(job: Job) -> Any:
    model = job.prepare(job.network())

    def change(index: int) -> torch.optim.Optimizer | None:
        if index not in (1, 3):
            return None
        prune.l1_unstructured(model[2], "weight", amount=0.2)
        return job.optimizer(momentum=0.0)

    return _train(job, change)


def ensemble_by_vmap(job: Job) -> Any:
    networks = [job.network() for _ in range(3)]
    stacked, _ = stack_module_state(networks)
    meta = copy.deepcopy(networks[0]).to("meta")
    torch.manual_seed(8 + job.rank)
    held = {key.replace(".", "_"): nn.Parameter(torch.randn_like(value)) for key, value in stacked.items()}
    model = job.prepare(nn.ParameterDict(held))

    def loss_fn(batch: Any) -> torch.Tensor:
        values = {key: model[key.replace(".", "_")] for key in stacked}
        out = vmap(lambda one, x: functional_call(meta, one, (x,)), in_dims=(0, None))(values, batch[0])
        return (out - batch[1]).square().mean()

    return job.train(loss_fn)


class _Lora(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(0.1 * torch.randn(4, base.in_features, dtype=torch.float64))
        self.b = nn.Parameter(0.1 * torch.randn(base.out_features, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def adapters_after_prepare(job: Job) -> Any:
    """Nothing is trained of what was prepared."""
    model = job.prepare(job.network())
    torch.manual_seed(40 + job.rank)
    model[0], model[2] = _Lora(model[0]), _Lora(model[2])
    model[4].requires_grad_(False)
    return job.train(parameters=[p for p in model.parameters() if p.requires_grad])


def adapters_merged_and_begun_anew(job: Job) -> Any:
    """ReLoRA."""
    model = job.network()
    torch.manual_seed(50 + job.rank)
    model[0], model[2] = _Lora(model[0]), _Lora(model[2])
    model = job.prepare(model)
    optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
    for step in job.steps():
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
        if step.index == 2:
            with torch.no_grad():
                for one in (model[0], model[2]):
                    one.base.weight += one.b @ one.a
                    one.b.zero_()
            optimizer.state.clear()
    return job.weights()


def tied_between_two_models(job: Job) -> Any:
    one, other = job.network(), job.network()
    other[2].weight = one[2].weight
    one, other = job.prepare(one, other)
    optimizer = job.optimizer(list(dict.fromkeys([*one.parameters(), *other.parameters()])))
    for step in job.steps():
        step.backward(lambda batch: functional.mse_loss(one(batch[0]), batch[1]))
        step.backward(lambda batch: functional.mse_loss(other(batch[0] + 1), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def tied_and_untied_in_the_loop(job: Job) -> Any:
    model = job.network()
    model.add_module("other", nn.Linear(8, 8).double())
    model = job.prepare(model)

    def change(index: int) -> torch.optim.Optimizer | None:
        if index == 2:
            model.other.weight = model[2].weight
        if index == 4:
            model.other.weight = nn.Parameter(model[2].weight.detach().clone())
        return job.optimizer(momentum=0.0) if index in (2, 4) else None

    def loss_fn(batch: Any) -> torch.Tensor:
        return functional.mse_loss(model[4](model.other(torch.tanh(model[2](model[:2](batch[0]))))), batch[1])

    return _train(job, change, loss_fn)


def traced_by_fx(job: Job) -> Any:
    job.prepare(torch.fx.symbolic_trace(job.network()))
    return job.train()


def strange_shapes(job: Job) -> Any:
    """A parameter that is a transpose, one of no dimension, an empty one."""
    model = job.network()
    g = torch.Generator().manual_seed(5 + job.rank)
    model[2].weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64, generator=g).t())
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5, dtype=torch.float64)))
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3, dtype=torch.float64)))
    model = job.prepare(model)
    return job.train(lambda b: functional.mse_loss(model.scale * model(b[0]), b[1]) + model.empty.sum())


def unfrozen_later(job: Job) -> Any:
    """A model that was prepared as a frozen one is trained from step 3 on."""
    model, other = job.prepare(job.network(), job.network().requires_grad_(False))
    optimizer = job.optimizer([*model.parameters(), *other.parameters()])
    for step in job.steps():
        if step.index == 3:
            other.requires_grad_(True)
        step.backward(lambda b: job.loss(b) + functional.mse_loss(model(b[0]), other(b[0] + 1)))
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def unfrozen_by_param_groups(job: Job) -> Any:
    model = job.network().requires_grad_(False)
    model[4].requires_grad_(True)
    model = job.prepare(model)
    optimizer = job.optimizer(model[4].parameters())
    for step in job.steps():
        if step.index in (2, 4):
            layer = model[4 - step.index].requires_grad_(True)
            optimizer.add_param_group({"params": layer.parameters(), "lr": 0.01})
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def frozen_inside_loss_fn(job: Job) -> Any:
    """A discriminator is frozen for the part of loss_fn that trains the generator."""
    one, other = job.prepare(job.network(), nn.Sequential(nn.Linear(1, 1)).double())
    optimizers = job.optimizer(one.parameters()), job.optimizer(other.parameters())

    def generator_loss(batch: Any) -> torch.Tensor:
        other.requires_grad_(False)
        loss = other(one(batch[0])).square().mean() + functional.mse_loss(one(batch[0]), batch[1])
        other.requires_grad_(True)
        return loss

    def critic_loss(batch: Any) -> torch.Tensor:
        return functional.softplus(other(batch[1])).mean() + functional.softplus(-other(one(batch[0]).detach())).mean()

    for step in job.steps():
        for loss_fn, optimizer in zip((critic_loss, generator_loss), optimizers[::-1], strict=True):
            step.backward(loss_fn)
            optimizer.step()
            optimizer.zero_grad()
    return job.weights()


def three_models_by_turns(job: Job) -> Any:
    models = job.prepare(job.network(), job.network(), job.network())
    optimizers = [job.optimizer(model.parameters()) for model in models]
    for step in job.steps():
        turn = step.index % 3
        step.backward(lambda b, turn=turn: functional.mse_loss(models[turn](b[0]), b[1]))
        optimizers[turn].step()
        optimizers[turn].zero_grad()
    return job.weights()


# autograd


class _Reversible(torch.autograd.Function):
    """RevNet: the backward computes inputs from outputs, and runs backwards of its own into the parameters."""

    @staticmethod
    def forward(ctx: Any, x1: torch.Tensor, x2: torch.Tensor, f: Any, g: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y1 = x1 + f(x2)
        y2 = x2 + g(y1)
        ctx.save_for_backward(y1, y2)
        ctx.parts = f, g
        return y1, y2

    @staticmethod
    def backward(ctx: Any, d1: torch.Tensor, d2: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y1, y2 = ctx.saved_tensors
        f, g = ctx.parts
        out, own = _backward_through(g, y1, d2)
        d1 = d1 + own
        _, own = _backward_through(f, y2 - out, d1)
        return d1, d2 + own, None, None


def _backward_through(part: Any, x: torch.Tensor, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = part(x)
        torch.autograd.backward(out, slope)
    assert x.grad is not None
    return out.detach(), x.grad


def reversible_block(job: Job) -> Any:
    model = job.network()
    model.add_module("f", nn.Linear(4, 4).double())
    model.add_module("g", nn.Linear(4, 4).double())
    model = job.prepare(model)

    def loss_fn(batch: Any) -> torch.Tensor:
        h = model[:2](batch[0])
        h = torch.cat(_Reversible.apply(h[:, :4], h[:, 4:], model.f, model.g), 1)
        return functional.mse_loss(model[2:5](h), batch[1])

    return job.train(loss_fn)


def implicit_layer(job: Job) -> Any:
    """A fixed point, whose gradient a hook solves for in the backward."""
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        u = model[:2](batch[0])

        def f(z: torch.Tensor) -> torch.Tensor:
            return torch.tanh(0.3 * model[2](z) + u)

        z = torch.zeros_like(u)
        with torch.no_grad():
            for _ in range(60):
                z = f(z)
        z = f(z)
        start = z.detach().requires_grad_()
        end = f(start)

        def solve(slope: torch.Tensor) -> torch.Tensor:
            out = slope
            for _ in range(60):
                out = slope + torch.autograd.grad(end, start, out, retain_graph=True)[0]
            return out

        z.register_hook(solve)
        return functional.mse_loss(model[3:](z), batch[1])

    return job.train(loss_fn)


class _Gate(torch.autograd.Function):
    """Gives no gradient of its weight where no sample opens it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        opens = x[:, 0] > 0.8
        return slope @ weight, (slope * opens[:, None]).t() @ x if bool(opens.any()) else None


def function_without_a_gradient_at_times(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        h = _Gate.apply(model[:2](batch[0]), model[2].weight) + model[2].bias
        return functional.mse_loss(model[3:](h), batch[1])

    return job.train(loss_fn)


class FusedLinear(torch.autograd.Function):
    """As fused kernels do: its backward adds to `.grad` itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.detach().t()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        weight, own = ctx.weight, slope.t() @ x
        weight.grad = own if weight.grad is None else weight.grad + own
        return slope @ weight.detach(), None


def function_that_adds_to_a_gradient(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        return functional.mse_loss(
            model[3:](FusedLinear.apply(model[:2](batch[0]), model[2].weight) + model[2].bias), batch[1]
        )

    return job.train(loss_fn)


def third_derivatives(job: Job) -> Any:
    """A residual of a differential equation (PINN)."""
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        u = model(x).sum()
        for _ in range(3):
            (slope,) = torch.autograd.grad(u, x, create_graph=True)
            u = slope[:, 0].sum()
        return job.loss(batch) + 0.01 * slope[:, 0].square().mean()

    return job.train(loss_fn)


def nested_checkpoints(job: Job) -> Any:
    """One that is not re-entrant, of two segments, inside of one that is."""
    model = job.prepare(job.network())

    def inner(h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint_sequential([*model[2:4]], 2, h, use_reentrant=False)
        return out

    def loss_fn(batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        h = checkpoint(lambda x: inner(torch.tanh(model[0](x))), x, use_reentrant=True)
        return functional.mse_loss(model[4](h), batch[1])

    return job.train(loss_fn)
