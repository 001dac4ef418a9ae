"""Tests for the usual causes of a difference between the split and one process, run on rank 0 in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from evenload.training.compute.weighting import IGNORED_LABEL, count_tokens
from evenload.training.verify.findings import DifferenceCause, distance
from evenload.training.verify.parts import differs_on_average, fit_parts
from evenload.training.verify.sides import Gradient, Span, Variant, VerifyCall, same_data

MAX_SLICES = 4
"""Number of micro-batches to test by their parts, at most."""

COUPLED_FIX = (
    "split it in two functions: encode(batch) returns a tensor or a tuple of tensors, samples first, and fn(*tensors) the loss "
    "from those of the whole global batch; then loss = step.backward(encode, batch_loss=fn) is exact (docs/contrastive.md)"
)

NUM_SEEDS = 12
"""Number of seeds over which the losses of parts are compared."""


def data_cause(call: VerifyCall) -> DifferenceCause | None:
    for span in call.slices():
        if not same_data(call.read(span), call.read_anew(span)):
            return DifferenceCause(
                "data",
                "reading the same samples twice gave different batches: random numbers are drawn outside of the dataset's "
                "__getitem__ (in collate_fn, or from a generator that it doesn't hold), or init(dataset_rng='off') is set",
                "draw them in __getitem__ with torch, numpy or random, where they are keyed by the sample",
            )
    return None


def repeat_cause(call: VerifyCall, one: Gradient, variant: Variant, tolerance: float) -> DifferenceCause | None:
    again = distance(call.one_process(call.slices(), variant), one)
    if again <= tolerance:
        return None
    return DifferenceCause(
        "nondeterminism",
        f"one process, run twice with the same seed, differs from itself by {again:.1e}: a nondeterministic "
        "operator, a generator of the script's own, or state that loss_fn changes",
        "call torch.use_deterministic_algorithms(True), and keep no counter or cache in loss_fn",
    )


def is_random(call: VerifyCall, one: Gradient, variant: Variant, tolerance: float) -> float:
    """Return the distance between two seeds in one process if it is more than rounding; else 0."""
    other = distance(call.one_process(call.slices(), variant, shift=1), one)
    return other if other > tolerance else 0.0


def loss_cause(call: VerifyCall, variant: Variant, tolerance: float) -> DifferenceCause | None:
    """Compute parts of micro-batches in one process; return the kind of loss if they don't add up to the whole."""
    for whole_span, spans in _cuts(call):
        whole = call.one_process([whole_span], variant)
        parts = [call.one_process([span], variant, within=[whole_span]) for span in spans]
        cause = _compare_parts(call, spans, whole, parts, tolerance)
        if cause is not None:
            return cause
    return None


def is_coupled_on_average(call: VerifyCall, variant: Variant) -> bool:
    """Return whether parts differ from the whole in their mean over several seeds: what no noise explains."""
    for whole_span, spans in _cuts(call):
        wholes = [call.one_process([whole_span], variant, shift=shift) for shift in range(NUM_SEEDS)]
        parts = [
            [call.one_process([span], variant, shift=shift, within=[whole_span]) for span in spans]
            for shift in range(NUM_SEEDS)
        ]
        if differs_on_average(wholes, parts):
            return True
    return False


def _cuts(call: VerifyCall) -> Iterator[tuple[Span, list[Span]]]:
    """Yield micro-batches, each with the parts that the ranks compute, or two of unequal length."""
    plan = call.batch.plan
    candidates = [m for m in range(plan.num_micro) if sum(plan.micro[m]) > 1]
    for m in candidates[:MAX_SLICES]:
        low, high = plan.slice_of(m)
        spans = [span for rank in range(len(plan.shares)) if (span := plan.slice_of(m, rank))[0] < span[1]]
        if len(spans) < 2:
            cut = low + max(1, 3 * (high - low) // 4)
            spans = [(low, cut), (cut, high)]
        yield (low, high), spans


def _compare_parts(
    call: VerifyCall, spans: Sequence[Span], whole: Gradient, parts: Sequence[Gradient], tolerance: float
) -> DifferenceCause | None:
    found = fit_parts(whole, parts, tolerance)
    if found.kind == "coupled":
        return _coupled(call, spans, found.misfit, found.rest)
    if found.kind == "weights":
        kept = [spans[index] for index in found.kept]
        return _weights(call, kept, found.alphas, found.used, weighted=whole.weighted, num_parts=len(parts))
    if found.kind == "sum" and all(abs(alpha - 1.0) < 1e-2 for alpha in found.alphas):
        return DifferenceCause(
            "sum",
            f"the losses of {len(parts)} parts of a micro-batch add up to the loss of the whole: it is a sum over samples, "
            "or divided by a fixed number, so it grows with the number of samples",
            "return a mean over the samples that loss_fn receives (reduction='mean'), or (loss, units)",
        )
    if found.kind == "sum":
        return DifferenceCause(
            "sum",
            "the loss is not a mean: the parts of a micro-batch enter the whole with weights "
            f"{', '.join(f'{alpha:.3g}' for alpha in found.alphas)}, which do not add up to 1",
            "return a mean over the samples that loss_fn receives, or (loss, units) for a mean over units",
        )
    return None


def _coupled(call: VerifyCall, spans: Sequence[Span], used: float, rest: float) -> DifferenceCause:
    finding = (
        f"in one process, the weighted mean over {len(spans)} parts of a micro-batch differs from the whole by {used:.1e}, "
        f"and no weights explain it ({rest:.1e} is left): the loss of a sample depends on other samples of the batch "
        "(contrastive, in-batch negatives, a statistic of the batch, a normalisation written by hand)"
    )
    if not _padded(call, spans):
        return DifferenceCause("coupled", finding, COUPLED_FIX)
    return DifferenceCause(
        "coupled",
        f"the parts are padded to other lengths than the whole, which changes a model that looks at padding; {finding}",
        f"pack or mask the padding, or pad all parts alike (docs/data-loading.md); if that changes nothing, {COUPLED_FIX}",
    )


def _weights(
    call: VerifyCall,
    spans: Sequence[Span],
    alphas: Sequence[float],
    used: Sequence[float],
    *,
    weighted: bool,
    num_parts: int,
) -> DifferenceCause:
    finding = (
        f"the loss is a mean over units other than {'the returned weights' if weighted else 'samples'}: the parts of a "
        f"micro-batch count {', '.join(f'{alpha:.4f}' for alpha in alphas)} in the whole, but enter with "
        f"{', '.join(f'{share:.4f}' for share in used)}"
    )
    if len(spans) < num_parts:
        finding += f"; the loss of {num_parts - len(spans)} parts is not finite, as where all labels are ignored"
    found = _counts_like(call, spans, alphas)
    if found is None:
        return DifferenceCause(
            "weights",
            finding,
            "return (loss, units): with units the number that the mean is over (tokens, pixels, ...)",
        )
    labels, counting = found
    return DifferenceCause(
        "weights", f"{finding}; {labels} hold -100, and counting the others explains it", f"return loss, {counting}"
    )


def _counts_like(call: VerifyCall, spans: Sequence[Span], alphas: Sequence[float]) -> tuple[str, str] | None:
    """Return the labels whose count gives the fitted shares, and the call that counts them."""
    readings = [_labels(call.read(span)) for span in spans]
    for name in set().union(*readings):
        ignored = [name in reading and bool((reading[name] == IGNORED_LABEL).any()) for reading in readings]
        if not any(ignored) or not all(name in reading for reading in readings):
            continue
        for shift in (True, False):
            counts = [float(count_tokens(reading[name], shift=shift)) for reading in readings]
            total = math.fsum(counts)
            if total and all(abs(n / total - alpha) < 1e-4 for n, alpha in zip(counts, alphas, strict=True)):
                given = "" if shift else ", shift=False"
                return f"the labels batch[{name}]", f"evenload.count_tokens(batch[{name}]{given})"
    return None


def _labels(data: Any) -> dict[str, torch.Tensor]:
    # Integer tensors of the batch, by the source text of their keys.
    items = data.items() if hasattr(data, "items") else enumerate(data) if isinstance(data, list | tuple) else ()
    return {
        repr(name): value
        for name, value in items
        if isinstance(value, torch.Tensor)
        and value.dim() >= 1
        and not value.is_floating_point()
        and not value.is_complex()
    }


def _padded(call: VerifyCall, spans: Sequence[Span]) -> bool:
    shapes = []
    for span in spans:
        leaves = [x for x in tree_leaves(call.read(span)) if isinstance(x, torch.Tensor)]
        shapes.append([tuple(leaf.shape[1:]) for leaf in leaves])
    return any(shape != shapes[0] for shape in shapes)


def batch_norm_cause(names: Sequence[str], kinds: Sequence[str], without: float) -> DifferenceCause:
    """Return the cause for local BatchNorm, after a comparison without it was equal."""
    few = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    subclassed = sorted(
        {kind for kind in kinds if kind not in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")}
    )
    fix = (
        f"use torch.nn.BatchNorm2d or its siblings instead of {', '.join(subclassed)}, which have their own forward"
        if subclassed
        else 'evenload.init(batch_norm="global"), the default'
    )
    return DifferenceCause(
        "batch_norm",
        f"{len(names)} BatchNorm modules take statistics of one rank alone ({few}); with them in evaluation mode the "
        f"difference is {without:.1e}",
        fix,
    )


def unprepared_cause(names: Sequence[str], differences: Sequence[float]) -> DifferenceCause:
    """Return the cause for parameters that loss_fn trains but no model given to run.prepare holds."""
    listed = ", ".join(f"{name} ({gap:.1e})" for name, gap in zip(names[:4], differences, strict=False))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return DifferenceCause(
        "unprepared",
        f"an optimizer steps parameters of no prepared model, whose gradients are not summed over ranks: {listed}{more}",
        "model, head, loader = run.prepare(model, head, loader)   # every trained module",
    )
