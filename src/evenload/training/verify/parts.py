"""Compare a micro-batch with its parts: the kind of a loss.

For a mean over independent samples, the whole's gradient is G = Σ α_r g_r with g_r the gradients of the parts and α_r their
share of the weight. So the best fit of α shows the kind: all 1: the loss is a sum; a sum of 1, but not the returned weights:
weights are missing; no fit: samples are coupled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evenload.training.verify.findings import distance
from evenload.training.verify.sides import Gradient

_LEAST_GAP = 0.03
"""Least difference between parts and the whole, relative to the loss, that counts under random numbers."""


@dataclass(frozen=True)
class PartsFit:
    """The fit of the parts to the whole."""

    kind: str
    """``sum``, ``weights``, ``coupled``; empty for a mean with the returned weights."""
    kept: tuple[int, ...]
    """Indices of the parts that are finite and have units."""
    used: tuple[float, ...]
    """Of each kept part, its share of the returned weights."""
    alphas: tuple[float, ...]
    """Of each kept part, the share that fits best."""
    misfit: float
    """The rest that the returned weights leave, relative to the whole."""
    rest: float
    """The rest that the best shares leave."""


def fit_parts(whole: Gradient, parts: Sequence[Gradient], tolerance: float) -> PartsFit:
    """Find the kind of the loss; `tolerance` is the ‖Δg‖/‖g‖ that counts as rounding."""
    kept = tuple(i for i, part in enumerate(parts) if math.isfinite(part.loss) and part.units)
    finite = [parts[index] for index in kept]
    units = math.fsum(p.units for p in parts)
    used = [p.units / units for p in finite] if units else []
    misfit = _misfit(whole, finite, used)
    if len(finite) == len(parts) and misfit <= tolerance:
        return PartsFit("", kept, tuple(used), tuple(used), misfit, misfit)
    alphas = fit(whole, finite)
    # The fit solves normal equations, which costs half of the digits.
    rest = _misfit(whole, finite, alphas)
    if rest > max(math.sqrt(tolerance) / 10, tolerance):
        kind = "coupled"
    elif all(abs(alpha - 1.0) < 1e-2 for alpha in alphas) and len(finite) > 1:
        kind = "sum"
    elif not math.isnan(rest) and len(finite) == len(parts) and _are_close(alphas, used):
        kind = ""  # rounding: the parts do add up to the whole
    else:
        kind = "weights" if abs(math.fsum(alphas) - 1.0) < 1e-2 else "sum"
    return PartsFit(kind, kept, tuple(used), tuple(alphas), misfit, rest)


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


def differs_on_average(wholes: Sequence[Gradient], parts: Sequence[Sequence[Gradient]]) -> bool:
    """Return whether the losses of parts differ from that of the whole in their mean over random numbers.

    The n-th whole and the n-th parts have the same seed. A small difference may come from these samples alone (mixup).
    """
    units = [math.fsum(part.units for part in each) for each in parts]
    if not all(units):
        return False
    means = [math.fsum(part.loss * part.units for part in each) / n for each, n in zip(parts, units, strict=True)]
    gaps = [whole.loss - mean for whole, mean in zip(wholes, means, strict=True)]
    mean = math.fsum(gaps) / len(gaps)
    variance = math.fsum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)
    size = math.fsum(abs(whole.loss) for whole in wholes) / len(wholes)
    # Student's t with 11 degrees of freedom is beyond 6 once in 10,000 times.
    return abs(mean) > max(6.0 * math.sqrt(variance / len(gaps)), _LEAST_GAP * size)


def _are_close(alphas: Sequence[float], used: Sequence[float]) -> bool:
    return max(abs(alpha - share) for alpha, share in zip(alphas, used, strict=True)) < 1e-4


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
