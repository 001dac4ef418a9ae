"""Run the micro-batches of one attempt on this rank: loss_fn and backward for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from evenload.errors import StepError
from evenload.training.compute import batchnorm, randomness
from evenload.training.compute.device_read import DeviceRead
from evenload.training.compute.grad_norms import GradNorms
from evenload.training.compute.precision import Precision
from evenload.training.compute.weighting import LossResult, nominal_units, read_result
from evenload.training.data.batches import MicroBatch
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.data.randomness import mix, reseed

LossFn = Callable[[Any], Any]
_set_grad_enabled = torch._C._set_grad_enabled


class BackwardPass(Protocol):
    """Runs the backward pass of one micro-batch; an `idle` one takes part in collectives but does not count."""

    def __call__(self, loss: torch.Tensor, *, last: bool, idle: bool) -> None: ...


@dataclass(frozen=True)
class StepContext:
    """Context of the micro-batches, the same for all steps of a job."""

    device: torch.device
    seed: int
    statistics: batchnorm.Statistics
    precision: Precision
    check_weight: Callable[[Any, torch.Tensor, torch.Tensor | float | None], None]
    """Called with the data, the loss and the weight, if there is one, of a micro-batch."""
    other_gpus: tuple[torch.device, ...] = ()
    """Further GPUs of a model that lies on several."""
    computes_idle: bool = True
    """True if a micro-batch without samples of this rank is computed on one that doesn't count, for its collectives."""
    reseed: Callable[..., None] | None = None
    """Seeds the generators of loss_fn by a key; None seeds all generators of the process."""
    check: Callable[[], None] = lambda: None
    """Called before each micro-batch; raises if the attempt was cancelled."""
    grad_norms: GradNorms | None = None
    models: Sequence[nn.Module] = ()
    """The prepared models, whose buffers a pass that is repeated must not move twice."""


@dataclass
class LossSums:
    """Sums over this rank's micro-batches."""

    weighted: bool = False
    units: torch.Tensor | float = 0.0
    loss_sum: torch.Tensor | float = 0.0
    metrics: dict[str, torch.Tensor | float] = field(default_factory=dict)
    nominal: float = 1.0
    dtype: torch.dtype = torch.float32
    on_device: bool = False
    """True if weights stay where loss_fn computed them (device_sums.py)."""
    num_invalid: torch.Tensor | float = 0.0
    """Weights on the device that are negative or not finite."""
    num_zero: torch.Tensor | float = 0.0
    """Weights on the device that are 0: their micro-batches were not kept out of the backward."""
    looks_for_zero: bool = False
    """True if the host must know before the gradients are used whether there are such weights."""
    zero_read: DeviceRead | None = None
    """`num_zero` after the last forward, on its way to the host: the device has a backward to do when it arrives."""


def run_micro_steps(
    context: StepContext,
    batch: GlobalBatch,
    loss_fn: LossFn,
    sums: LossSums,
    backward: BackwardPass,
    *,
    column: int,
    call_index: int,
    last_units: float | None,
) -> None:
    """Run all micro-batches of a plan's column, adding up in `sums`, which are incomplete if this raises.

    `last_units` is N of the same backward in the last step, if there was one.
    """
    plan = batch.plan
    own: Sequence[int] = range(plan.num_micro)
    if not context.computes_idle:
        own = [m for m in own if plan.micro[m][column]]
    for m in own:
        context.check()
        micro = batch.micro(m, column, context.device)
        context.statistics.begin(m, idle=micro.idle)
        seed(context, batch, call_index, m, column)
        had_grad = torch.is_grad_enabled()
        _set_grad_enabled(True)  # by `torch.enable_grad` it takes five calls of Python
        try:
            root, is_idle = compute_loss(
                context, micro, loss_fn, sums, plan.num_samples, last_units, is_first=m == own[0]
            )
            if sums.looks_for_zero and m == own[-1] and isinstance(sums.num_zero, torch.Tensor):
                sums.zero_read = DeviceRead(sums.num_zero.reshape(1))
            backward(root, last=m == own[-1], idle=is_idle)
        finally:
            _set_grad_enabled(had_grad)
        context.statistics.end(m)
        if context.grad_norms is not None and m == own[0] != own[-1]:
            context.grad_norms.first_micro(sums.units)


def compute_loss(
    context: StepContext,
    micro: MicroBatch,
    loss_fn: LossFn,
    sums: LossSums,
    num_samples: int,
    last_units: float | None,
    *,
    is_first: bool,
) -> tuple[torch.Tensor, bool]:
    """Call loss_fn for a micro-batch, and add up its result in `sums`.

    Returns:
        What its backward begins with, and whether the gradients of that don't count.
    """
    result = read_result(context.precision.run(loss_fn, micro.data), on_device=sums.on_device)
    if not micro.idle:
        context.check_weight(micro.data, result.loss, result.weight)
    weight: torch.Tensor | float = 0.0
    if not micro.idle:
        weight = float(micro.num_samples) if result.weight is None else result.weight
    if not is_first and sums.weighted != (result.weight is not None):
        raise StepError("loss_fn returned a weight for some micro-batches only; return one always or never")
    sums.nominal = nominal_units(num_samples, result.weight is not None, last_units)
    add_result(sums, result, weight)
    factor = weight * context.precision.scale / sums.nominal
    # A weight of 0 (an idle rank, or labels that are all ignored) may come with a NaN loss: it must not count. But samples that
    # are in BatchNorm's statistics have a gradient through them, whatever their own weight. (There the loss's own gradient must
    # be 0, as cross_entropy's is; a NaN skips the step with an event.) So it is with a weight that lies on a device, where the
    # host can't read it without waiting.
    if isinstance(weight, torch.Tensor):
        return _where(weight, result.loss) * factor, False
    is_idle = micro.idle or (weight == 0.0 and not context.statistics.in_use)
    return result.loss if factor == 1.0 else result.loss * factor, is_idle


def seed(context: StepContext, batch: GlobalBatch, *parts: int) -> None:
    """Seed the generators of the user's code by the step and `parts`."""
    key = (context.seed, batch.global_step, *parts)
    if context.reseed is not None:
        context.reseed(*key)
    elif context.device.type == "cpu" and not context.other_gpus:
        reseed(mix(*key))
    else:
        randomness.seed_all(context.device, *key, others=context.other_gpus)


def add_result(sums: LossSums, result: LossResult, weight: torch.Tensor | float) -> None:
    """Add the result of a micro-batch with this weight."""
    sums.weighted = result.weight is not None
    if result.loss.dtype == torch.float64:
        sums.dtype = torch.float64
    for name in result.metrics:
        sums.metrics.setdefault(name, 0.0)
    if isinstance(weight, torch.Tensor):
        sums.units = sums.units + weight
        sums.num_invalid = sums.num_invalid + ~((weight >= 0) & weight.isfinite())
        sums.num_zero = sums.num_zero + (weight == 0)
        sums.loss_sum = sums.loss_sum + _where(weight, result.loss.detach().double()) * weight
        for name, value in result.metrics.items():
            sums.metrics[name] = sums.metrics[name] + _where(weight, value) * weight
    elif weight:
        sums.units += weight
        loss = result.loss
        # The number of a CPU is there already, and Python adds it faster.
        sums.loss_sum += (loss.item() if loss.is_cpu else loss.detach().double()) * weight
        for name, value in result.metrics.items():
            sums.metrics[name] = sums.metrics[name] + value * weight


def _where(weight: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """Return 0 for a mean over no units, which is NaN."""
    if not isinstance(value, torch.Tensor):
        value = torch.full_like(weight, value)
    elif value.device != weight.device:
        value = value.to(weight.device, non_blocking=True)
    return torch.where(weight > 0, value, 0.0)
