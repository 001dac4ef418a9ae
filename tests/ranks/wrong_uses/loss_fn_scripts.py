"""A loss_fn and a model in unusual and right uses: each function is a user's script."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.ranks.wrong_uses.gradient_jobs import Job

# inside of loss_fn


def item_in_loss_fn(job: Job) -> Any:
    job.prepare(job.network())
    seen = []

    def loss_fn(batch: Any) -> torch.Tensor:
        loss = job.loss(batch)
        seen.append(loss.item())
        return loss

    return job.train(loss_fn)


def under_no_grad(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        with torch.set_grad_enabled(not job.on_ranks):
            step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def zero_grad_in_loss_fn(job: Job, *, set_to_none: bool = True) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        model.zero_grad(set_to_none=set_to_none)
        return job.loss(batch)

    return job.train(loss_fn)


def zero_grad_to_zeros_in_loss_fn(job: Job) -> Any:
    return zero_grad_in_loss_fn(job, set_to_none=False)


def slope_of_the_inputs(job: Job) -> Any:
    """Adversarial training: the gradient of the inputs makes further inputs."""
    job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        each = functional.mse_loss(job.model(x), y, reduction="none").sum()
        (slope,) = torch.autograd.grad(each, x)
        return job.loss((x.detach() + 0.1 * slope.sign(), y))

    return job.train(loss_fn)


def backward_to_the_inputs_alone(job: Job) -> Any:
    job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        functional.mse_loss(job.model(x), y, reduction="none").sum().backward(inputs=[x])
        return job.loss((x.detach() + 0.1 * x.grad.sign(), y))

    return job.train(loss_fn)


def module_hooks(job: Job) -> Any:
    """Gradient reversal, and a clamp of each sample's gradient."""
    model = job.prepare(job.network())
    model[1].register_full_backward_hook(lambda module, into, out: tuple(-part for part in into))
    model[3].register_full_backward_hook(lambda module, into, out: tuple(part.clamp(-2e-3, 2e-3) for part in into))
    return job.train()


def hook_that_clamps(job: Job) -> Any:
    """A hook of a parameter runs on the sum."""
    model = job.prepare(job.network())
    for p in model.parameters():
        p.register_hook(lambda slope: slope.clamp(-1e-2, 1e-2))
    return job.train()


def hook_that_clamps_of_before(job: Job) -> Any:
    model = job.network()
    model[0].weight.register_hook(lambda slope: slope / slope.norm())
    job.prepare(model)
    return job.train()


def tensor_hook_and_retained_gradient(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        h = model[:2](x)
        h.register_hook(lambda slope: slope.clamp(-2e-3, 2e-3))
        h.retain_grad()
        return functional.mse_loss(model[2:](h), y)

    return job.train(loss_fn)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * slope


def custom_function(job: Job) -> Any:
    job.prepare(job.network())
    return job.train(lambda batch: _Square.apply(job.model(batch[0]) - batch[1]).mean())


def functional_calls(job: Job) -> Any:
    """The network with its own parameters, and with weights a step further along its gradient."""
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        named = dict(model.named_parameters())
        first = functional_call(model, named, (x,))
        slopes = torch.autograd.grad(
            sum(p.square().sum() for p in named.values()), list(named.values()), create_graph=True
        )
        moved = {name: p - 0.1 * slope for (name, p), slope in zip(named.items(), slopes, strict=True)}
        return functional.mse_loss(first, y) + functional.mse_loss(functional_call(model, moved, (x,)), y)

    return job.train(loss_fn)


def per_sample_adaptation(job: Job) -> Any:
    """Meta-learning: each sample adapts the weights by a gradient step of its own, under vmap."""
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        named = dict(model.named_parameters())

        def inner(values: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.mse_loss(functional_call(model, values, (x,)), y)

        def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            slopes = grad(inner)(named, x, y)
            return inner({name: p - 0.1 * slopes[name] for name, p in named.items()}, x, y)

        return vmap(outer)(*batch).mean()

    return job.train(loss_fn)


def forward_derivative(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        out, slope = jvp(model, (x,), (torch.ones_like(x),))
        return functional.mse_loss(out, y) + 0.1 * slope.square().mean()

    return job.train(loss_fn)


def autocast_in_loss_fn(job: Job) -> Any:
    job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return job.loss(batch)

    return job.train(loss_fn)


def saved_tensors_elsewhere(job: Job) -> Any:
    job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(True, check_nan=False):
            return job.loss(batch)

    return job.train(loss_fn)


def spectral_norms(job: Job) -> Any:
    """Power iteration changes buffers in each forward."""
    model = job.network()
    model[0] = parametrizations.spectral_norm(model[0])
    model[2] = torch.nn.utils.spectral_norm(model[2])
    job.prepare(model)
    return job.train()


def weight_norms(job: Job) -> Any:
    model = job.network()
    parametrizations.weight_norm(model[0])
    parametrizations.orthogonal(model[2])
    job.prepare(model)
    return job.train(momentum=0.0)


def clamped_in_loss_fn(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)
        return job.loss(batch)

    return job.train(loss_fn)


# the model between steps


def tied_after_prepare(job: Job) -> Any:
    model = job.prepare(nn.Sequential(job.network(), job.network()[0]).double())
    model[1].weight = model[0][0].weight
    return job.train(
        lambda batch: functional.mse_loss(model[0](batch[0]), batch[1]) + model[1](batch[0]).square().mean()
    )


def frozen_between_steps(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        model[0].requires_grad_(step.index % 2 == 0)
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def never_used(job: Job) -> Any:
    model = job.network()
    model.add_module("spare", nn.Linear(3, 3).double())
    job.prepare(model)
    job.train(lambda batch: functional.mse_loss(model[:5](batch[0]), batch[1]))
    return [*job.weights(), torch.tensor([float(p.grad is None) for p in model.parameters()])]


def added_after_prepare(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        if step.index == 2:
            torch.manual_seed(70 + job.rank)
            model.add_module("more", nn.Linear(1, 1).double())
            optimizer.add_param_group({"params": model.more.parameters()})
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def widened_after_prepare(job: Job) -> Any:
    """Parameters of another dtype than at prepare."""
    model = job.prepare(job.network().float())
    model.double()
    return job.train()


def copied_in_the_loop(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    best: list[torch.Tensor] = []
    for step in job.steps():
        step.backward(job.loss)
        best = [*copy.deepcopy(model).parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if step.index == 2:
            state = copy.deepcopy(model.state_dict())
        if step.index == 4:
            model.load_state_dict(state)
    return [*job.weights(), *best]


def saved_and_pickled(job: Job) -> Any:
    """A file of the whole model names no class of Evenload's, so it loads where Evenload is not installed."""
    model = job.prepare(job.network(nn.BatchNorm1d(8)))
    values = job.train()
    file = io.BytesIO()
    torch.save(model, file)
    texts = file.getvalue(), pickle.dumps(model)
    loaded = pickle.loads(texts[1])
    return [*values, *loaded.parameters(), torch.tensor([float(b"evenload" in text) for text in texts])]


def frozen_teacher(job: Job) -> Any:
    model = job.network(nn.BatchNorm1d(8))
    teacher = copy.deepcopy(model).requires_grad_(False)
    model, teacher = job.prepare(model, teacher)

    def loss_fn(batch: Any) -> torch.Tensor:
        return job.loss(batch) + functional.mse_loss(model(batch[0]), teacher(batch[0] + 0.5))

    return job.train(loss_fn)


def gradients_outside_of_a_step(job: Job) -> Any:
    """torch.autograd.grad on a batch of the user's own: no `.grad` is touched."""
    model = job.prepare(job.network())
    values = job.train()
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    slopes = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    return [*values, *slopes]


def backward_of_a_part_prepared_twice(job: Job) -> Any:
    model = job.network()
    job.prepare(model, model[2])
    return job.train()


def scaler_that_is_off(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = job.optimizer()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in job.steps():
        step.backward(lambda batch: scaler.scale(job.loss(batch)))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return job.weights()


def output_of_an_earlier_call(job: Job) -> Any:
    """The second backward of a step goes through what the first one's loss_fn computed."""
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    kept: dict[str, torch.Tensor] = {}

    def first(batch: Any) -> torch.Tensor:
        kept["out"] = model[:2](batch[0])
        return functional.mse_loss(model[2:](kept["out"].detach()), batch[1])

    def second(batch: Any) -> torch.Tensor:
        return functional.mse_loss(model[2:](kept["out"]), 1 - batch[1])

    for step in job.steps():
        step.backward(first)
        step.backward(second)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def averaged_by_habit(job: Job) -> Any:
    """The script averages the gradients over ranks, which are equal already."""
    model = job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        step.backward(job.loss)
        if job.on_ranks:
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad)
                p.grad /= torch.distributed.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def copied_in_loss_fn(job: Job) -> Any:
    """A frozen copy of the present weights, made in each call."""
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        frozen = copy.deepcopy(model).requires_grad_(False)
        return job.loss(batch) + functional.mse_loss(model(batch[0] + 1), frozen(batch[0]))

    return job.train(loss_fn)


def inference_mode_for_a_part(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        with torch.inference_mode():
            target = model(batch[0]).clone()
        return job.loss(batch) + functional.l1_loss(model(batch[0] + 1), target.clone())

    return job.train(loss_fn)
