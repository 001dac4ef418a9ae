"""Detect a change in a rank's speed from its recent steps and their fit.

A change is seen in two ways. *Steps out of the band*: three in a row that agree with each other, or four that needn't,
are a step change; a spike is alone, and chance spikes in a row seldom agree. *A slow slide*: the median of the last
eight steps leaves the fit by more than the noise explains. Only the steps since then are kept, and the shape a / c.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, stdev

from evenload.balance.cost import MEDIAN_ERROR, CostSample, Fit, OverheadRatio, fit_cost, group_samples, is_varied

_WINDOW = 64
_RUN = 3
_LONG_RUN = 4
"""So many steps out of the band are a change even where they don't agree, as when it came in the middle of a step."""
_RECENT = 8
_RECENT_EVERY = 4
_LEAST_BAND, _MOST_BAND = 1.2, 1.6
_LEAST_RANGE = 0.08
"""Three steps agree where they lie within five standard deviations of the noise, or within this."""
_LEAST_SLIDE = 0.02
_SURE = 3.0
_TAKEN_BACK_WITHIN = 128
"""A change that is undone so few steps later was none; so many steps without a change make up for one."""
_MOST_TAKEN_BACK = 4
_MOST_VISITS = 12


@dataclass(frozen=True)
class SpeedChange:
    """A rank is `factor` times as slow as before (below 1: faster), since `step`."""

    step: int
    factor: float


class SpeedTracker:
    """The steps of one rank at its present speed, and the cost fitted to them."""

    def __init__(self) -> None:
        self._points: deque[CostSample] = deque(maxlen=_WINDOW)
        self._shape = OverheadRatio()
        self._fit: Fit | None = None
        self._odd: list[CostSample] = []
        self._since_look = 0
        self._was_varied = False
        self._last_change: SpeedChange | None = None
        self._num_taken_back = 0
        self._num_quiet = 0

    @property
    def has_steps(self) -> bool:
        """True if there is anything to fit, or a fit of before."""
        return self._fit is not None or bool(self._points)

    @property
    def num_steps(self) -> int:
        return len(self._points)

    def begin_anew(self) -> None:
        """Forget the level of the seconds: the rank was out. The ratio a / c stays, and the last fit until there is a new one."""
        if self._fit is not None:
            self._shape = self._fit.shape()
        self._points.clear()
        self._odd.clear()
        self._was_varied = False
        self._since_look = 0

    @property
    def fit(self) -> Fit:
        if self._fit is None:
            return self.refit()
        return self._fit

    def add(self, point: CostSample) -> SpeedChange | None:
        """Add one step; return the change it completes. The steps before a change are then discarded."""
        self._points.append(point)
        if self._fit is None:
            return None
        self._num_quiet += 1
        if self._num_quiet >= _TAKEN_BACK_WITHIN:
            self._num_quiet = 0
            self._num_taken_back = max(0, self._num_taken_back - 1)
        return self._step_change(point) or self._slide(point)

    def seen_s(self, num_samples: int, num_micro: int) -> float | None:
        """Return the seconds measured at the present speed for exactly this share; None with fewer than three steps."""
        same = [p.seconds for p in self._points if (p.num_samples, p.num_micro) == (num_samples, num_micro)]
        return median(same) if len(same) >= _RUN else None

    def refit(self, least_noise: float = 0.0) -> Fit:
        """Fit all the kept steps; discard those that contradict the steps under the newest share."""
        if not self._points and self._fit is not None:
            return self._fit
        fit = self._refit_as_is(least_noise)
        newest = self._points[-1]
        same = [p for p in self._points if (p.num_samples, p.num_micro) == (newest.num_samples, newest.num_micro)]
        if 3 <= len(same) < len(self._points):
            off = median(p.seconds for p in same) / fit.cost.predict_s(newest.num_samples, newest.num_micro)
            allowed = max(0.08, 4 * MEDIAN_ERROR * fit.noise / math.sqrt(len(same)))
            if abs(math.log(off)) > allowed:
                self._points = deque(same, maxlen=_WINDOW)
                return self._refit_as_is(least_noise)
        return fit

    def _refit_as_is(self, least_noise: float) -> Fit:
        varied = is_varied(group_samples(self._points))
        if self._was_varied and not varied and self._fit is not None:
            # The steps under other shares have left the window; their ratio a / c stays.
            self._shape = self._fit.shape() if self._fit.shape().is_measured else self._shape
        self._was_varied = varied
        self._fit = fit_cost(self._points, self._shape, max(least_noise, 0.004))
        return self._fit

    def _step_change(self, point: CostSample) -> SpeedChange | None:
        side = self._side(point)
        if not side:
            self._odd.clear()
            return None
        if self._odd and self._side(self._odd[-1]) != side:
            self._odd.clear()
        self._odd.append(point)
        extra = self._extra_run(side)
        if len(self._odd) < _RUN + extra:
            return None
        ratios = [self._ratio(p) for p in self._odd[-_RUN:]]
        if (
            max(ratios) < (1 + max(_LEAST_RANGE, 5 * self.fit.noise)) * min(ratios)
            or len(self._odd) >= _LONG_RUN + extra
        ):
            return self._forget_before(self._odd[-_RUN], self._odd[0].step)
        return None

    def _extra_run(self, side: int) -> int:
        """Return how many more steps out of the band a change takes: the rank was there before, or came back before."""
        first = self._odd[0]
        under = first.num_samples, first.num_micro
        visits = 0
        for p in self._points:
            if p.step >= first.step or visits == _MOST_VISITS:
                break
            visits += (p.num_samples, p.num_micro) == under and self._side(p) == side
        return _RUN * ((1 << self._num_taken_back) - 1) + (2 * visits if visits > 1 else 0)

    def _slide(self, point: CostSample) -> SpeedChange | None:
        self._since_look += 1
        if self._since_look < _RECENT_EVERY or len(self._points) < _RECENT + _RECENT_EVERY:
            return None
        self._since_look = 0
        recent = [self._points[i] for i in range(-_RECENT, 0)]
        if any((p.num_samples, p.num_micro) != (point.num_samples, point.num_micro) for p in recent):
            return None
        moved = abs(math.log(median(self._ratio(p) for p in recent)))
        scatter = MEDIAN_ERROR * self.fit.noise / math.sqrt(_RECENT)
        if moved <= self._least_slide(point, scatter):
            return None
        # The slow scatter takes much longer to find, and only raises the limit.
        is_slide = moved > self._least_slide(point, max(scatter, self._slow_scatter(point)))
        return self._forget_before(recent[0], recent[0].step) if is_slide else None

    def _least_slide(self, point: CostSample, scatter: float) -> float:
        error = math.hypot(scatter, self.fit.predict_error(point.num_samples, point.num_micro))
        return max(_LEAST_SLIDE, _SURE * (1 << self._num_taken_back) * error)

    def _slow_scatter(self, point: CostSample) -> float:
        """Return the scatter of the medians of eight steps in a row, before the last eight; 0 where there are few.

        By the differences of neighbours, so that a slide doesn't hide itself.
        """
        older = [p for p in self._points if (p.num_samples, p.num_micro) == (point.num_samples, point.num_micro)][
            :-_RECENT
        ]
        logs = [
            math.log(median(self._ratio(p) for p in older[i : i + _RECENT]))
            for i in range(0, len(older) - _RECENT + 1, _RECENT)
        ]
        return stdev(later - earlier for earlier, later in pairwise(logs)) / math.sqrt(2) if len(logs) > _RUN else 0.0

    def _forget_before(self, first: CostSample, since: int) -> SpeedChange:
        before = self.fit
        kept = [p for p in self._points if p.step >= first.step]
        factor = median(self._ratio(p) for p in kept)
        self._points = deque(kept, maxlen=_WINDOW)
        self._shape = before.shape()
        self._was_varied = False
        self._odd.clear()
        self._since_look = 0
        self.refit(before.noise)
        change, last = SpeedChange(since, factor), self._last_change
        self._last_change, self._num_quiet = change, 0
        if last is not None and since - last.step < _TAKEN_BACK_WITHIN:
            back, forth = math.log(factor), math.log(last.factor)
            if back * forth < 0 and min(abs(back), abs(forth)) > 0.5 * max(abs(back), abs(forth)):
                self._num_taken_back = min(self._num_taken_back + 1, _MOST_TAKEN_BACK)
        return change

    def _ratio(self, point: CostSample) -> float:
        return point.seconds / self.fit.cost.predict_s(point.num_samples, point.num_micro)

    def _band(self) -> float:
        return min(max(_LEAST_BAND, 1 + 4 * self.fit.noise), _MOST_BAND)

    def _side(self, point: CostSample) -> int:
        """Return 1 if the step was longer than any ratio a / c explains, -1 if shorter, 0 within the band."""
        band, ratio = self._band(), self._ratio(point)
        if 1 / band < ratio < band:
            return 0
        cost = self.fit.cost
        if not cost.per_sample_error_s < 0.2 * cost.per_sample_s:
            # The shape is a guess: between "all time is the samples'" and "none is", anything may be the guess's fault.
            known = self._nearest(point)
            level_s = cost.predict_s(known.num_samples, known.num_micro) * point.num_micro / known.num_micro
            grown = point.num_samples * known.num_micro / (known.num_samples * point.num_micro)
            if min(1.0, grown) / band < point.seconds / level_s < max(1.0, grown) * band:
                return 0
        return 1 if ratio > 1 else -1

    def _nearest(self, point: CostSample) -> CostSample:
        """Return the first of the other steps whose share is nearest to that of `point`; itself if there is no other."""
        found, least = point, math.inf
        for other in self._points:
            if other is not point and (distance := abs(other.num_samples - point.num_samples)) < least:
                if not distance:
                    return other  # usually the first: the rest is looked at where shares change
                found, least = other, distance
        return found
