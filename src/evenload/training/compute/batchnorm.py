"""BatchNorm over ranks, on CPUs too: statistics of micro-batch m over all ranks (docs/how-it-works.md).

With n_r values per channel on rank r:  mu = sum_r n_r mu_r / n,   var = sum_r n_r (var_r + (mu_r - mu)^2) / n.
torch's SyncBatchNorm computes the same on GPUs only. A module keeps its identity: only its class is swapped while it is
attached, so `state_dict` keys, `isinstance` and `deepcopy` do not change, and `restore` sets the user's class again.

The process groups are not attributes of a module, since a deepcopy would raise; `active` sets them during a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from evenload.training.comm.clock import StepClock
from evenload.training.comm.groups import Groups


class Statistics:
    """Exchanges the statistics of one job; `idle` if this rank's part of the micro-batch doesn't count."""

    def __init__(self, groups: Groups, clock: StepClock) -> None:
        self._groups = groups
        self._clock = clock
        self.idle = False
        self.in_use = False
        """True if a model of the job takes its statistics over several ranks."""

    @property
    def world_size(self) -> int:
        return self._groups.world_size

    def begin(self, micro_index: int, *, idle: bool) -> None:
        self.idle = idle

    def end(self, micro_index: int) -> None:
        """End this rank's backward of the micro-batch."""

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' vectors, shape ``(world_size, len(own))``."""
        with self._clock.segment("comm"):
            return self._groups.gather_statistics(own)

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        with self._clock.segment("comm"):
            self._groups.sum_statistics(own)
        return own


# One step runs at a time in a process; a backward may run on autograd's own threads, so this is no thread-local.
_current: Statistics | None = None


@contextmanager
def active(statistics: Statistics) -> Iterator[None]:
    """Share the statistics of attached BatchNorm modules in training mode while the body runs."""
    global _current
    before, _current = _current, statistics
    try:
        yield
    finally:
        _current = before


class _GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Mixin before a BatchNorm class whose training forward takes the statistics over all ranks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        statistics = _current
        # Without running statistics torch takes the batch's in eval mode too.
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        if statistics is None or statistics.world_size == 1 or not of_batch:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        output: torch.Tensor = _forward_global(self, input, statistics)
        return output


class _GlobalBatchNorm1d(_GlobalBatchNorm, nn.BatchNorm1d):
    pass


class _GlobalBatchNorm2d(_GlobalBatchNorm, nn.BatchNorm2d):
    pass


class _GlobalBatchNorm3d(_GlobalBatchNorm, nn.BatchNorm3d):
    pass


class _GlobalSyncBatchNorm(_GlobalBatchNorm, nn.SyncBatchNorm):
    def _check_input_dim(self, input: torch.Tensor) -> None:
        self._check_non_zero_input_channels(input)


_SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: _GlobalBatchNorm1d,
    nn.BatchNorm2d: _GlobalBatchNorm2d,
    nn.BatchNorm3d: _GlobalBatchNorm3d,
    nn.SyncBatchNorm: _GlobalSyncBatchNorm,
}
_BACK = {swapped: original for original, swapped in _SWAPS.items()}


def convert(model: nn.Module) -> tuple[int, list[str]]:
    """Make the model's BatchNorm modules share statistics; return their number, and the names of subclasses left as they are."""
    converted, left = 0, []
    for name, module in model.named_modules():
        if type(module) in _SWAPS:
            module.__class__ = _SWAPS[type(module)]
            converted += 1
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and type(module) not in _BACK:
            left.append(name or type(module).__name__)
    return converted, left


def restore(model: nn.Module) -> None:
    """Set the original class of converted modules."""
    for module in model.modules():
        if type(module) in _BACK:
            module.__class__ = _BACK[type(module)]


def has_global_statistics(model: nn.Module) -> bool:
    """Return whether a forward of this model in training mode exchanges statistics."""
    return any(type(module) in _BACK for module in model.modules())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward_global(
    module: nn.modules.batchnorm._BatchNorm, input: torch.Tensor, statistics: Statistics
) -> torch.Tensor:
    channels = input.shape[1]
    dims = [dim for dim in range(input.dim()) if dim != 1]
    wide = input.detach().to(torch.promote_types(input.dtype, torch.float32))
    count = 0 if statistics.idle else wide.numel() // channels
    own = wide.new_zeros(2 * channels + 1)
    if count:
        var, mean = torch.var_mean(wide, dims, correction=0)
        own[:channels], own[channels:-1], own[-1] = mean, var, float(count)
    table = statistics.gather(own)
    counts = table[:, -1:]
    total = counts.sum()
    if total <= 1:
        raise ValueError(f"BatchNorm needs more than 1 value per channel over all ranks, got {int(total)}")
    means, variances = table[:, :channels], table[:, channels:-1]
    mean = (counts * means).sum(0) / total
    var = (counts * (variances + (means - mean) ** 2)).sum(0) / total
    _update_running(module, mean, var * (total / (total - 1)))
    output: torch.Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
        input, module.weight, module.bias, mean, var, total, module.eps, statistics, statistics.idle
    )
    return output


def forward_joined(
    module: nn.modules.batchnorm._BatchNorm, input: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Run the training forward of one of several parts of a batch, all in one autograd graph (data_parallel.py).

    `gather` returns all parts' vectors ``(mean, variance, count)`` with their graphs, so the backward exchanges nothing.
    """
    channels = input.shape[1]
    dims = [dim for dim in range(input.dim()) if dim != 1]
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    count = wide.numel() // channels
    var, mean = torch.var_mean(wide, dims, correction=0)
    table = gather(torch.cat([mean, var, wide.new_full((1,), float(count))]))
    counts, means, variances = table[:, -1:], table[:, :channels], table[:, channels:-1]
    total = counts.sum()
    if total <= 1:
        raise ValueError(f"BatchNorm needs more than 1 value per channel over all parts, got {int(total)}")
    mean = (counts * means).sum(0) / total
    var = (counts * (variances + (means - mean) ** 2)).sum(0) / total
    _update_running(module, mean.detach(), (var * (total / (total - 1))).detach())
    shape = [1, channels, *([1] * (input.dim() - 2))]
    output = (wide - mean.view(shape)) * (var + module.eps).rsqrt().view(shape)
    if module.weight is not None:
        output = output * module.weight.to(wide.dtype).view(shape)
    if module.bias is not None:
        output = output + module.bias.to(wide.dtype).view(shape)
    return output.to(input.dtype)


def takes_batch_statistics(module: nn.Module) -> bool:
    """Return whether a forward of this module would take the batch's statistics now, by torch's own BatchNorm."""
    if type(module) not in _SWAPS and type(module) not in _BACK:
        return False
    return module.training or getattr(module, "running_mean", None) is None


@torch.no_grad()
def _update_running(module: nn.modules.batchnorm._BatchNorm, mean: torch.Tensor, unbiased: torch.Tensor) -> None:
    if module.running_mean is None or module.running_var is None:
        return
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    if module.momentum is None:
        factor = 1.0 / float(module.num_batches_tracked) if module.num_batches_tracked is not None else 0.0
    else:
        factor = module.momentum
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), factor)


class _Normalize(torch.autograd.Function):
    """y = (x - mu) / sqrt(var + eps) * weight + bias, with mu and var functions of all ranks' x.

    dx = weight * inv * (dy - (sum dy + xhat sum(dy xhat)) / n), sums over all ranks; the gradients of weight and bias are
    this rank's part, summed with all others in the reduction.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        var: torch.Tensor,
        total: torch.Tensor,
        eps: float,
        statistics: Statistics,
        idle: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, mean, var, total)
        ctx.eps, ctx.statistics, ctx.idle = eps, statistics, idle
        if weight is None or weight.dtype == mean.dtype:
            return F.batch_norm(input, mean, var, weight, bias, training=False, eps=eps)
        # A model in half precision: the statistics are wider than the weights, which torch doesn't accept.
        wide_bias = None if bias is None else bias.to(mean.dtype)
        return F.batch_norm(
            input.to(mean.dtype), mean, var, weight.to(mean.dtype), wide_bias, training=False, eps=eps
        ).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, var, total = ctx.saved_tensors
        channels = input.shape[1]
        shape = [1, channels, *([1] * (input.dim() - 2))]
        inv = (var + ctx.eps).rsqrt()
        scale = inv if weight is None else inv * weight.to(inv.dtype)
        wide = torch.promote_types(input.dtype, torch.float32)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        grad_wide = grad.to(wide)
        xhat = (input.to(wide) - mean.view(shape)) * inv.view(shape)
        own_bias = grad_wide.sum(dims)
        own_weight = (grad_wide * xhat).sum(dims)
        sums = torch.cat([own_bias, own_weight])
        sums = ctx.statistics.sum(torch.zeros_like(sums) if ctx.idle else sums.clone()) / total
        if ctx.idle:
            grad_input = torch.zeros_like(input)
        else:
            shift = sums[:channels].view(shape) + xhat * sums[channels:].view(shape)
            grad_input = ((grad_wide - shift) * scale.view(shape)).to(input.dtype)
        grad_weight = own_weight.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        grad_bias = own_bias.to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, None, None, None, None, None, None
