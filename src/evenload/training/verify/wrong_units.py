"""Name what a few samples show of a loss, for `CouplingWatch`: no mean over its units, state of earlier calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from evenload.training.verify.findings import distance
from evenload.training.verify.parts import PartsFit
from evenload.training.verify.sides import Gradient

_LEAST_SHIFT = 0.01
"""Least difference between the share of a part that fits and the one it enters with; rounding in bfloat16 makes smaller ones."""
_EXPLAINED = 0.25
"""Most of the misfit that the shares that fit may leave."""
_EQUAL = 1e-6
STATE_FIX = (
    "Let what the whole global batch gave set it: in step.backward(encode, batch_loss=fn) fn(*tensors) keeps the tensors of the "
    "whole batch, and the loop body changes the state after it (docs/contrastive.md#state-that-follows-the-batch)"
)
PADDING = "the padding counts in the loss: padded to another length, a few samples gave a result that differs by"
PADDED_ALONE = "Each device's part is padded by itself"
PADDING_FIX = (
    "Leave it out (a mask, pack_padded_sequence, a mean over real positions), or pad all parts alike "
    "(docs/data-loading.md#pad-all-parts-alike)"
)


def describe_wrong_units(whole: Gradient, parts: Sequence[Gradient], found: PartsFit, *, is_random: bool) -> str:
    """Return what is wrong with the units of a loss, and what to write; empty where nothing certainly is.

    Args:
        whole: a few samples.
        parts: two parts of them.
        found: how the parts make up the whole.
        is_random: loss_fn draws random numbers that belong to no sample, so shares are no evidence.
    """
    if found.kind == "coupled" or len(found.kept) < len(parts):
        return ""
    all_units = {whole.units, *(part.units for part in parts)}
    if found.kind and all(abs(alpha - 1.0) < 1e-2 for alpha in found.alphas):
        if whole.weighted and all_units == {1.0}:
            return ""  # the number of what is rare, at least 1
        return (
            "the losses of two parts of a few samples add up to the loss of all of them: it is a sum over samples, or a sum "
            "divided by a fixed number such as the global batch size, so it depends on the sizes of the parts. Return a mean "
            "over the samples that loss_fn receives (reduction='mean', or .sum() / len(x)), or (loss, units), a mean over units"
        )
    if whole.weighted and len(all_units) == 1 and distance(parts[0], parts[1]) > _EQUAL:
        return (
            f"loss_fn returned the weight {whole.units:g} for a few samples and for a part of them too. A weight is the number "
            "of units of the micro-batch that the loss is a mean over; with a fixed one each micro-batch counts as much as any "
            "other, which is exact only while all have equally many samples. Return (loss, len(x)), (loss, tokens) or the loss"
        )
    shift = max(abs(alpha - share) for alpha, share in zip(found.alphas, found.used, strict=True))
    if not found.kind or is_random or shift < _LEAST_SHIFT or not found.rest < _EXPLAINED * found.misfit:
        return ""
    if found.kind == "sum":
        return (
            f"two parts of a few samples count {found.alphas[0]:.2f} and {found.alphas[1]:.2f} in the loss of all, not 1 "
            "together: a root or a ratio (RMSE, R2, a sum divided by max(number, 1)) is no mean. Let encode return what "
            "it is made of, for each sample, and compute it in batch_loss: step.backward(encode, batch_loss=fn)"
        )
    return (
        f"the loss is a mean over other units than {'the returned weights' if whole.weighted else 'samples'}: two parts of a "
        f"few samples count {_listed(found.alphas)} in it, and enter with {_listed(found.used)}. Return (loss, units), with the "
        "number of units that the mean is over (tokens, pixels, labels that count); a root of a mean (RMSE) needs batch_loss"
    )


def _listed(shares: Sequence[float]) -> str:
    total = math.fsum(shares)
    return " : ".join(f"{share / total:.2f}" for share in shares)


def describe_metrics(whole: Gradient, parts: Sequence[Gradient], metrics: Sequence[Mapping[str, float]]) -> str:
    """Return which metric of the whole (the first) is not the mean of those of its parts (the next ones); empty for none."""
    units = math.fsum(part.units for part in parts)
    for name, value in metrics[0].items() if units else ():
        of_parts = [
            (part.units, of[name]) for part, of in zip(parts, metrics[1:], strict=False) if part.units and name in of
        ]
        mean = math.fsum(num * of for num, of in of_parts) / units
        if abs(mean - value) > _LEAST_SHIFT * max([abs(value), *(abs(of) for _, of in of_parts)]):
            return (
                f"the metric {name!r} is no mean over the units of the loss: of a few samples it is {value:.4g}, and the mean of "
                f"its parts {mean:.4g}. step.metrics[{name!r}] is the mean over all parts, so it depends on the split. Return "
                "what it is made of as means (of a recall the hits and the positives, each .mean() over samples), and divide in "
                "the loop; of a sum return the mean"
            )
    return ""


def difference(one: Gradient, other: Gradient) -> float:
    """Return the relative difference of the gradients, or that of the losses where it is larger."""
    return max(distance(one, other), abs(one.loss - other.loss) / abs(other.loss) if other.loss else 0.0)


def describe_state(
    whole: Gradient, again: Gradient, buffers: Sequence[Sequence[tuple[str, torch.Tensor]]], tolerance: float
) -> str:
    """Return what shows state: a second call for the same samples, or `buffers` that calls with two parts of them changed."""
    for (name, one), (_, other) in zip(*buffers, strict=False):
        a, b = one.double().flatten(), other.double().flatten()
        if a.shape != b.shape or float((a - b).norm()) > tolerance * float(a.norm()):
            return f"loss_fn sets the buffer {name!r} from the samples that it receives"
    if not (gap := difference(again, whole)) > tolerance:
        return ""
    return (
        "loss_fn keeps state from call to call (an average, a centre, a queue, a counter), or draws from generators that are not "
        "seeded (torch's, numpy.random and random are): called again for the same samples, it gave a result that differs by "
        f"{gap:.1%}"
    )
