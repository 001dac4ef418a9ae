"""Name a loss or a weight that the parts of a batch show to be no mean over its units, for `CouplingWatch`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evenload.training.verify.findings import distance
from evenload.training.verify.parts import PartsFit
from evenload.training.verify.sides import Gradient

_LEAST_SHIFT = 0.05
"""Least difference between the share of a part that fits and the one it enters with; rounding in bfloat16 makes smaller ones."""
_EXPLAINED = 0.25
"""Most of the misfit that the shares that fit may leave."""
_EQUAL = 1e-6


def describe_wrong_units(whole: Gradient, parts: Sequence[Gradient], found: PartsFit, *, is_random: bool) -> str:
    """Return what is wrong with the units of a loss, and what to write; empty where nothing certainly is.

    Args:
        whole: a few samples.
        parts: two halves of them.
        found: how the halves make up the whole.
        is_random: loss_fn draws random numbers that belong to no sample, so shares are no evidence.
    """
    if found.kind == "coupled" or len(found.kept) < len(parts):
        return ""
    all_units = {whole.units, *(part.units for part in parts)}
    if found.kind and all(abs(alpha - 1.0) < 1e-2 for alpha in found.alphas):
        if whole.weighted and all_units == {1.0}:
            return ""  # the number of what is rare, at least 1
        return (
            "the losses of two halves of a few samples add up to the loss of all of them: it is a sum over samples, or a sum "
            "divided by a fixed number such as the global batch size, so it depends on the sizes of the parts. Return a mean "
            "over the samples that loss_fn receives (reduction='mean', or .sum() / len(x)), or (loss, units), a mean over units"
        )
    if whole.weighted and len(all_units) == 1 and distance(parts[0], parts[1]) > _EQUAL:
        return (
            f"loss_fn returned the weight {whole.units:g} for a few samples and for half of them too. A weight is the number "
            "of units of the micro-batch that the loss is a mean over; with a fixed one each micro-batch counts as much as any "
            "other, which is exact only while all have equally many samples. Return (loss, len(x)), (loss, tokens) or the loss"
        )
    shift = max(abs(alpha - share) for alpha, share in zip(found.alphas, found.used, strict=True))
    if found.kind != "weights" or is_random or shift < _LEAST_SHIFT or not found.rest < _EXPLAINED * found.misfit:
        return ""
    return (
        f"the loss is a mean over other units than {'the returned weights' if whole.weighted else 'samples'}: two halves of a "
        f"few samples count {_listed(found.alphas)} in it, and enter with {_listed(found.used)}. Return (loss, units), with the "
        "number of units that the mean is over (tokens, pixels, labels that count)"
    )


def _listed(shares: Sequence[float]) -> str:
    total = math.fsum(shares)
    return " : ".join(f"{share / total:.2f}" for share in shares)
