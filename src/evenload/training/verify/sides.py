"""Both sides of a verification: the step on the real split, and the same samples in one process with plain PyTorch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from evenload.records.recorder import Recorder
from evenload.training.comm.clock import StepClock
from evenload.training.compute import batchnorm, randomness
from evenload.training.compute.batch_loss import CoupledLoss, read_rows, wrap
from evenload.training.compute.buffers import buffers_restored
from evenload.training.compute.micro_steps import LossFn
from evenload.training.compute.precision import Precision
from evenload.training.compute.weighting import read_result
from evenload.training.data.batches import move
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.parallel.buckets import real
from evenload.training.parallel.factory import StrategyParts, open_strategy
from evenload.training.parallel.strategy import Strategy
from evenload.training.parallel.wire.gradient_wire import GradientWire
from evenload.training.step.attempt import Attempt
from evenload.training.step.context import TrainingContext
from evenload.training.step.engine import Engine
from evenload.training.step.planner import Planner
from evenload.training.step.stats import StepStats
from evenload.training.step.step_recorder import StepRecorder
from evenload.training.verify.double import in_double
from evenload.training.verify.random_draws import SharedDraws
from evenload.training.verify.saved_state import Tracked, batch_norms, no_dropout, switched_off

Span = tuple[int, int]
"""Global positions ``[low, high)`` of the epoch."""

_DROPPING = (
    nn.functional.dropout,
    nn.functional.dropout1d,
    nn.functional.dropout2d,
    nn.functional.dropout3d,
    nn.functional.alpha_dropout,
    nn.functional.feature_alpha_dropout,
    torch.dropout,
)


@dataclass(frozen=True)
class Variant:
    """Parts to leave out of a comparison, to test whether they explain the difference."""

    no_dropout: bool = False
    shared_draws: bool = False
    """Random numbers of loss_fn are drawn per sample; see random_draws.py."""
    no_own_batch_norm: bool = False
    """BatchNorm with statistics of one rank alone runs in evaluation mode."""
    no_batch_norm: bool = False
    """All BatchNorm runs in evaluation mode."""

    def code(self) -> int:
        return self.no_dropout + 2 * self.shared_draws + 4 * self.no_own_batch_norm + 8 * self.no_batch_norm

    @classmethod
    def of(cls, code: int) -> Variant:
        return cls(bool(code & 1), bool(code & 2), bool(code & 4), bool(code & 8))


@dataclass(frozen=True)
class Gradient:
    """Gradients of one side, one per tracked parameter; None if it has none."""

    values: list[torch.Tensor | None]
    loss: float
    units: float = math.nan
    weighted: bool = False

    def __post_init__(self) -> None:
        # Of a complex gradient both parts count.
        object.__setattr__(self, "values", [None if value is None else real(value) for value in self.values])

    def norm(self) -> float:
        return math.sqrt(self.dot(self))

    def distance(self, other: Gradient) -> float:
        """Return ‖self - other‖ / ‖other‖; nan if `other` is 0."""
        values = [None if a is None or b is None else a - b for a, b in zip(self.values, other.values, strict=True)]
        return Gradient(values, math.nan).norm() / other.norm() if other.norm() else math.nan

    def dot(self, other: Gradient) -> float:
        return math.fsum(
            float((a.double() * b.double()).sum())
            for a, b in zip(self.values, other.values, strict=True)
            if a is not None and b is not None
        )


@dataclass
class VerifyCall:
    """One verified call of `step.backward`, which can be computed on both sides."""

    context: TrainingContext
    models: Sequence[nn.Module]
    tracked: Sequence[Tracked]
    batch: GlobalBatch
    planner: Planner
    loss_fn: LossFn
    call_index: int
    wide: bool
    """True if everything is in float64, without autocast."""
    precision: Precision
    default_dtype: torch.dtype
    """torch's default dtype in the script."""
    _data: dict[Span, Any] = field(default_factory=dict)

    def slices(self) -> list[Span]:
        plan = self.batch.plan
        return [plan.slice_of(m) for m in range(plan.num_micro) if sum(plan.micro[m])]

    def read(self, span: Span) -> Any:
        """Return the samples of a span; read once, in new containers each time."""
        if span not in self._data:
            self._data[span] = self.read_anew(span)
        return move(self._data[span], self.context.device)

    def read_anew(self, span: Span) -> Any:
        """Read the samples of a span as in training."""
        # In float64 the tensors that a dataset makes of Python numbers would hold other values.
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            return self.batch.read(*span)
        finally:
            torch.set_default_dtype(before)

    def key(self, micro_index: int, shift: int = 0) -> tuple[int, ...]:
        """Return the seeds of a micro-batch in one process: those of rank 0 in the split."""
        return self.context.config.seed + shift, self.batch.global_step, self.call_index, micro_index, 0

    # -- the real split -------------------------------------------------------------------------------------------------

    def split(self, variant: Variant, *, wire: bool = False) -> Gradient:
        """Compute the step on all ranks; `wire`: with the gradients in the format that is set."""
        context = self.context
        strategy = self._strategy(wire)
        strategy.attach(self.models, context.groups)
        try:
            with self._varied(variant), buffers_restored(self.models), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the script's own backward follows, and warns
                for _ in range(20):
                    engine = self._engine(strategy)
                    stats = StepStats()
                    stats.calls = self.call_index
                    loss = engine.backward(Attempt(self.batch, self.planner, stats, self._split_loss_fn(variant)))
                    if not stats.skipped or not self.precision.scaled or self.precision.exhausted:
                        break
        finally:
            strategy.detach()
        return self._take(float(loss), 1.0)

    def _strategy(self, wire: bool) -> Strategy:
        context = self.context
        config = context.config
        parts = StrategyParts(
            context.spec,
            context.device,
            context.config.seed,
            context.groups,
            StepClock(context.device),
            self.precision,
            context.engine.throttle,
            wire=GradientWire(config.wire, context.groups, config.seed) if wire else None,
        )
        return open_strategy("ddp", parts)

    def _engine(self, strategy: Strategy) -> Engine:
        context = self.context
        engine = Engine(
            device=context.device,
            groups=context.groups,
            control=context.control,
            strategy=strategy,
            precision=self.precision,
            clock=StepClock(context.device),
            recorder=StepRecorder(Recorder(None), writes=False),
            throttle=context.engine.throttle,
        )
        engine.attach(self.models)
        return engine

    def _split_loss_fn(self, variant: Variant) -> LossFn:
        loss_fn = self._outer(variant)
        if not variant.shared_draws:
            return loss_fn
        calls = 0

        def shared(data: Any) -> Any:
            nonlocal calls
            m, calls = calls % self.batch.plan.num_micro, calls + 1
            low, high = self.batch.spans()[m]
            return self._shared(inner, data, (low, high), self.batch.plan.slice_of(m), self.key(m))

        if isinstance(loss_fn, CoupledLoss):
            inner = loss_fn.encode
            return CoupledLoss(shared, loss_fn.batch_loss)
        inner = loss_fn
        return shared

    # -- one process ----------------------------------------------------------------------------------------------------

    def one_process(
        self, spans: Sequence[Span], variant: Variant, *, shift: int = 0, within: Sequence[Span] | None = None
    ) -> Gradient:
        """Compute in plain PyTorch: each span's mean loss times its weight, summed, divided once.

        `shift` is added to the seed; `within` gives the micro-batch that each span is a part of, by default itself.
        """
        num_samples = sum(high - low for low, high in spans)
        units, loss_sum, weighted = 0.0, 0.0, False
        loss_fn = self._outer(variant)
        inner = loss_fn.encode if isinstance(loss_fn, CoupledLoss) else loss_fn
        encoded: list[tuple[torch.Tensor, ...]] = []
        device = self.context.device
        with (
            randomness.set_aside(device),
            self._varied(variant),
            _plain_batch_norm(self.models),
            buffers_restored(self.models),
            torch.enable_grad(),
        ):
            for index, span in enumerate(spans):
                data, key = self.read(span), self.key(index, shift)
                randomness.seed_all(device, *key)
                whole = within[index] if within is not None else span
                with self.precision.autocast():
                    returned = self._shared(inner, data, span, whole, key) if variant.shared_draws else inner(data)
                    if isinstance(loss_fn, CoupledLoss):
                        encoded.append(read_rows(returned, span[1] - span[0]))
                        continue
                    result = read_result(returned)
                weight = float(span[1] - span[0] if result.weight is None else result.weight)
                weighted = result.weight is not None
                if weight == 0.0:
                    continue
                (result.loss * (weight * self.precision.scale / num_samples)).backward()  # type: ignore[no-untyped-call]
                units += weight
                loss_sum += float(result.loss.detach().double()) * weight
            if isinstance(loss_fn, CoupledLoss):
                randomness.seed_all(device, *self.key(0, shift)[:-2])
                with self.precision.autocast():
                    loss = read_result(loss_fn.batch_loss(*map(torch.cat, zip(*encoded, strict=True)))).loss
                (loss * self.precision.scale).backward()  # type: ignore[no-untyped-call]
                units, loss_sum = num_samples, float(loss.detach().double()) * num_samples
        if not units:
            return Gradient([None] * len(self.tracked), math.nan, 0.0, weighted)
        taken = self._take(loss_sum / units, num_samples / (self.precision.scale * units))
        return replace(taken, units=units, weighted=weighted)

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _take(self, loss: float, factor: float) -> Gradient:
        values: list[torch.Tensor | None] = []
        for one in self.tracked:
            grad = one.param.grad
            values.append(None if grad is None else (grad.to_dense() if grad.is_sparse else grad).clone().mul_(factor))
            one.param.grad = None
        return Gradient(values, loss)

    def _outer(self, variant: Variant) -> LossFn:
        loss_fn = wrap(self.loss_fn, in_double) if self.wide else self.loss_fn
        return wrap(loss_fn, without_dropout) if variant.no_dropout else loss_fn

    def _shared(self, loss_fn: LossFn, data: Any, span: Span, whole: Span, key: tuple[int, ...]) -> Any:
        randomness.seed_all(self.context.device, *key)
        with SharedDraws(span[0] - whole[0], span[1] - span[0], whole[1] - whole[0]):
            return loss_fn(data)

    @contextmanager
    def _varied(self, variant: Variant) -> Iterator[None]:
        norms = [
            m for _, m in batch_norms(self.models) if variant.no_batch_norm or not batchnorm.has_global_statistics(m)
        ]
        with ExitStack() as stack:
            if variant.no_batch_norm or variant.no_own_batch_norm:
                stack.enter_context(switched_off(norms))
            if variant.no_dropout:
                stack.enter_context(no_dropout(self.models))
            yield


class _NoDropout(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPPING:
            return args[0] if args else kwargs["input"]
        if func is nn.functional.scaled_dot_product_attention:
            kwargs.pop("dropout_p", None)
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        elif func is nn.functional.multi_head_attention_forward:
            kwargs["training"] = False
        return func(*args, **kwargs)


def without_dropout(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a loss function so that dropout functions in it return their input."""

    def quiet(*values: Any) -> Any:
        with _NoDropout():
            return loss_fn(*values)

    return quiet


class _PlainSyncBatchNorm(nn.SyncBatchNorm):
    """SyncBatchNorm for one process: on any device, without a process group."""

    forward = nn.modules.batchnorm._BatchNorm.forward

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


@contextmanager
def _plain_batch_norm(models: Sequence[nn.Module]) -> Iterator[None]:
    """Use torch's own BatchNorm, of this process alone, while the body runs."""
    modules = [m for model in models for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [(module, module.__class__) for module in modules]
    for model in models:
        batchnorm.restore(model)
    for module in modules:
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = _PlainSyncBatchNorm
    try:
        yield
    finally:
        for module, kind in before:
            module.__class__ = kind


def same_data(first: Any, second: Any) -> bool:
    """Return whether two readings of the same samples hold the same tensors."""
    leaves = [[x for x in tree_leaves(data) if isinstance(x, torch.Tensor)] for data in (first, second)]
    return len(leaves[0]) == len(leaves[1]) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*leaves, strict=True)
    )
