"""Cost of a rank, fitted robustly to the steps it ran: ``t = K * a + c * max(n, K)``.

Three things make this more than a least-squares line:

* **A spike is no trend.** Steps under the same share form a group, and only the group's median enters the line.
* **One share can't separate a from c.** Until the share has varied, the *shape* ``a / c`` is a prior: 0, every second is
  the samples', and ``per_sample_error_s`` is infinite. A shape too small makes a re-split stop short of the best, never
  pass it, and the re-split is the probe that corrects it: no planned probe steps are needed.
* **A device that changes speed keeps its shape.** Then the times of before are forgotten, but ``a / c`` stays as the
  prior of the new fit: half the clock makes both twice as slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from evenload.balance.values import Cost

MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise: sqrt(pi / 2)."""
_MAD_TO_SIGMA = 1.4826
_THIRD_TO_SIGMA = 0.967
"""A third of normal noise is beyond so many standard deviations."""
_FEW_POINTS, _MANY_POINTS = 8, 16
_FEW_POINTS_NOISE = 0.04
_LEAST_NOISE = 0.004
_LEAST_SLOPE = 0.02
"""c is at least this part of the mean seconds per sample: a device whose time doesn't grow at all has no optimum."""
_GUESS_ERROR = 0.5
_KNOWN_SLOPE = 0.6
_WANDER = 0.04
"""Relative change of a speed that is possible since another share ran: shares close together don't separate a from c."""
_TELLING_SPREAD = 1.02
"""Samples per micro-batch must differ by this factor to separate a from c."""


@dataclass(frozen=True)
class CostSample:
    step: int
    num_samples: int
    """Samples computed, those of weight 0 included: ``max(share, K)``."""
    num_micro: int
    seconds: float


@dataclass(frozen=True)
class OverheadRatio:
    """Prior belief about ``a / c``."""

    samples: float = 0.0
    """``a / c``: a micro-batch costs as much as so many samples, before its first."""
    error_samples: float | None = None
    """Its standard deviation; None for a guess: a may be half the time of a micro-batch."""

    @property
    def is_measured(self) -> bool:
        return self.error_samples is not None


@dataclass(frozen=True)
class Fit:
    """A cost with its confidence; `covariance` is (var a, cov a c, var c) in seconds squared."""

    cost: Cost
    covariance: tuple[float, float, float]
    noise: float
    """Scatter of one step's seconds, spikes aside, as a part of them (one standard deviation)."""
    is_telling: bool
    """True if a and c are separated, by these samples or by those behind the prior."""

    def predict_error(self, num_samples: int, num_micro: int) -> float:
        """Return the standard error of the predicted seconds, as a part of them."""
        computed = max(num_samples, num_micro)
        var_a, cov, var_c = self.covariance
        variance = num_micro**2 * var_a + 2 * num_micro * computed * cov + computed**2 * var_c
        return math.sqrt(max(variance, 0.0)) / self.cost.predict_s(num_samples, num_micro)

    def shape(self) -> OverheadRatio:
        """Return the prior after a change of speed: the same ``a / c``, less certain; a guess where c is vague."""
        if not self.cost.per_sample_error_s < _KNOWN_SLOPE * self.cost.per_sample_s:
            return OverheadRatio()
        a, c = self.cost.per_micro_s, self.cost.per_sample_s
        var_a, cov, var_c = self.covariance
        ratio = a / c
        error = math.sqrt(max(var_a - 2 * ratio * cov + ratio**2 * var_c, 0.0)) / c
        return OverheadRatio(ratio, 1.5 * error + 0.05 * ratio + 0.5)


def fit_cost(
    points: Sequence[CostSample], shape: OverheadRatio | None = None, least_noise: float = _LEAST_NOISE
) -> Fit:
    """Fit a rank's cost to steps at one speed, at least one, oldest first, all seconds above 0.

    Weighted least squares on the relative errors of the groups' medians, with the shape as one more equation
    ``a - shape * c = 0``; a below 0 becomes 0. The scatter is at least ``least_noise``, as a part of a step's seconds.
    """
    shape = shape or OverheadRatio()
    groups = group_samples(points)
    middles = {key: _middle(times) for key, times in groups.items()}
    noise = max(_scatter(groups, middles), least_noise)
    newest = points[-1]
    scale_s = middles.get((newest.num_samples, newest.num_micro), newest.seconds) / newest.num_micro

    # Normal equations of sum_g w_g * (1 - (K a + n c) / t_g)^2 + ((a - shape c) / error_s)^2.
    error_s = _GUESS_ERROR * scale_s
    if shape.error_samples is not None:
        error_s = shape.error_samples * scale_s / (newest.num_samples / newest.num_micro + shape.samples)
    prior = 1 / error_s**2
    aa, ac, cc, ya, yc = prior, -shape.samples * prior, shape.samples**2 * prior, 0.0, 0.0
    for (num_samples, num_micro), times in groups.items():
        variance = (MEDIAN_ERROR * noise) ** 2 / len(times)
        if (num_samples, num_micro) != (newest.num_samples, newest.num_micro):
            variance += _WANDER**2
        weight = 1 / variance
        per_a, per_c = num_micro / middles[num_samples, num_micro], num_samples / middles[num_samples, num_micro]
        aa += weight * per_a * per_a
        ac += weight * per_a * per_c
        cc += weight * per_c * per_c
        ya += weight * per_a
        yc += weight * per_c
    determinant = aa * cc - ac * ac
    a, c = (ya * cc - yc * ac) / determinant, (yc * aa - ya * ac) / determinant
    if a < 0:
        a, c = 0.0, yc / cc
    mean_s = scale_s * newest.num_micro / newest.num_samples
    if c < _LEAST_SLOPE * mean_s:
        c = _LEAST_SLOPE * mean_s
        a = max(ya - ac * c, 0.0) / aa
    covariance = cc / determinant, -ac / determinant, aa / determinant
    is_telling = shape.is_measured or is_varied(groups)
    per_sample_error_s = 1.96 * math.sqrt(covariance[2]) if is_telling else math.inf
    return Fit(Cost(a, c, per_sample_error_s), covariance, noise, is_telling)


def is_varied(groups: Iterable[tuple[int, int]]) -> bool:
    """Return whether the steps in groups of (samples, micro-batches) separate a from c."""
    density = [num_samples / num_micro for num_samples, num_micro in groups]
    return max(density) > _TELLING_SPREAD * min(density)


def group_samples(points: Iterable[CostSample]) -> dict[tuple[int, int], list[float]]:
    """Group seconds by (samples, micro-batches); groups of one or two count only if there is nothing better."""
    groups: dict[tuple[int, int], list[float]] = {}
    for point in points:
        key = point.num_samples, point.num_micro
        if key in groups:
            groups[key].append(point.seconds)
        else:
            groups[key] = [point.seconds]
    firm = {key: times for key, times in groups.items() if len(times) >= 3}
    return firm or groups


def _middle(times: Sequence[float]) -> float:
    # Of two, the lower one: what disturbs a step makes it longer.
    return median_low(times) if len(times) < 3 else median(times)


def _scatter(groups: dict[tuple[int, int], list[float]], middles: dict[tuple[int, int], float]) -> float:
    off = [abs(time_s / middles[key] - 1) for key, times in groups.items() for time_s in times]
    # Each median lies on one of its own points, or between two: that many carry no information.
    free = len(off) - len(groups)
    if free < 1:
        return _FEW_POINTS_NOISE
    noise = _MAD_TO_SIGMA * median(off)
    if len(off) >= _MANY_POINTS:
        # Under a quota most steps may agree and some take a period more: the median alone doesn't see these.
        noise = max(noise, sorted(off)[len(off) * 2 // 3] / _THIRD_TO_SIGMA)
    noise *= math.sqrt(len(off) / free)
    return max(noise, _FEW_POINTS_NOISE) if len(off) < _FEW_POINTS else noise
