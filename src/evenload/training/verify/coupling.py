"""`CouplingWatch`: names a loss that couples the samples of its batch, or is no mean over its units, in a run's first steps.

At the end of a loop body, rank 0 computes a few samples of its share once more, whole and in two halves, and compares the
gradients of some parameters (parts.py). That costs two small forwards and backwards, once; dropout is off, BatchNorm as in
evaluation, and random numbers are those of each sample. Nothing of the run changes: gradients, generators and buffers are
restored, and the time counts for no step.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from evenload.training.comm.user_collectives import user_collectives
from evenload.training.compute import randomness
from evenload.training.compute.batch_loss import CoupledLoss
from evenload.training.compute.buffers import BufferGuard, buffers_restored
from evenload.training.compute.label_watch import describe_unweighted
from evenload.training.compute.micro_steps import LossFn
from evenload.training.compute.weighting import read_result
from evenload.training.data import checks
from evenload.training.data.batches import leaves_of
from evenload.training.data.randomness import find_generators, holders, save_generators
from evenload.training.data.rows import cut_rows
from evenload.training.parallel.threaded.strategy import ThreadedStrategy
from evenload.training.step.context import TrainingContext
from evenload.training.step.step import Step, StepListener
from evenload.training.verify import wrong_units as wrong
from evenload.training.verify.causes import COUPLED_FIX, NUM_SEEDS
from evenload.training.verify.findings import TOLERANCES
from evenload.training.verify.parts import PartsFit, differs_on_average, fit_parts
from evenload.training.verify.random_draws import OwnState, SharedDraws
from evenload.training.verify.saved_state import batch_norms, no_dropout, switched_off
from evenload.training.verify.sides import Gradient, without_dropout
from evenload.training.verify.wrong_units import describe_state, describe_wrong_units, difference

_LEAST_SAMPLES = 4
_NUM_SAMPLES = (8, 16, 32)
"""Samples of each try; another follows where one shows nothing (no gradient, an error in a small batch)."""
_MAX_CALLS = 4
"""Calls of step.backward in a step that are looked at."""
_MAX_ELEMENTS = 1 << 20
"""Elements of the parameters whose gradients are compared."""
_OWN_GENERATOR = (
    "loss_fn draws from a generator of the script's own: unless seeded by rank, each rank draws the same numbers from it, for "
    "other samples. Draw from torch, numpy.random or random themselves, which are seeded for each step and rank"
)
_HALF = (torch.float16, torch.bfloat16)
Finding = tuple[str, str]  # kind and message of an event; both empty where nothing is wrong


class CouplingWatch(StepListener):
    """Looks at each call of `step.backward` until it has found out, at most in as many steps as there are tries."""

    def __init__(self, context: TrainingContext, models: Sequence[nn.Module]) -> None:
        self._context = context
        self._models = models
        self._tries = [0] * _MAX_CALLS
        self._loss_fns: dict[int, LossFn] = {}
        """Of this step, by index of the call."""
        self._num_collectives = 0
        self._own: tuple[list[Any], tuple[str, ...]] = (
            [],
            (),
        )  # generators that loss_fn can reach, and their states before

    def _own_groups(self) -> list[dist.ProcessGroup]:
        return [*self._context.groups.own_groups, *self._context.step_groups.own_groups]

    @property
    def rests(self) -> bool:
        return self._context.groups.rank != 0 or self._tries[0] == len(_NUM_SAMPLES)

    def on_backward(self, step: Step, loss_fn: LossFn) -> None:
        call = step.stats.calls
        if call == 0:
            self._loss_fns = {}
        if self._context.groups.rank != 0 or step.arm or isinstance(loss_fn, CoupledLoss):
            return
        if call == self._tries[0] == 0 < self._context.groups.world_size - 1:
            found = find_generators(holders(loss_fn, 1))
            self._own = found, save_generators(found)
        if call < _MAX_CALLS and self._tries[call] < len(_NUM_SAMPLES):
            self._loss_fns[call] = loss_fn
            self._num_collectives = user_collectives(self._own_groups())

    def on_gradients(self, step: Step) -> None:
        call = step.stats.calls - 1
        (own, before), self._own = self._own, ([], ())
        if own and save_generators(own) != before:
            self._context.recorder.event("own_generator", _OWN_GENERATOR, step=step.index)
        if call in self._loss_fns and user_collectives(self._own_groups()) != self._num_collectives:
            # Collectives of its own would wait for the other ranks.
            del self._loss_fns[call]
            self._tries[call] = len(_NUM_SAMPLES)

    def on_end(self, step: Step) -> None:
        # Not earlier: a later call of the step may use what loss_fn has kept.
        loss_fns, self._loss_fns = self._loss_fns, {}
        for call, loss_fn in loss_fns.items():
            num_samples = _NUM_SAMPLES[self._tries[call]]
            self._tries[call] += 1
            looked = None
            # The user's code may raise anything in a batch of another size, or in a graph of its own: this shows nothing then.
            with contextlib.suppress(Exception), self._set_aside():
                looked = self._in_replica(functools.partial(self._look, step, loss_fn, call, num_samples))
            if looked is None:
                continue
            self._tries[call] = len(_NUM_SAMPLES)
            kind, message = looked
            if kind:
                self._context.recorder.event(kind, message, step=step.index)

    def _in_replica(self, work: Callable[[], Finding | None]) -> Finding | None:
        """Run `work` where loss_fn runs: under dp in the first replica's thread."""
        strategy = self._context.engine.strategy
        return strategy.threads.run({0: work})[0] if isinstance(strategy, ThreadedStrategy) else work()

    def _look(self, step: Step, loss_fn: LossFn, call: int, num_samples: int) -> Finding | None:
        """Return what is wrong with the loss; None if the samples show nothing."""
        read = self._read(step, num_samples)
        # BatchNorm without running statistics takes those of its batch in any mode, and over all ranks in training.
        if read is None or any(getattr(module, "running_mean", 0) is None for _, module in batch_norms(self._models)):
            return None
        data, num_read, first = read
        num = min(num_read, num_samples)
        quiet, params, device = without_dropout(loss_fn), self._params(), self._context.device
        # A change of others is no state unless a later call shows it: `_set_aside` restores those.
        named, buffers = False, BufferGuard(self._models, persistent_only=True)
        set_in_calls: list[list[tuple[str, torch.Tensor]]] = []

        def compute(low: int, high: int, shift: int = 0, *, gradients: bool = True, anew: bool = False) -> Gradient:
            nonlocal named
            part = step.batch.read(first + low, first + high) if anew else cut_rows(data, low, high, num_read)
            key = (self._context.config.seed + shift, step.index, call)
            randomness.seed_all(device, *key)
            buffers.save()
            try:
                with SharedDraws(low, high - low, num, OwnState(device, *key, 1)):
                    result = read_result(quiet(part))
                if len(set_in_calls) < 3:
                    set_in_calls.append(buffers.changed())
                buffers.forget()
                named = named or (result.weight is None and bool(describe_unweighted(part, result.loss)))
                grads = torch.autograd.grad(result.loss, params, allow_unused=True) if gradients else ()
            finally:
                buffers.restore()
            units = float(high - low if result.weight is None else result.weight)
            return Gradient(list(grads), float(result.loss.detach()), units, result.weight is not None)

        def draws() -> bool:
            """Return True if random numbers of loss_fn are not those of each sample (mixup)."""
            compute(0, num, gradients=False)
            drew = _probe(device)
            randomness.seed_all(device, self._context.config.seed, step.index, call)
            return drew != _probe(device)

        whole, spans = compute(0, num), ((0, num // 2), (num // 2, num))
        if not math.isfinite(whole.loss) or not whole.norm() or not math.isfinite(whole.norm()):
            return None
        parts = [compute(low, high) for low, high in spans]
        if not any(part.units and math.isfinite(part.loss) for part in parts):
            return None
        is_half = any(p.dtype in _HALF for p in params)
        tolerance = TOLERANCES["bfloat16" if is_half else "float32"]
        if state := describe_state(whole, compute(0, num), set_in_calls[1:3], tolerance / 100):
            return "kept_state", f"{state}. {self._effect(step, 'Each device keeps its own')}. {wrong.STATE_FIX}"
        found = fit_parts(whole, parts, tolerance)
        if found.kind == "coupled":
            if draws():
                # Then only the mean over many shows it.
                wholes = [compute(0, num, shift, gradients=False) for shift in range(NUM_SEEDS)]
                in_parts = [
                    [compute(low, high, shift, gradients=False) for low, high in spans] for shift in range(NUM_SEEDS)
                ]
                return self._coupled(step, found) if differs_on_average(wholes, in_parts) else None
            return self._coupled(step, found)
        wrong_units = describe_wrong_units(whole, parts, found, is_random=False)
        if not wrong_units or named:
            for (low, high), part in zip(spans, parts, strict=True):
                anew = step.batch.read(first + low, first + high)
                if not _differs_in_padding(anew, cut_rows(data, low, high, num_read)):
                    continue
                # Random numbers of padded positions are others in a batch of another length.
                if difference(compute(low, high, 1), part) > tolerance:
                    continue
                if (gap := difference(compute(low, high, anew=True), part)) > tolerance:
                    return (
                        "padding",
                        f"{wrong.PADDING} {gap:.1%}. {self._effect(step, wrong.PADDED_ALONE)}. {wrong.PADDING_FIX}",
                    )
            return "", ""
        # A collate_fn may count the units of its batch, and then those of a part are no rows of it.
        whole, *parts = (compute(low, high, anew=True) for low, high in ((0, num), *spans))
        again = fit_parts(whole, parts, tolerance)
        wrong_units = describe_wrong_units(whole, parts, again, is_random=draws())
        return "wrong_units" if wrong_units else "", wrong_units

    def _read(self, step: Step, num_samples: int) -> tuple[Any, int, int] | None:
        """Return a batch of samples of this rank, or of others where it has too few, their number, and the first's position."""
        batch = step.batch
        plan = batch.plan
        if not isinstance(step.loader.batch_size, int | None) or plan.num_samples < _LEAST_SAMPLES:
            return None  # of a tuple of loaders a sample is none of one batch
        sizes = [plan.micro[0][rank] for rank in range(len(plan.shares))]
        own = max(range(len(sizes)), key=sizes.__getitem__) if self._context.groups.world_size == 1 else 0
        if sizes[own] >= _LEAST_SAMPLES:
            return batch.micro(0, own, self._context.device).data, sizes[own], plan.slice_of(0, own)[0]
        low, high = plan.slice_of(0)
        high = min(high, low + num_samples)
        if high - low < _LEAST_SAMPLES or checks.is_stream(step.loader.user_loader):
            return None
        return batch.read(low, high), high - low, low

    def _params(self) -> list[nn.Parameter]:
        """Return parameters whose gradients are compared: the smallest ones, which are those of all layers."""
        every = {id(p): p for model in self._models for p in model.parameters() if p.requires_grad}.values()
        chosen: list[nn.Parameter] = []
        num_elements = 0
        for param in sorted(every, key=torch.Tensor.numel):
            num_elements += param.numel()
            if chosen and num_elements > _MAX_ELEMENTS:
                break
            chosen.append(param)
        return chosen

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        context, models = self._context, self._models
        with contextlib.ExitStack() as stack:
            others = randomness.other_gpus(models, context.device)
            stack.enter_context(randomness.set_aside(context.device, others))
            stack.enter_context(buffers_restored(models))
            stack.enter_context(no_dropout(models))
            stack.enter_context(switched_off([module for _, module in batch_norms(models)]))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_gradients_set_aside(models))  # loss_fn may call zero_grad
            if "torch._dynamo" in sys.modules:  # graphs of other sizes would be compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def _coupled(self, step: Step, found: PartsFit) -> Finding:
        effect = self._effect(step, "Each device's micro-batch is compared within itself alone")
        return "coupled_loss", (
            "loss_fn couples the samples of its batch (contrastive, in-batch negatives, a statistic of the batch): two halves "
            f"of a few samples differ from the whole by {found.misfit:.0%}, whatever their weights. {effect}. To make it "
            f"exact, {COUPLED_FIX}"
        )

    def _effect(self, step: Step, why: str) -> str:
        plan = step.batch.plan
        if plan.num_micro > 1 or sum(share > 0 for share in plan.shares) > 1:
            return f"{why}, so this is not the loss of the global batch"
        return "It is exact now, with one device and one micro-batch, but would not be with more"


@contextlib.contextmanager
def _gradients_set_aside(models: Sequence[nn.Module]) -> Iterator[None]:
    held = [(param, param.grad) for model in models for param in model.parameters()]
    for param, _ in held:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in held:
            param.grad = grad


def _differs_in_padding(anew: Any, cut: Any) -> bool:
    """Return whether a batch has the rows cut from a larger one and only less padding: collate_fn may sort, or draw at random."""
    pairs = [pair for pair in zip(leaves_of(anew), leaves_of(cut), strict=True) if all(map(torch.is_tensor, pair))]
    return any(one.shape != other.shape for one, other in pairs) and all(
        torch.equal(one, other[tuple(slice(n) for n in one.shape)])
        or torch.equal(one, other[tuple(slice(m - n, m) for n, m in zip(one.shape, other.shape, strict=True))])
        for one, other in pairs
    )


def _probe(device: torch.device) -> tuple[float, ...]:
    """Draw from all generators, to see whether two states are equal."""
    return float(torch.rand(())), float(torch.rand((), device=device)), random.random(), float(np.random.random())
