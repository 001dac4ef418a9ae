"""Remaining run time of a job whose work is unknown, from the run times of jobs that have ended. Pure.

Note [The index]
  A job that ran for a seconds is served until it ends, or for d seconds more: that takes E[min(X - a, d) | X > a] seconds and
  ends it with probability P(X - a <= d | X > a). Their ratio at the best d are the seconds per job that ends. Least first
  minimises the mean completion time (Gittins 1979; for queues Aalto, Ayesta and Righter 2009), and where the run time is
  known the ratio is the remaining time, so that both kinds of jobs compare.
  X is drawn from runs that were seen, and from a few assumed ones, each `_RATIO` times as long as the one before. Where
  nothing was seen, jobs take turns: each gets on until the next of the assumed times. Once some of them were seen, a job that
  is near their end goes before one that has just begun.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

_FIRST_S = 600.0
_RATIO = 2.0
_NUM_ASSUMED = 12
"""The longest is two weeks."""
_ASSUMED_WEIGHT = 0.25
"""Of an assumed run time, beside 1 of one that was seen on as many devices as the job requests."""
_OTHER_WEIGHT = 0.1
"""Of one that was seen on another number of devices."""
_SPREAD = ((math.exp(-0.35), 0.25), (1.0, 0.5), (math.exp(0.35), 0.25))
"""The next run may be that much shorter or longer: (factor, part of the weight)."""
_SIMILAR_SPREAD = tuple(
    (math.exp(0.7 * z), part) for z, part in ((-1.5, 0.1), (-0.75, 0.2), (0, 0.4), (0.75, 0.2), (1.5, 0.1))
)
"""The same for the estimate of similar runs."""
_REST_WEIGHT = 0.25
"""Of all other run times together, where there is such an estimate."""
_EXPONENT = 0.9
"""Jobs are taken to speed up like k^0.9."""


def work_of(seconds: float, num_devices: int) -> float:
    """Return the seconds that a run on so many devices would have taken on one."""
    return seconds * math.pow(num_devices, _EXPONENT)


@dataclass(frozen=True, slots=True)
class _Span:
    """The ratio of the note for all a from one run time up to the next."""

    end_s: float
    """The next run time."""
    left: float
    """Weight of what is left."""
    ends: float
    """Weight that ends at `end_s`."""
    best_ended: float
    """Weight that ends by the best d, as of the begin of the span."""
    best_served: float
    """Weighted seconds from `end_s` until then."""

    def index_s(self, age_s: float) -> float:
        served = self.left * (self.end_s - age_s)
        return min(served / self.ends, (served + self.best_served) / self.best_ended)


class _RunTimes:
    def __init__(self, weights: dict[float, float]) -> None:
        self._times = sorted(weights)
        self._weights = [weights[time_s] for time_s in self._times]
        self._left = [*accumulate(reversed(self._weights))][::-1]
        self._spans: dict[int, _Span] = {}

    def left_s(self, age_s: float) -> float:
        index = bisect_right(self._times, age_s)
        if index == len(self._times):
            return age_s
        span = self._spans.get(index)
        if span is None:
            span = self._spans[index] = self._span(index)
        return span.index_s(age_s)

    def _span(self, first: int) -> _Span:
        times, left = self._times, self._left
        begin_s = times[first - 1] if first else 0.0
        before = left[first] * (times[first] - begin_s)
        ended = self._weights[first]
        served, best = 0.0, (before / ended, ended, 0.0)
        for index in range(first + 1, len(times)):
            served += left[index] * (times[index] - times[index - 1])
            ended += self._weights[index]
            best = min(best, ((before + served) / ended, ended, served))
        return _Span(times[first], left[first], self._weights[first], best[1], best[2])


class PastRuns:
    """Run times of the newest jobs that have ended; unchangeable, what is computed of them is kept."""

    def __init__(self, runs: Iterable[tuple[int, float]] = ()) -> None:
        """Take numbers of devices and seconds, both of the minimum that the job could run on."""
        self._runs = tuple(runs)
        self._known: dict[tuple[int, float | None], _RunTimes] = {}
        self._fresh: dict[tuple[int, float | None], float] = {}
        """The result for a job that never ran."""

    def left_s(self, num_devices: int, age_s: float, estimate_s: float | None = None) -> float:
        """Return the seconds (see the note) of a job that requests so many devices and ran for `age_s` on these.

        `estimate_s`: what similar jobs took there; None without such.
        """
        key = (num_devices, estimate_s)
        if age_s == 0 and (fresh_s := self._fresh.get(key)) is not None:
            return fresh_s
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _RunTimes(self._weights(num_devices, estimate_s))
            self._fresh[key] = known.left_s(0.0)
        return known.left_s(age_s)

    def _weights(self, num_devices: int, estimate_s: float | None) -> dict[float, float]:
        weights = {_FIRST_S * _RATIO**power: _ASSUMED_WEIGHT for power in range(_NUM_ASSUMED)}

        def add(seconds: float, weight: float, spread: Iterable[tuple[float, float]]) -> None:
            for factor, part in spread:
                weights[seconds * factor] = weights.get(seconds * factor, 0.0) + part * weight

        for num, seconds in self._runs:
            add(seconds, 1.0 if num == num_devices else _OTHER_WEIGHT, _SPREAD)
        if estimate_s is not None:
            rest = _REST_WEIGHT / sum(weights.values())
            weights = {time_s: rest * weight for time_s, weight in weights.items()}
            add(estimate_s, 1.0, _SIMILAR_SPREAD)
        return weights


NOTHING_SEEN = PastRuns()
