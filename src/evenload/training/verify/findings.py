"""Findings of a verification, as values: comparisons, causes, and the report of a script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evenload.stored_names import VERIFY_JSON
from evenload.training.verify.saved_state import Tracked
from evenload.training.verify.sides import Gradient

NUM_WORST = 5

TOLERANCES = {"float64": 1e-10, "float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
"""Largest ‖Δg‖/‖g‖ that counts as rounding, by dtype; see docs/verify.md."""

NARROW_INSIDE = 1e-5
"""Largest difference in float64 that a kernel computing in float32 explains."""


@dataclass(frozen=True)
class ParameterDifference:
    name: str
    difference: float
    """‖Δg‖/‖g‖ of this parameter alone."""
    part: float
    """Its ‖Δg‖ over the whole gradient's ‖g‖."""


@dataclass(frozen=True)
class Comparison:
    what: str
    """Parts left out; ``as it is`` for none."""
    difference: float
    """‖Δg‖/‖g‖ over all parameters."""
    norm: float
    """‖g‖ in one process."""
    loss_split: float
    loss_one_process: float
    worst: tuple[ParameterDifference, ...]
    unprepared: tuple[ParameterDifference, ...] = ()
    """Parameters of no prepared model that have a gradient and differ."""


@dataclass(frozen=True)
class DifferenceCause:
    """Cause of a difference, found by a test."""

    kind: str
    """``randomness``, ``weights``, ``sum``, ``coupled``, ``batch_norm``, ``unprepared``, ``data``, ``nondeterminism``,
    ``ranks``, ``not_finite``, ``unknown``."""
    finding: str
    fix: str


@dataclass(frozen=True)
class CallReport:
    call: int
    shares: tuple[int, ...]
    num_micro: int
    num_samples: int
    dtype: str
    why_not_float64: str
    tolerance: float
    equal: bool
    comparisons: tuple[Comparison, ...]
    causes: tuple[DifferenceCause, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerifyReport:
    equal: bool
    step: int
    devices: tuple[str, ...]
    precision: str
    calls: tuple[CallReport, ...]

    def table(self) -> dict[str, Any]:
        """Return the report as values of JSON; a number that isn't finite becomes None, as JSON has none."""
        table: dict[str, Any] = _finite(asdict(self))
        return table


def compare(what: str, tracked: Sequence[Tracked], split: Gradient, one: Gradient) -> Comparison:
    """Compare two gradients over the parameters of the prepared models; others are listed but not summed."""
    norms = [_norm(value) for value in one.values]
    gaps = [_gap(a, b) for a, b in zip(split.values, one.values, strict=True)]
    ours = [index for index, t in enumerate(tracked) if t.prepared]
    norm = math.hypot(*(norms[index] for index in ours))

    def worst(indices: Sequence[int]) -> tuple[ParameterDifference, ...]:
        differing = sorted((i for i in indices if gaps[i] != 0.0), key=lambda i: (math.isfinite(gaps[i]), -gaps[i]))
        return tuple(
            ParameterDifference(tracked[i].name, _ratio(gaps[i], norms[i]), _ratio(gaps[i], norm)) for i in differing
        )

    return Comparison(
        what,
        _ratio(math.hypot(*(gaps[index] for index in ours)), norm),
        norm,
        split.loss,
        one.loss,
        worst(ours)[:NUM_WORST],
        worst([index for index, t in enumerate(tracked) if not t.prepared]),
    )


def distance(first: Gradient, second: Gradient) -> float:
    """Return ‖a − b‖/‖b‖ over all tracked parameters."""
    gaps = [_gap(a, b) for a, b in zip(first.values, second.values, strict=True)]
    return _ratio(math.hypot(*gaps), second.norm())


def _norm(value: Any) -> float:
    return 0.0 if value is None else float(value.double().norm())


def _gap(first: Any, second: Any) -> float:
    if first is None or second is None:
        return _norm(second if first is None else first)
    return float((first.double() - second.double()).norm())


def _ratio(gap: float, norm: float) -> float:
    if gap == 0.0:
        return 0.0
    return gap / norm if norm else math.inf


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {VERIFY_JSON.get(key, key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
