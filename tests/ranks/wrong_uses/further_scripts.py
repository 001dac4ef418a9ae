"""More unusual and right uses of gradients, hooks, Functions, normalisations and optimizers: each is a user's script."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.ranks.wrong_uses.gradient_jobs import Job

# gradients between the backward and the step


def scaled_by_hand(job: Job) -> Any:
    """Loss scaling without a scaler."""

    def update(optimizer: Any, _: Any) -> None:
        for p in job.model.parameters():
            p.grad.div_(1024)
        optimizer.step()

    return job.train_by(update, lambda batch: job.loss(batch) * 1024)


def adaptive_clipping(job: Job) -> Any:
    """Unit by unit, as NFNets do."""

    def update(optimizer: Any, _: Any) -> None:
        for p in job.model.parameters():
            limit = 0.05 * p.detach().norm(dim=-1, keepdim=True).clamp(min=1e-3)
            norm = p.grad.norm(dim=-1, keepdim=True).clamp(min=1e-6)
            p.grad = torch.where(norm > limit, p.grad * (limit / norm), p.grad)
        optimizer.step()

    return job.train_by(update)


def clipped_by_a_norm_of_its_own(job: Job) -> Any:
    def update(optimizer: Any, _: Any) -> None:
        grads = [p.grad for p in job.model.parameters()]
        norm = nn.utils.get_total_norm(grads, norm_type=1.0)
        nn.utils.clip_grads_with_norm_(job.model.parameters(), 0.5, norm)
        optimizer.step()

    return job.train_by(update)


def gradients_dropped_by_turns(job: Job) -> Any:
    def update(optimizer: Any, step: Any) -> None:
        for index, p in enumerate(job.model.parameters()):
            if (index + step.index) % 3 == 0:
                p.grad = None
        optimizer.step()

    return job.train_by(update)


def noise_of_a_shared_seed(job: Job) -> Any:
    def update(optimizer: Any, step: Any) -> None:
        generator = torch.Generator().manual_seed(step.index)
        for p in job.model.parameters():
            p.grad += 0.01 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()

    return job.train_by(update)


def signs_and_centred_gradients(job: Job) -> Any:
    def update(optimizer: Any, step: Any) -> None:
        for p in job.model.parameters():
            if p.dim() > 1:
                p.grad -= p.grad.mean(dim=1, keepdim=True)
            elif step.index % 2:
                p.grad.sign_().mul_(0.01)
        optimizer.step()

    return job.train_by(update)


def master_weights_that_step_later(job: Job) -> Any:
    """Gradients of four steps are added up in copies, whose optimizer steps for the first time then."""
    model = job.prepare(job.network())
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = job.optimizer(masters)
    for step in job.steps(9):
        step.backward(job.loss)
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.clone() if master.grad is None else master.grad + p.grad
        model.zero_grad()
        if step.index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for master, p in zip(masters, model.parameters(), strict=True):
                    p.copy_(master)
    return job.weights()


# autograd.Functions and hooks of the graph


class _Reverse(torch.autograd.Function):
    """Gradient reversal, in the style with setup_context."""

    @staticmethod
    def forward(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -ctx.scale * grad, None


class _Round(torch.autograd.Function):
    """Straight-through, with an output that has no derivative, and an input that is changed in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        levels = (x * 8).round()
        ctx.mark_non_differentiable(levels)
        x.copy_(levels / 8)
        ctx.mark_dirty(x)
        return x, levels

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> torch.Tensor:
        return grad


class _Bias(torch.autograd.Function):
    """Gives a gradient of a small weight in some steps only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, gives: bool) -> torch.Tensor:
        ctx.gives = gives
        return x + bias

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        return slope, slope.sum(0) if ctx.gives else None, None


def small_weight_without_a_gradient_at_times(job: Job) -> Any:
    model = job.prepare(job.network())
    index = [0]

    def loss_fn(batch: Any) -> torch.Tensor:
        z = functional.linear(model[:2](batch[0]), model[2].weight)
        return functional.mse_loss(model[3:](_Bias.apply(z, model[2].bias, index[0] % 3 != 1)), batch[1])

    def update(optimizer: Any, step: Any) -> None:
        optimizer.step()
        index[0] = step.index + 1

    return job.train_by(update, loss_fn)


def gradient_reversal(job: Job) -> Any:
    model = job.network()
    model.add_module("domain", nn.Linear(8, 1).double())
    model = job.prepare(model)

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        z = model[:4](x)
        label = functional.mse_loss(model[4](z), y)
        return label + functional.binary_cross_entropy_with_logits(
            model.domain(_Reverse.apply(z, 0.3)), (y > 0).double()
        )

    return job.train(loss_fn)


def straight_through_in_place(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        rounded, levels = _Round.apply(model[:2](batch[0]) * 1.0)
        return functional.mse_loss(model[2:](rounded), batch[1]) + 0.0 * levels.sum()

    return job.train(loss_fn)


def hook_of_an_inner_node(job: Job) -> Any:
    """Of a function in the graph, not of the node that accumulates."""
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        z = model[:2](batch[0])
        z.grad_fn.register_hook(lambda grads, _: tuple(g if g is None else g * 0.5 for g in grads))
        return functional.mse_loss(model[2:](z), batch[1])

    return job.train(loss_fn)


def anomalies_detected(job: Job) -> Any:
    job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        with torch.autograd.set_multithreading_enabled(False):
            return job.loss(batch)

    with torch.autograd.detect_anomaly(check_nan=True):
        return job.train(loss_fn)


def activations_on_the_cpu_and_checkpointed(job: Job) -> Any:
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            z = checkpoint(model[:2], batch[0], use_reentrant=False)
            return functional.mse_loss(model[2:](z), batch[1])

    return job.train(loss_fn)


# derivatives in the loss


def jacobian_in_the_loss(job: Job) -> Any:
    """Contractive: the slope of each sample by vmap of jacrev."""
    model = job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        slopes = torch.func.vmap(torch.func.jacrev(model))(batch[0])
        return job.loss(batch) + 0.1 * slopes.square().sum((1, 2)).mean()

    return job.train(loss_fn)


def laplacian_of_each_sample(job: Job) -> Any:
    """As networks that solve differential equations do: forward over reverse."""
    model = job.prepare(job.network())

    def laplacian(x: torch.Tensor) -> torch.Tensor:
        return torch.func.hessian(lambda one: model(one).sum())(x).diagonal().sum()

    def loss_fn(batch: Any) -> torch.Tensor:
        return job.loss(batch) + 0.01 * torch.func.vmap(laplacian)(batch[0]).square().mean()

    return job.train(loss_fn)


def linearised_at_the_first_weights(job: Job) -> Any:
    """A network's tangent at its first weights: the trained values are the differences."""
    model = job.prepare(job.network())
    start: dict[str, torch.Tensor] = {}

    def loss_fn(batch: Any) -> torch.Tensor:
        if not start:
            start.update({name: p.detach().clone() for name, p in model.named_parameters()})
        tangents = {name: p - start[name] for name, p in model.named_parameters()}
        out, change = torch.func.jvp(
            lambda weights: torch.func.functional_call(model, weights, (batch[0],)), (start,), (tangents,)
        )
        return functional.mse_loss(out + change, batch[1])

    return job.train(loss_fn, lr=0.01)


# optimizers and schedulers


def groups_added_in_the_loop(job: Job) -> Any:
    model = job.prepare(job.network())
    optimizer = job.optimizer(model[4].parameters())

    def update(_: Any, step: Any) -> None:
        optimizer.step()
        if step.index in (1, 3):
            optimizer.add_param_group({"params": model[3 - step.index].parameters(), "lr": 0.02})
        model.zero_grad()

    return job.train_by(update)


def schedules_in_sequence(job: Job) -> Any:
    job.prepare(job.network())
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=0.01, amsgrad=True, maximize=False, foreach=True)
    rates = torch.optim.lr_scheduler
    warm = rates.LinearLR(optimizer, 0.1, total_iters=2)
    after = rates.ChainedScheduler([rates.ExponentialLR(optimizer, 0.9), rates.StepLR(optimizer, 2)])
    plateau = rates.ReduceLROnPlateau(optimizer, patience=0)
    for step in job.steps(9):
        loss = step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()
        (warm if step.index < 2 else after).step()
        plateau.step(loss)
    return job.weights()


def momentum_by_turns(job: Job) -> Any:
    """Cyclic momentum, and Muon for the matrices."""
    model = job.prepare(job.network())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    one, other = torch.optim.Muon(matrices, lr=0.01), torch.optim.RMSprop(vectors, lr=0.01, centered=True)
    cycle = torch.optim.lr_scheduler.OneCycleLR(other, 0.02, total_steps=8, cycle_momentum=False)
    for step in job.steps():
        step.backward(job.loss)
        one.step()
        other.step()
        cycle.step()
        model.zero_grad()
    return job.weights()


def optimizer_copied_and_reset(job: Job) -> Any:
    """Each third step is tried, and taken back if it is odd: state_dicts of the optimizer and of the model."""
    model = job.prepare(job.network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in job.steps():
        step.backward(job.loss)
        saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        optimizer.step()
        if step.index % 3 == 1:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.zero_grad()
    return job.weights()


def target_network(job: Job) -> Any:
    """Double Q-learning: a copy that follows, which loss_fn evaluates without a gradient."""
    model = job.prepare(job.network())
    target: list[nn.Module] = []

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        with torch.no_grad():
            goal = y + 0.5 * target[0](x.roll(1, dims=1))
        return functional.smooth_l1_loss(model(x), goal)

    def update(optimizer: Any, _: Any) -> None:
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target[0].parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.3)

    target.append(copy.deepcopy(model).requires_grad_(False))
    return job.train_by(update, loss_fn)


def weights_of_the_samples(job: Job) -> Any:
    """Fractions, of which those of whole micro-batches may be 0."""
    job.prepare(job.network())

    def loss_fn(batch: Any) -> Any:
        x, y = batch
        weight = (x[:, :1] - 0.3).clamp(min=0)
        total = weight.sum()
        return (weight * (job.model(x) - y).square()).sum() / total.clamp(min=1e-12), total

    def plain(batch: Any) -> torch.Tensor:
        return loss_fn(batch)[0]

    return job.train(loss_fn if job.on_ranks else plain)


def loss_of_one_element(job: Job) -> Any:
    """Of shape (1,), and built in place."""
    job.prepare(job.network())

    def loss_fn(batch: Any) -> torch.Tensor:
        total = torch.zeros(1, dtype=torch.float64)
        for x, y in zip(*batch, strict=True):
            total[0] += (job.model(x) - y).square().sum() / len(batch[0])
        return total

    return job.train(loss_fn)
