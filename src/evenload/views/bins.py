"""`TimeBins`: sums, means and extremes of values over a time axis of bounded length."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

MAX_BINS = 480
"""Bins of a full axis; one between half and all of them are in use."""
_FIRST_WIDTH_S = 0.05


class TimeBins:
    """Values by name over equal bins; when the axis is full, neighbouring bins merge, so memory does not grow with time."""

    def __init__(self) -> None:
        self.width_s = _FIRST_WIDTH_S
        self.end_s = 0.0
        self._sums: dict[Hashable, list[float]] = {}
        self._lows: dict[Hashable, list[float]] = {}
        self._highs: dict[Hashable, list[float]] = {}

    @property
    def count(self) -> int:
        return max(1, math.ceil(self.end_s / self.width_s - 1e-9))

    def extend(self, end_s: float) -> None:
        """Let the axis reach to ``end_s`` at least."""
        self.end_s = max(self.end_s, end_s)
        while self.end_s > self.width_s * MAX_BINS:
            self._halve()

    def coarser(self, max_bins: int) -> TimeBins:
        """Return a copy with at most so many bins in use."""
        copied = TimeBins()
        copied.width_s, copied.end_s = self.width_s, self.end_s
        copied._sums = {name: table[:] for name, table in self._sums.items()}
        copied._lows = {name: table[:] for name, table in self._lows.items()}
        copied._highs = {name: table[:] for name, table in self._highs.items()}
        while copied.count > max_bins:
            copied._halve()
        return copied

    def _halve(self) -> None:
        self.width_s *= 2
        for table in self._sums.values():
            table[:] = [*map(float.__add__, table[::2], table[1::2]), *[0.0] * (MAX_BINS // 2)]
        for table in self._lows.values():
            table[:] = [*map(min, table[::2], table[1::2]), *[math.inf] * (MAX_BINS // 2)]
        for table in self._highs.values():
            table[:] = [*map(max, table[::2], table[1::2]), *[-math.inf] * (MAX_BINS // 2)]

    def spread(self, values: Mapping[Hashable, float], begin_s: float, end_s: float) -> None:
        """Add values that arose evenly between two times, each bin its part."""
        self.extend(end_s)
        first, last = self.index(begin_s), self.index(end_s)
        parts = [(first, 1.0)]
        if last > first:
            bounds = [begin_s, *(index * self.width_s for index in range(first + 1, last + 1)), end_s]
            parts = [(first + i, (bounds[i + 1] - bounds[i]) / (end_s - begin_s)) for i in range(last - first + 1)]
        for name, value in values.items():
            if value:
                table = self._sums.get(name) or self._sums.setdefault(name, [0.0] * MAX_BINS)
                for index, part in parts:
                    table[index] += value * part

    def sample(self, name: Hashable, value: float, at_s: float) -> None:
        """Add one observation, for `means` and `extremes`."""
        self.extend(at_s)
        index = self.index(at_s)
        if name not in self._lows:
            self._lows[name], self._highs[name] = [math.inf] * MAX_BINS, [-math.inf] * MAX_BINS
        self._lows[name][index] = min(self._lows[name][index], value)
        self._highs[name][index] = max(self._highs[name][index], value)
        for key, amount in (((name, "sum"), value), ((name, "count"), 1.0)):
            self._sums.setdefault(key, [0.0] * MAX_BINS)[index] += amount

    def sums(self, name: Hashable) -> list[float]:
        return self._sums.get(name, [0.0] * MAX_BINS)[: self.count]

    def means(self, name: Hashable) -> list[float | None]:
        """Return the mean of the observations in each bin; None without one."""
        pairs = zip(self.sums((name, "sum")), self.sums((name, "count")), strict=True)
        return [total / count if count else None for total, count in pairs]

    def extremes(self, name: Hashable) -> list[tuple[float, float] | None]:
        """Return the smallest and largest observation in each bin; None without one."""
        pairs = zip(self._lows.get(name, [])[: self.count], self._highs.get(name, [])[: self.count], strict=True)
        return [(low, high) if low <= high else None for low, high in pairs]

    def index(self, at_s: float) -> int:
        return min(MAX_BINS - 1, max(0, int(at_s / self.width_s)))
