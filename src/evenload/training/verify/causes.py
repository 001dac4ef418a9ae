"""Tests for the usual causes of a difference between the split and one process, run on rank 0 in one process.

The loss is tested by its parts. For a mean over independent samples, the whole's gradient is G = Σ α_r g_r with g_r the
gradients of the parts and α_r their share of the weight. So the best fit of α shows the cause: all 1: the loss is a sum; a
sum of 1, but not the returned weights: weights are missing; no fit: samples are coupled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from evenload.training.compute.weighting import IGNORED_LABEL, count_tokens
from evenload.training.verify.findings import DifferenceCause, distance
from evenload.training.verify.sides import Gradient, Span, Variant, VerifyCall, same_data

MAX_SLICES = 4
"""Number of micro-batches to test by their parts, at most."""


def data_cause(call: VerifyCall) -> DifferenceCause | None:
    for span in call.slices():
        if not same_data(call.read(span), call.read_anew(span)):
            return DifferenceCause(
                "data",
                "reading the same samples twice gave different batches: random numbers are drawn outside of the dataset's "
                "__getitem__ (in collate_fn, or from the dataset's own generator), or init(dataset_rng='off') is set",
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
    plan = call.batch.plan
    candidates = [m for m in range(plan.num_micro) if sum(plan.micro[m]) > 1]
    for m in candidates[:MAX_SLICES]:
        whole_span = plan.slice_of(m)
        spans = [span for rank in range(len(plan.shares)) if (span := plan.slice_of(m, rank))[0] < span[1]]
        if len(spans) < 2:
            low, high = whole_span
            cut = low + max(1, 3 * (high - low) // 4)
            spans = [(low, cut), (cut, high)]
        whole = call.one_process([whole_span], variant)
        parts = [call.one_process([span], variant, within=[whole_span]) for span in spans]
        cause = _compare_parts(call, spans, whole, parts, tolerance)
        if cause is not None:
            return cause
    return None


def _compare_parts(
    call: VerifyCall, spans: Sequence[Span], whole: Gradient, parts: Sequence[Gradient], tolerance: float
) -> DifferenceCause | None:
    finite = [part for part in parts if math.isfinite(part.loss) and part.units]
    units = math.fsum(p.units for p in parts)
    used = [p.units / units for p in finite] if units else []
    if len(finite) == len(parts) and _misfit(whole, finite, used) <= tolerance:
        return None
    alphas = fit(whole, finite)
    # The fit solves normal equations, which costs half of the digits.
    rest = _misfit(whole, finite, alphas)
    if rest > max(math.sqrt(tolerance) / 10, tolerance):
        return _coupled(call, spans, _misfit(whole, finite, used), rest)
    if all(abs(alpha - 1.0) < 1e-2 for alpha in alphas) and len(finite) > 1:
        return DifferenceCause(
            "sum",
            f"the losses of {len(parts)} parts of a micro-batch add up to the loss of the whole: it is a sum over samples, "
            "or divided by a fixed number, so it grows with the number of samples",
            "return a mean over the samples that loss_fn receives (reduction='mean'), or (loss, units)",
        )
    if not math.isnan(rest) and len(finite) == len(parts):
        gaps = [abs(alpha - share) for alpha, share in zip(alphas, used, strict=True)]
        if max(gaps) < 1e-4:
            return None  # rounding: the parts do add up to the whole
    if abs(math.fsum(alphas) - 1.0) < 1e-2:
        kept = [span for span, part in zip(spans, parts, strict=True) if math.isfinite(part.loss) and part.units]
        return _weights(call, kept, alphas, used, weighted=whole.weighted, num_parts=len(parts))
    return DifferenceCause(
        "sum",
        "the loss is not a mean: the parts of a micro-batch enter the whole with weights "
        f"{', '.join(f'{alpha:.3g}' for alpha in alphas)}, which do not add up to 1",
        "return a mean over the samples that loss_fn receives, or (loss, units) for a mean over units",
    )


def fit(whole: Gradient, parts: Sequence[Gradient]) -> list[float]:
    """Return the α that minimise ‖G − Σ α_r g_r‖, by the normal equations; the losses are one more coordinate."""
    if not parts:
        return []
    scale = whole.norm() / abs(whole.loss) if whole.loss and math.isfinite(whole.loss) else 0.0
    gram = torch.tensor([[a.dot(b) + scale**2 * a.loss * b.loss for b in parts] for a in parts], dtype=torch.float64)
    right = torch.tensor([a.dot(whole) + scale**2 * a.loss * whole.loss for a in parts], dtype=torch.float64)
    if not bool(torch.isfinite(gram).all() and torch.isfinite(right).all()):
        return [math.nan] * len(parts)
    alphas: list[float] = (torch.linalg.pinv(gram, hermitian=True, rtol=1e-12) @ right).tolist()
    return alphas


def _misfit(whole: Gradient, parts: Sequence[Gradient], alphas: Sequence[float]) -> float:
    """‖G − Σ α_r g_r‖/‖G‖, or that of the losses where it is larger."""
    values: list[torch.Tensor | None] = []
    for index in range(len(whole.values)):
        terms = [
            part.values[index].double() * alpha  # type: ignore[union-attr]
            for part, alpha in zip(parts, alphas, strict=True)
            if part.values[index] is not None
        ]
        values.append(sum(terms[1:], terms[0]) if terms else None)
    loss = math.fsum(part.loss * alpha for part, alpha in zip(parts, alphas, strict=True)) if parts else math.nan
    gap = abs(loss - whole.loss) / abs(whole.loss) if whole.loss else 0.0
    misfit = distance(Gradient(values, loss), whole)
    return misfit if misfit != misfit else max(misfit, gap)


def _coupled(call: VerifyCall, spans: Sequence[Span], used: float, rest: float) -> DifferenceCause:
    finding = (
        f"in one process, the weighted mean over {len(spans)} parts of a micro-batch differs from the whole by {used:.1e}, "
        f"and no weights explain it ({rest:.1e} is left): the loss of a sample depends on other samples of the batch "
        "(contrastive, in-batch negatives, a statistic of the batch, a normalisation written by hand)"
    )
    if _padded(call, spans):
        finding += "; the parts are also padded to different lengths than the whole, which affects an unmasked model"
    return DifferenceCause(
        "coupled",
        finding,
        "no split can compute such a loss: train it on one device (-d 0, -d cpu), or write it as a mean over samples",
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
