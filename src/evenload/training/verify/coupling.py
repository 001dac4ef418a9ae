"""`CouplingWatch`: names a loss that couples the samples of its batch, or is no mean over its units, in a run's first steps.

At the end of a loop body, rank 0 computes a few samples of its share once more, whole and in two parts, and compares the
gradients of some parameters (parts.py). That costs two small forwards and backwards, once; dropout is off, BatchNorm as in
evaluation, and random numbers are those of each sample. Nothing of the run changes: gradients, generators and buffers are
restored, and the time counts for no step.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evenload.training.comm.user_collectives import user_collectives
from evenload.training.compute import randomness
from evenload.training.compute.batch_loss import CoupledLoss
from evenload.training.compute.buffers import buffers_restored
from evenload.training.compute.micro_steps import LossFn
from evenload.training.data import checks
from evenload.training.data.batches import leaves_of
from evenload.training.data.randomness import find_generators, holders, save_generators
from evenload.training.parallel.grad_hooks import SummedHooks
from evenload.training.parallel.threaded.strategy import ThreadedStrategy
from evenload.training.step.context import TrainingContext
from evenload.training.step.step import Step, StepListener
from evenload.training.verify import wrong_units as wrong
from evenload.training.verify.bent_means import FEW, describe_bends, describe_few
from evenload.training.verify.causes import COUPLED_FIX, NUM_SEEDS
from evenload.training.verify.double import in_double
from evenload.training.verify.few_samples import FewSamples, probe, take_hooks
from evenload.training.verify.findings import TOLERANCES
from evenload.training.verify.loss_state import state_restored, uses_an_iterator, weights_restored
from evenload.training.verify.parts import PartsFit, differs_on_average, fit_parts
from evenload.training.verify.random_draws import HALF
from evenload.training.verify.saved_state import batch_norms, no_dropout, switched_off
from evenload.training.verify.sides import Gradient
from evenload.training.verify.wrong_units import describe_state, describe_wrong_units, difference

_LEAST_SAMPLES = 4
_NUM_SAMPLES = (8, 16, 32)
"""Samples of each try; another follows where one shows nothing (no gradient, an error in a small batch)."""
_LATER = 4
"""The next look is after this many times as many steps: a term of the loss may begin later."""
_MAX_CALLS = 4
"""Calls of step.backward in a step that are looked at."""
_MAX_ELEMENTS = 1 << 20
"""Elements of the parameters whose gradients are compared."""
_OWN_GENERATOR = (
    "loss_fn draws from a generator of the script's own: unless seeded by rank, each rank draws the same numbers from it, for "
    "other samples. Draw from torch, numpy.random or random themselves, which are seeded for each step and rank"
)
_OWN_SEED = (
    "loss_fn seeds the generators itself: each rank and each micro-batch draws the same numbers, for other samples. Leave "
    "torch.manual_seed, numpy.random.seed and random.seed out of it: they are seeded for each step, rank and micro-batch"
)
_ITERATOR = (
    "loss_fn takes from an iterator: each call takes the next of it, on each device and for each micro-batch. Take it in the "
    "loop body, before step.backward, or prepare both loaders together: run.prepare(model, (loader, other))"
)
_UNEQUAL_READS = (
    "the dataset gave other values when the same sample was read again: it keeps state that reading changes (a counter, an "
    "array changed in place), which is that of each rank's own samples, or draws from generators that are not seeded (torch's, "
    "numpy.random and random are). Results depend on the split, and a step that is done again has other samples"
)
_CERTAIN = 0.05
"""A smaller misfit counts only if it is there in float64 too."""
_SINGLE, _DOUBLE = 1e-6, 1e-7
"""‖Δg‖/‖g‖ that counts as rounding where all is float32 on a CPU, and of float64, inside of which a kernel may use float32."""
Finding = tuple[str, str]  # kind and message of an event; both empty where nothing is wrong
Spans = Sequence[tuple[int, int]]


class CouplingWatch(StepListener):
    """Looks at each call of `step.backward` until it has found out, and again ever more rarely until something is wrong."""

    def __init__(self, context: TrainingContext, models: Sequence[nn.Module]) -> None:
        self._context = context
        self._models = models
        self._tries = [0] * _MAX_CALLS
        self._named: set[str | int] = set()
        """Calls of which something was named, and kinds that are named once."""
        self._first_step, self._next_look = -1, 0
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
            if step.index >= self._next_look:
                self._look_again(step.index)
        if self._context.groups.rank != 0 or step.arm or isinstance(loss_fn, CoupledLoss):
            return
        if call == self._tries[0] == 0 < self._context.groups.world_size - 1:
            found = find_generators(holders(loss_fn, 1))
            self._own = found, save_generators(found)
        if call < _MAX_CALLS and self._tries[call] < len(_NUM_SAMPLES):
            self._loss_fns[call] = loss_fn
            self._num_collectives = user_collectives(self._own_groups())

    def _look_again(self, step_index: int) -> None:
        if self._first_step < 0:
            self._first_step = step_index
        self._next_look = step_index + max(_LATER, (_LATER - 1) * (step_index - self._first_step))
        self._tries = [len(_NUM_SAMPLES) if call in self._named else 0 for call in range(_MAX_CALLS)]

    def on_gradients(self, step: Step) -> None:
        call = step.stats.calls - 1
        (own, before), self._own = self._own, ([], ())
        if own and "own_generator" not in self._named and save_generators(own) != before:
            self._named.add("own_generator")
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
            with contextlib.suppress(Exception), self._set_aside(step, loss_fn):
                looked = self._in_replica(functools.partial(self._look, step, loss_fn, call, num_samples))
            if looked is None:
                continue
            self._tries[call] = len(_NUM_SAMPLES)
            kind, message = looked
            if kind:
                self._named.add(call)
                self._context.recorder.event(kind, message, step=step.index)

    def _in_replica(self, work: Callable[[], Finding | None]) -> Finding | None:
        """Run `work` where loss_fn runs: under dp in the first replica's thread."""
        strategy = self._context.engine.strategy
        return strategy.threads.run({0: work})[0] if isinstance(strategy, ThreadedStrategy) else work()

    def _look(self, step: Step, loss_fn: LossFn, call: int, num_samples: int) -> Finding | None:
        """Return what is wrong with the loss; None if the samples show nothing."""
        if uses_an_iterator(loss_fn):  # calls beside the training would use it up
            return "kept_state", _ITERATOR
        read = self._read(step, num_samples)
        # BatchNorm without running statistics takes those of its batch in any mode, and over all ranks in training.
        if read is None or any(getattr(module, "running_mean", 0) is None for _, module in batch_norms(self._models)):
            return None
        few = FewSamples(self._context, self._models, self._params(), step, loss_fn, call, read, num_samples)
        compute, num, device = few.compute, few.num, self._context.device
        # Of unequal size: what goes up and down by turns along the samples may be equal in two halves.
        cut = num * 5 // 8
        whole, spans = compute(0, num), ((0, cut), (cut, num))
        if not math.isfinite(whole.loss) or not whole.norm() or not math.isfinite(whole.norm()):
            return None
        after = probe(device)
        parts = [compute(low, high) for low, high in spans]
        bent_mean = describe_bends(few.bends[0], few.bends[1:])
        if step.batch.plan.num_micro > 1 or self._context.num_sharing > 1:
            compute(0, num, 1, gradients=False)
            if any(map(operator.eq, after, probe(device))):
                return "own_generator", _OWN_SEED
        if not any(part.units and math.isfinite(part.loss) for part in parts):
            return None
        tolerance = TOLERANCES["bfloat16" if few.dtypes.intersection(HALF) else "float16" if few.is_half else "float32"]
        if state := describe_state(whole, compute(0, num), few.set_in_calls[1:3], tolerance / 100):
            return "kept_state", f"{state}. {self._effect(step, 'Each device keeps its own')}. {wrong.STATE_FIX}"
        found = self._compare(few, whole, parts, spans, tolerance)
        if found.kind == "coupled":
            # With random numbers of its own, only the mean over many shows it.
            return self._coupled(step, found) if not few.draws() or _differs_on_average(few, spans) else None
        if bent_mean:
            return "wrong_units", bent_mean
        wrong_units = describe_wrong_units(whole, parts, found, is_random=False)
        if not (wrong_units or few.is_unweighted) and few.has_rows and (message := _bent_in_few(few, whole, tolerance)):
            return "wrong_units", message
        if not wrong_units or few.is_unweighted:
            if gap := _padding_gap(few, spans, parts, tolerance):
                effect = self._effect(step, wrong.PADDED_ALONE)
                return "padding", f"{wrong.PADDING} {gap:.1%}. {effect}. {wrong.PADDING_FIX}"
            if (message := wrong.describe_metrics(whole, parts, few.metrics)) and not few.draws():
                return "metric_units", message
            return ("unequal_reads", _UNEQUAL_READS) if self._reads_differ(step, few.first) else ("", "")
        # A collate_fn may count the units of its batch, and then those of a part are no rows of it.
        whole, *parts = (compute(low, high, anew=True) for low, high in ((0, num), *spans))
        again = fit_parts(whole, parts, tolerance)
        wrong_units = describe_wrong_units(whole, parts, again, is_random=few.draws())
        return "wrong_units" if wrong_units else "", wrong_units

    def _compare(
        self,
        few: FewSamples,
        whole: Gradient,
        parts: Sequence[Gradient],
        spans: Spans,
        tolerance: float,
    ) -> PartsFit:
        """Fit the parts to the whole; as finely as rounding allows where that finds a coupled loss."""
        found = coarse = fit_parts(whole, parts, tolerance)
        bound = tolerance
        rounds = few.is_half or (self._context.device.type != "cpu" and torch.float32 in few.dtypes)  # TF32 on a GPU
        if not (rounds or found.kind == "coupled" or describe_wrong_units(whole, parts, found, is_random=False)):
            # Where the gradients of the parts nearly cancel out, rounding is a larger part of the whole.
            cancelled = max(1.0, max(part.norm() for part in parts) / whole.norm())
            bound = (_SINGLE if torch.float32 in few.dtypes else _DOUBLE) * cancelled**2
            fine = fit_parts(whole, parts, bound)
            found = fine if fine.kind == "coupled" else found
        if found.kind == "coupled" and found.rest < _CERTAIN:
            # Where a model has learned its samples, rounding may be a large part of gradients that nearly vanish.
            narrow, few.quiet = few.quiet, in_double(few.quiet)
            try:
                found = fit_parts(few.compute(0, few.num), [few.compute(low, high) for low, high in spans], bound)
            except Exception:  # code that compares dtypes itself, as that of RNNs
                found, few.quiet = coarse, narrow
        return found

    def _read(self, step: Step, num_samples: int) -> tuple[Any, int, int] | None:
        """Return a batch of samples of this rank, or of others where it has too few, their number, and the first's position."""
        batch = step.batch
        plan = batch.plan
        if not isinstance(step.loader.batch_size, int | None) or plan.num_samples < _LEAST_SAMPLES:
            return None  # of a tuple of loaders a sample is none of one batch
        sizes = [plan.micro[0][rank] for rank in range(len(plan.shares))]
        own = max(range(len(sizes)), key=sizes.__getitem__) if self._context.groups.world_size == 1 else 0
        is_stream = checks.is_stream(step.loader.user_loader)
        # After an error, which may come from few samples, those of other ranks too.
        wanted = _LEAST_SAMPLES if num_samples == _NUM_SAMPLES[0] or is_stream else min(num_samples, sum(sizes))
        if sizes[own] >= wanted:
            return batch.micro(0, own, self._context.device).data, sizes[own], plan.slice_of(0, own)[0]
        low, high = plan.slice_of(0)
        high = min(high, low + num_samples)
        if high - low < _LEAST_SAMPLES or is_stream:
            return None
        return batch.read(low, high), high - low, low

    def _reads_differ(self, step: Step, position: int) -> bool:
        """Return whether a sample read twice has other values; its random numbers are the same each time."""
        if self._context.config.dataset_rng == "off":
            return False
        pairs = zip(*(leaves_of(step.batch.read(position, position + 1)) for _ in range(2)), strict=True)
        both = [(a.nan_to_num(), b.nan_to_num()) for a, b in pairs if torch.is_tensor(a) and torch.is_tensor(b)]
        return any(not torch.equal(a, b) for a, b in both)

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
    def _set_aside(self, step: Step, loss_fn: LossFn) -> Iterator[None]:
        context, models = self._context, self._models
        loader = step.loader.user_loader
        with contextlib.ExitStack() as stack:
            stack.enter_context(state_restored(models, loss_fn, loader.dataset, loader.collate_fn))
            others = randomness.other_gpus(models, context.device)
            stack.enter_context(randomness.set_aside(context.device, others))
            stack.enter_context(buffers_restored(models))
            stack.enter_context(weights_restored(models))
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
            "loss_fn couples the samples of its batch (contrastive, in-batch negatives, a statistic of the batch): two parts "
            f"of a few samples differ from the whole by {100 * found.misfit:.2g} %, whatever their weights. {effect}. To make it "
            f"exact, {COUPLED_FIX}"
        )

    def _effect(self, step: Step, why: str) -> str:
        plan = step.batch.plan
        if plan.num_micro > 1 or sum(share > 0 for share in plan.shares) > 1:
            return f"{why}, so this is not the loss of the global batch"
        return "It is exact now, with one device and one micro-batch, but would not be with more"


@contextlib.contextmanager
def _gradients_set_aside(models: Sequence[nn.Module]) -> Iterator[None]:
    """Take away gradients of parameters, and the script's hooks on them, which run once for each sum over ranks."""
    held = [(param, param.grad) for model in models for param in model.parameters()]
    hooks = SummedHooks([param for param, _ in held])
    hooks.take()
    for param, _ in held:
        param.grad = None
    try:
        yield
    finally:
        take_hooks([param for param, _ in held])
        hooks.put_back()
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


def _bent_in_few(few: FewSamples, whole: Gradient, tolerance: float) -> str:
    """Return what is wrong where the losses of the smallest parts have another mean; also in double, where rounding is small."""
    # Of an odd number the last part has one more, not one alone.
    bounds = [*range(0, few.num - FEW + 1, FEW), few.num]

    def look(whole: Gradient) -> str:
        fewest = [few.compute(low, high, gradients=False) for low, high in itertools.pairwise(bounds)]
        return describe_few(whole, fewest, tolerance)

    narrow = few.quiet
    try:
        if look(whole) and not few.draws():
            few.quiet = in_double(few.quiet)
            return look(few.compute(0, few.num, gradients=False))
    except Exception:  # code that wants more samples, or compares dtypes itself
        pass
    finally:
        few.quiet = narrow
    return ""


def _padding_gap(few: FewSamples, spans: Spans, parts: Sequence[Gradient], tolerance: float) -> float:
    """Return by how much a part's gradient changes with less padding; 0 where it doesn't."""
    for (low, high), part in zip(spans, parts, strict=True) if few.has_rows else ():
        if not _differs_in_padding(few.read_anew(low, high), few.cut(low, high)):
            continue
        # Random numbers of padded positions are others in a batch of another length.
        if difference(few.compute(low, high, 1), part) > tolerance:
            continue
        if (gap := difference(few.compute(low, high, anew=True), part)) > tolerance:
            return gap
    return 0.0


def _differs_on_average(few: FewSamples, spans: Spans) -> bool:
    seeds = range(NUM_SEEDS)
    wholes = [few.compute(0, few.num, shift, gradients=False) for shift in seeds]
    in_parts = [[few.compute(low, high, shift, gradients=False) for low, high in spans] for shift in seeds]
    return differs_on_average(wholes, in_parts)
