"""Seconds of a job's steps on numbers of devices that it has not run on, fitted to the steps that it ran.

Note [The model]
  As in Pollux (Qiao et al. 2021, OSDI, section 3.2). With b samples of a micro-batch on each of k devices, computing takes
  C = a + c * b seconds, and the exchange of gradients N = n + m * (k - 2), with other n, m inside a host and between hosts.
  They overlap: the last micro-batch takes (C^g + N^g)^(1/g), those before it C. Each g of a few is tried: it turns what was
  measured into seconds of the exchange, lines are fitted to these, and the g that explains the steps best is kept.
  What was never seen costs nothing (between hosts: a tenth more than inside), so that it is tried.
  What was seen long ago counts less: its trust, from 1 to 0, takes n and m back to those of what was never seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evenload.balance.batch import efficiency

_GAMMAS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_SIMPLER = 1e-3
"""A small preference for little overlap, as in Pollux."""
_UNSEEN = 1.1
_GROWTH = 2 ** (1 / 4)
"""Ratio of the batches that are considered."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured costs of a job's steps on its present devices: medians over usual steps."""

    batch_size: int
    """Samples of a step, on all devices."""
    num_micro: int
    compute_s: float
    """Seconds that the slowest device computes in a step."""
    step_s: float
    """Seconds of a step, with the exchange of gradients."""
    memory_bytes: int = 0
    """Peak on the device that needs most; 0 if unknown."""
    cap: int = 0
    """Most samples of a micro-batch on a device; 0 for no limit."""
    base_batch: int = 0
    """The batch that the user chose, where the job may choose up to `max_batch` itself; 0 where its batch is fixed."""
    max_batch: int = 0
    noise_samples: float | None = None
    """Noise scale of the gradient (`balance.noise`); None if it is not measured."""

    def __post_init__(self) -> None:
        counts = (self.batch_size - 1, self.num_micro - 1, self.memory_bytes, self.cap, self.base_batch, self.max_batch)
        if not all(isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 2**62 for count in counts):
            raise ValueError(
                "step costs: expected integers, batch_size and num_micro at least 1, the others at least 0"
            )
        values = (self.compute_s, self.step_s, self.noise_samples or 0.0)
        if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in values) or self.step_s <= 0:
            raise ValueError("step costs: expected finite numbers, step_s above 0 and the others at least 0")

    def micro_batch(self, num_devices: int) -> float:
        """Return the samples of a micro-batch on each device."""
        return self.batch_size / num_devices / self.num_micro


class StepPoint(NamedTuple):
    """A measured step: seconds of its computing and of all of it, both of the last micro-batch."""

    num_hosts: int
    num_devices: int
    micro_batch: float
    compute_s: float
    step_s: float
    trust: float = 1.0

    @staticmethod
    def of(costs: StepCosts, num_hosts: int, num_devices: int, trust: float = 1.0) -> StepPoint:
        compute_s = max(min(costs.compute_s, costs.step_s) / costs.num_micro, 1e-9)
        step_s = max(costs.step_s - (costs.num_micro - 1) * compute_s, compute_s)
        return StepPoint(num_hosts, num_devices, costs.micro_batch(num_devices), compute_s, step_s, trust)


_Line = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ScalingModel:
    """The fitted seconds; see the note above."""

    compute: _Line
    """a and c."""
    inside: _Line
    """n and m inside a host."""
    between: _Line
    """n and m between hosts."""
    gamma: float

    def step_s(self, num_hosts: int, num_devices: int, batch_size: float, cap: int = 0) -> float:
        """Return the seconds of a step of `batch_size` samples, in as few micro-batches as `cap` allows."""
        share = batch_size / num_devices
        num_micro = max(1, math.ceil(share / cap - 1e-8)) if cap else 1
        compute_s = self.compute[0] + self.compute[1] * share / num_micro
        return (num_micro - 1) * compute_s + self._last_s(num_hosts, num_devices, compute_s)

    def _last_s(self, num_hosts: int, num_devices: int, compute_s: float) -> float:
        if num_devices < 2:
            return compute_s
        fixed_s, per_device_s = self.between if num_hosts > 1 else self.inside
        return _overlapped(compute_s, fixed_s + per_device_s * (num_devices - 2), self.gamma)

    def goodputs(self, costs: StepCosts, most: int, host_size: int) -> tuple[float, ...]:
        """Return samples a second on 1, 2, … `most` devices in as few hosts as can be, with the best batch for each.

        Where the job chooses its batch, samples are those of the user's batch (`balance.batch`).
        """
        sizes = batch_sizes(costs)
        worth = [efficiency(costs.noise_samples or 0.0, costs.base_batch, size) for size in sizes]
        worth = worth if len(sizes) > 1 else [1.0]
        return tuple(
            max(
                size * part / self.step_s(-(-num // host_size), num, size, costs.cap)
                for size, part in zip(sizes, worth, strict=True)
                if size >= num or size == sizes[-1]
            )
            for num in range(1, most + 1)
        )


def batch_sizes(costs: StepCosts) -> list[int]:
    """Return the batches that the job may choose, ascending; its present one if that is fixed, or no noise is measured."""
    low, high = costs.base_batch, costs.max_batch
    if not 0 < low < high or costs.noise_samples is None:
        return [costs.batch_size]
    steps = math.ceil(math.log(high / low, _GROWTH))
    return sorted({min(high, round(low * _GROWTH**step)) for step in range(steps + 1)})


def fit_scaling(points: Sequence[StepPoint]) -> ScalingModel:
    """Fit the model to at least one measured step, by the mean square of the logarithms' differences."""
    compute = _line([(p.micro_batch, p.compute_s, 1.0 / p.compute_s) for p in points], through_origin=True)
    inside = [p for p in points if p.num_hosts == 1 and p.num_devices > 1]
    between = [p for p in points if p.num_hosts > 1]
    best: tuple[float, ScalingModel] | None = None
    for gamma in _GAMMAS if inside or between else _GAMMAS[:1]:
        near = _exchange_line(inside, gamma) or (0.0, 0.0)
        far = _exchange_line(between, gamma) or _unseen(near)
        model = ScalingModel(compute, near, far, gamma)
        square = 0.0
        for p in points:
            predicted_s = model._last_s(p.num_hosts, p.num_devices, compute[0] + compute[1] * p.micro_batch)
            square += math.log(predicted_s / p.step_s) ** 2
        error = math.sqrt(square / len(points)) + _SIMPLER * (gamma - 1) ** 2
        if best is None or error < best[0]:
            best = error, model
    if best is None:
        raise ValueError("no measured step")
    model = best[1]
    near = _blended(model.inside, (0.0, 0.0), inside)
    return ScalingModel(compute, near, _blended(model.between, _unseen(near), between), model.gamma)


def _exchange_line(points: Sequence[StepPoint], gamma: float) -> _Line | None:
    rows = []
    for p in points:
        part = min(p.compute_s / p.step_s, 1.0)
        rows.append((p.num_devices - 2.0, p.step_s * (1.0 - part**gamma) ** (1.0 / gamma), 1.0 / p.step_s))
    return _line(rows) if rows else None


def _unseen(inside: _Line) -> _Line:
    return _UNSEEN * inside[0], _UNSEEN * inside[1]


def _blended(fitted: _Line, unseen: _Line, points: Sequence[StepPoint]) -> _Line:
    trust = max((p.trust for p in points), default=0.0)
    return trust * fitted[0] + (1 - trust) * unseen[0], trust * fitted[1] + (1 - trust) * unseen[1]


def _overlapped(compute_s: float, exchange_s: float, gamma: float) -> float:
    longest, shorter = max(compute_s, exchange_s), min(compute_s, exchange_s)
    return float(longest * (1.0 + (shorter / longest) ** gamma) ** (1.0 / gamma)) if longest > 0 else 0.0


def _line(rows: Sequence[tuple[float, float, float]], through_origin: bool = False) -> _Line:
    """Fit ``y = a + c x`` to rows (x, y, weight) by least squares with a, c >= 0; from one x alone, a or c is 0."""
    sum_w = sum(w * w for _, _, w in rows)
    mean_x, mean_y = sum(w * w * x for x, _, w in rows) / sum_w, sum(w * w * y for _, y, w in rows) / sum_w
    spread = sum(w * w * (x - mean_x) ** 2 for x, _, w in rows)
    if spread <= 1e-12 * max(1.0, mean_x * mean_x) * sum_w:
        return (0.0, mean_y / mean_x) if through_origin else (mean_y, 0.0)
    c = sum(w * w * (x - mean_x) * (y - mean_y) for x, y, w in rows) / spread
    a = mean_y - c * mean_x
    if c < 0:
        return mean_y, 0.0
    if a < 0:
        return 0.0, sum(w * w * x * y for x, y, w in rows) / sum(w * w * x * x for x, _, w in rows)
    return a, c
