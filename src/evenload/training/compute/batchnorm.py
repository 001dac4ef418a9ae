"""BatchNorm over ranks, on CPUs too: statistics of micro-batch m over all ranks (docs/how-it-works.md).

With n_r values per channel on rank r:  mu = sum_r n_r mu_r / n,   var = sum_r n_r (var_r + (mu_r - mu)^2) / n.
torch's SyncBatchNorm computes the same on GPUs only. A module keeps its identity: only its class is swapped while it is
attached, so `state_dict` keys and `isinstance` do not change, and `restore` sets the user's class again. It is pickled as
the user's class, and a copy of it shares statistics too. batchnorm_kernels.py has the arithmetic.

The process groups are not attributes of a module, since a deepcopy would raise; `Active` sets them during a step.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from evenload.errors import StepError
from evenload.training.comm.clock import StepClock
from evenload.training.comm.groups import Groups
from evenload.training.compute import batchnorm_kernels as kernels


class Statistics:
    """Exchanges the statistics of one job; `idle` if this rank's part of the micro-batch doesn't count."""

    def __init__(self, groups: Groups, clock: StepClock) -> None:
        self._groups = groups
        self._clock = clock
        self.idle = False
        self._alone = False
        self.in_use = False
        """True if a model of the job takes its statistics over several ranks."""

    @property
    def world_size(self) -> int:
        return 1 if self._alone else self._groups.world_size

    def begin(self, stage: int | None, *, idle: bool) -> None:
        """Begin a stage of the step, such as a micro-batch; None for one in which each rank has all samples."""
        self.idle, self._alone = idle, stage is None

    def end(self, stage: int) -> None:
        """End the stage on this rank."""

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' vectors, shape ``(world_size, len(own))``."""
        before = self._clock.switch("comm")
        try:
            return self._groups.gather_statistics(own)
        finally:
            self._clock.switch(before)

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' vectors; `own` may be overwritten."""
        before = self._clock.switch("comm")
        try:
            self._groups.sum_statistics(own)
        finally:
            self._clock.switch(before)
        return own


# One step runs at a time in a process; a backward may run on autograd's own threads, so this is no thread-local.
_current: Statistics | None = None


class Active:
    """Shares the statistics of attached BatchNorm modules in training mode while a `with` body runs."""

    __slots__ = ("_before", "_statistics")

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def __enter__(self) -> None:
        global _current
        _evaluations.clear()  # their loops were left, though their iterators may live
        self._before, _current = _current, self._statistics

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._before


_evaluations: list[int] = []


@contextlib.contextmanager
def in_evaluation(num_ranks: int) -> Iterator[None]:
    """Refuse training mode outside of a step in the body, a loop over `run.batches`: each rank has a part of the data."""
    _evaluations.append(num_ranks)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            _evaluations.remove(num_ranks)


class _GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Mixin before a BatchNorm class whose training forward takes the statistics over all ranks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        statistics = _current
        # Without running statistics torch takes the batch's in eval mode too.
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        if statistics is None and self.training and max(_evaluations, default=1) > 1:
            raise StepError(
                f"{type(self).__name__} ran in training mode in a loop over run.batches: its statistics would be those of this "
                "rank's part. Call model.eval() before; to compute them anew (update_bn), loop over the plain DataLoader itself"
            )
        if statistics is None or statistics.world_size == 1 or not of_batch:
            plain: torch.Tensor = super().forward(input)
            return plain
        if isinstance(self, nn.SyncBatchNorm):  # its own check wants a GPU
            self._check_non_zero_input_channels(input)
        else:
            self._check_input_dim(input)  # type: ignore[no-untyped-call]
        output: torch.Tensor = _forward_global(self, input, statistics)
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A file written by torch.save(model) names the user's class, and loads without Evenload.
        return copyreg._reconstructor, (_BACK[type(self)], object, None), self.__dict__  # type: ignore[attr-defined]

    def __copy__(self) -> nn.Module:
        copied = object.__new__(type(self))
        copied.__setstate__(self.__dict__)  # type: ignore[no-untyped-call]
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        memo[id(self)] = copied = object.__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        return copied


def _with_global_statistics(original: Any) -> type[nn.Module]:
    named = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (_GlobalBatchNorm, original), named)


_SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    original: _with_global_statistics(original)
    for original in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
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
def _forward_global(module: nn.modules.batchnorm._BatchNorm, input: torch.Tensor, statistics: Statistics) -> Any:
    return _Normalize.apply(input, module.weight, module.bias, module, statistics)  # type: ignore[no-untyped-call]


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


def _update_running(module: nn.modules.batchnorm._BatchNorm, mean: torch.Tensor, unbiased: torch.Tensor) -> None:
    running_mean, running_var, num_batches = module.running_mean, module.running_var, module.num_batches_tracked
    if running_mean is None or running_var is None:
        return
    if num_batches is not None:
        num_batches.add_(1)
    factor: float | torch.Tensor | None = module.momentum
    if factor is None:  # the mean over all batches; on a GPU the host doesn't wait for their number
        factor = 0.0 if num_batches is None else num_batches.double().reciprocal().to(running_mean.dtype)
    running_mean.lerp_(mean.to(running_mean.dtype), factor)
    running_var.lerp_(unbiased.to(running_var.dtype), factor)


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
        module: nn.modules.batchnorm._BatchNorm,
        statistics: Statistics,
    ) -> torch.Tensor:
        x, idle = kernels.dense(input), statistics.idle or not input.numel()
        table = statistics.gather(kernels.own_statistics(x, idle=idle))
        moments = kernels.combine(table, x.shape[1], module.eps)
        _update_running(module, moments.mean, moments.var * (moments.num_values / (moments.num_values - 1)))
        ctx.save_for_backward(input, weight)
        ctx.moments, ctx.eps, ctx.statistics, ctx.idle = moments, module.eps, statistics, idle
        return kernels.normalize(x, weight, bias, moments, module.eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: a gradient penalty, for instance
            return (*_gradients_with_graph(ctx, grad, input, weight), None, None)
        moments, x = ctx.moments, kernels.dense(input)
        grad = kernels.like(grad, x)
        own = kernels.own_sums(grad, x, weight, moments, ctx.eps)
        sums = torch.cat([own.grad, own.product])
        # Each rank takes part, whether or not it needs this gradient.
        sums = ctx.statistics.sum(torch.zeros_like(sums) if ctx.idle else sums)
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = (
                torch.zeros_like(input)
                if ctx.idle
                else kernels.input_gradient(grad, x, weight, moments, ctx.eps, own, sums)
            )
        if ctx.needs_input_grad[1]:
            grad_weight = own.product.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = own.grad.to(weight.dtype)
        return grad_input, grad_weight, grad_bias, None, None


class _SumOverRanks(torch.autograd.Function):
    """The sum of a vector over all ranks; so is the gradient."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, statistics: Statistics) -> torch.Tensor:
        ctx.statistics = statistics
        return statistics.sum(own.clone())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _SumOverRanks.apply(grad.contiguous(), ctx.statistics), None  # type: ignore[no-untyped-call]


def _gradients_with_graph(
    ctx: Any, grad: torch.Tensor, input: torch.Tensor, weight: Any
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients by operations that autograd records, for a backward through this one.

    The statistics are computed again, with their graph, around the known mean: nothing cancels, and one sum is enough.
    """
    statistics, num_values, channels = ctx.statistics, ctx.moments.num_values, input.shape[1]
    dims = [dim for dim in range(input.dim()) if dim != 1]
    shape = (1, channels, *(1,) * (input.dim() - 2))
    # A fill: torch would wait for a copy from the host.
    idle = torch.full((), ctx.idle, dtype=torch.bool, device=input.device)

    def mean_over_ranks(*values: torch.Tensor) -> list[torch.Tensor]:
        # A part that does not count has a graph too: its backward takes part in the sums of the others.
        own = torch.cat([value.sum(dims) for value in values]).masked_fill(idle, 0.0)
        total: torch.Tensor = _SumOverRanks.apply(own, statistics)  # type: ignore[no-untyped-call]
        return [mean.view(shape) for mean in (total / num_values).view(len(values), channels)]

    centred = input.to(ctx.moments.inv.dtype) - ctx.moments.mean.view(shape)
    rest, square = mean_over_ranks(centred, centred * centred)
    inv = (square - rest * rest + ctx.eps).rsqrt()
    xhat, wide_grad = (centred - rest) * inv, grad.to(inv.dtype)
    product = wide_grad * xhat
    mean_grad, mean_product = mean_over_ranks(wide_grad, product)
    grad_input = (wide_grad - mean_grad - xhat * mean_product) * inv
    if weight is not None:
        grad_input = grad_input * weight.to(inv.dtype).view(shape)
    grad_weight = product.sum(dims).to(weight.dtype) if ctx.needs_input_grad[1] else None
    grad_bias = wide_grad.sum(dims).to(weight.dtype) if ctx.needs_input_grad[2] else None
    return grad_input.to(input.dtype).masked_fill(idle, 0.0), grad_weight, grad_bias
