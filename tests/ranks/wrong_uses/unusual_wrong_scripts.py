"""Uses that would give wrong weights: each is refused, or an event names it in the first steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.ranks.wrong_uses.gradient_jobs import Job
from tests.ranks.wrong_uses.unusual_scripts import FusedLinear

# gradients inside of step.backward


def _setting_a_gradient(job: Job, name: str) -> Any:
    model = job.prepare(job.network())
    param = model.get_parameter(name)

    def loss_fn(batch: Any) -> torch.Tensor:
        loss = job.loss(batch)
        (param.grad,) = torch.autograd.grad(loss, [param], retain_graph=True)
        return loss

    return job.train(loss_fn)


def large_gradient_set_in_loss_fn(job: Job) -> Any:
    return _setting_a_gradient(job, "2.weight")


def small_gradient_set_in_loss_fn(job: Job) -> Any:
    return _setting_a_gradient(job, "2.bias")


def noise_added_in_loss_fn(job: Job) -> Any:
    """To gradients that are there: as zeros of the last step, or where they accumulate."""
    model = job.prepare(job.network())
    optimizer = job.optimizer()

    def loss_fn(batch: Any) -> torch.Tensor:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(0.01)
        return job.loss(batch)

    for step in job.steps():
        step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return job.weights()


class _Fused(FusedLinear):
    """The same, but the gradient of the weight goes to memory of its own."""

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad += slope.t() @ x
        return slope @ ctx.weight.detach(), None


def gradient_in_memory_of_a_function(job: Job) -> Any:
    model = job.prepare(job.network())
    weight = model[2].weight
    weight.main_grad = torch.zeros_like(weight)
    optimizer = job.optimizer()

    def loss_fn(batch: Any) -> torch.Tensor:
        return functional.mse_loss(model[3:](_Fused.apply(model[:2](batch[0]), weight) + model[2].bias), batch[1])

    for step in job.steps():
        step.backward(loss_fn)
        weight.grad = weight.main_grad.clone()
        weight.main_grad.zero_()
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


# hooks of the graph, which a parameter does not show


def _with_hooks_of_nodes(job: Job, add: Callable[[Any, torch.Tensor], object]) -> Any:
    model = job.prepare(job.network())
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    for node, param in zip(nodes, model.parameters(), strict=True):
        add(node, param)
    return job.train()


def clamp_before_accumulation(job: Job) -> Any:
    return _with_hooks_of_nodes(
        job, lambda node, _: node.register_prehook(lambda slopes: tuple(slope.clamp(-1e-2, 1e-2) for slope in slopes))
    )


def norms_after_accumulation(job: Job) -> Any:
    norms: list[torch.Tensor] = []
    values = _with_hooks_of_nodes(
        job,
        lambda node, param: node.register_hook(
            lambda *_: norms.append(param.grad.norm()) if param.grad is not None else None
        ),
    )
    return [*values, *norms]


def hook_of_several_gradients(job: Job) -> Any:
    model = job.prepare(job.network())
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda slopes: None)
    return job.train()


# models


def embedding_that_scales_its_rows(job: Job) -> Any:
    model = nn.Sequential(nn.Embedding(50, 4, max_norm=0.5), nn.Flatten(), nn.Linear(24, 1)).double()
    model = job.prepare(model)
    return job.train(lambda b: functional.mse_loss(model((b[0].tanh() * 20 + 25).long()), b[1]))


def running_statistics_of_instances(job: Job) -> Any:
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    job.prepare(nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), norm, nn.Flatten(), nn.Linear(8, 1)).double())
    return job.train()


def initialised_after_prepare(job: Job) -> Any:
    model = job.prepare(job.network())
    torch.manual_seed(80 + job.rank)
    model[2].reset_parameters()
    return job.train()


def sharded_after_prepare(job: Job) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = job.prepare(job.network())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return job.train()


def sharded_before_prepare(job: Job) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = job.network()
    job.prepare(fully_shard(model, mesh=init_device_mesh("cpu", (2,))))
    return job.train()


def head_trained_beside_copies(job: Job) -> Any:
    """The script fills the gradients of copies itself, but a head receives its own, from this rank's samples."""
    model = job.prepare(job.network())
    torch.manual_seed(4)
    head = nn.Linear(1, 1).double()
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = job.optimizer([*copies, *head.parameters()])

    def with_head(batch: Any) -> torch.Tensor:
        return job.loss(batch) + head(model(batch[0])).square().mean()

    for step in job.steps():
        step.backward(with_head if step.index > 3 else job.loss)
        for copied, p in zip(copies, model.parameters(), strict=True):
            copied.grad = p.grad
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
    return job.weights()


def head_trained_in_the_first_of_two_calls(job: Job) -> Any:
    """The last backward of a step gives it no gradient."""
    model = job.prepare(job.network())
    torch.manual_seed(4)
    head = nn.Linear(1, 1).double()
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = job.optimizer([*copies, *head.parameters()])
    for step in job.steps():
        step.backward(lambda batch: job.loss(batch) + head(model(batch[0])).square().mean())
        step.backward(job.loss)
        for copied, p in zip(copies, model.parameters(), strict=True):
            copied.grad = p.grad
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
    return job.weights()


# statistics of this rank's samples


def _preconditioned(job: Job, precondition: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """Module hooks keep what goes in, and the gradient of what comes out; the gradient is changed by them."""
    model = job.prepare(job.network())
    kept: dict[Any, list[torch.Tensor]] = {}
    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda module, into, out: kept.update({module: [into[0].detach()]}))
        layer.register_full_backward_hook(lambda module, into, out: kept[module].append(out[0].detach()))
    optimizer = job.optimizer()
    for step in job.steps():
        step.backward(job.loss)
        for layer in (model[0], model[2]):
            layer.weight.grad = precondition(layer.weight.grad, *kept[layer])
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def kronecker_factors(job: Job) -> Any:
    """K-FAC."""

    def precondition(grad: torch.Tensor, x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        a, g = (part.t() @ part / len(part) + torch.eye(part.shape[1], dtype=part.dtype) for part in (x, slope))
        return torch.linalg.inv(g) @ grad @ torch.linalg.inv(a)

    return _preconditioned(job, precondition)


def gradients_of_each_sample(job: Job) -> Any:
    """DP-SGD: each sample's gradient is clipped."""

    def precondition(grad: torch.Tensor, x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        each = torch.einsum("no,ni->noi", slope * len(slope), x)
        return (each * (0.05 / each.flatten(1).norm(dim=1)).clamp(max=1.0)[:, None, None]).mean(0)

    return _preconditioned(job, precondition)


def second_derivative_of_the_gradient(job: Job) -> Any:
    """AdaHessian differentiates `.grad`, which has no graph."""
    model = job.prepare(job.network())
    for step in job.steps():
        step.backward(job.loss)
        torch.autograd.grad([p.grad.sum() for p in model.parameters()], list(model.parameters()))
    return job.weights()


# a loss that is no mean over samples: named by an event


class _OwnGradient(torch.autograd.Function):
    """As bindings of old CTC losses: backward gives what forward computed, whatever comes from above."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(2 * (out - y) / out.numel())
        return (out - y).square().mean()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


def function_that_ignores_its_slope(job: Job) -> Any:
    model = job.prepare(job.network())
    return job.train(lambda batch: _OwnGradient.apply(model(batch[0]), batch[1]))


def gradient_scaled_in_the_backward(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        h = model[:2](batch[0])
        h.register_hook(lambda slope: slope / slope.norm())
        return functional.mse_loss(model[2:](h), batch[1])

    return job.train(loss_fn)


def batch_norm_by_a_function(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        return functional.mse_loss(
            model[2:](functional.batch_norm(model[:2](batch[0]), None, None, training=True)), batch[1]
        )

    return job.train(loss_fn)


def flooding(job: Job) -> Any:
    job.prepare(job.network())
    return job.train(lambda batch: (job.loss(batch) - 0.5).abs() + 0.5)


def gradient_by_frequency(job: Job) -> Any:
    """The embedding counts how often the micro-batch uses a row."""
    model = nn.Sequential(nn.Embedding(20, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(24, 1)).double()
    model = job.prepare(model)
    return job.train(lambda b: functional.mse_loss(model((b[0].tanh() * 8 + 10).long()), b[1]))


def halves_of_the_batch(job: Job) -> Any:
    """Half of each micro-batch is not half of the batch."""
    job.prepare(job.network())
    optimizer = job.optimizer()
    for step in job.steps():
        step.backward(lambda batch: job.loss([part[: len(part) // 2] for part in batch]) / 2)
        step.backward(lambda batch: job.loss([part[len(part) // 2 :] for part in batch]) / 2)
        optimizer.step()
        optimizer.zero_grad()
    return job.weights()


def weight_that_depends_on_the_model(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights = model(batch[0]).abs() + 0.1
        return (weights * (model(batch[0]) - batch[1]).square()).sum() / weights.sum(), weights.sum()

    return job.train(loss_fn)
