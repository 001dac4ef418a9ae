"""Cheap hours of the day, in the queue's seconds, and what devices cost over a span of time. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from evenload.errors import ConfigError

_DAY_S = 86400.0
_TIME = r"(\d{1,2})(?::(\d\d))?"
_SPAN = re.compile(rf"\s*{_TIME}\s*-\s*{_TIME}\s*")


@dataclass(frozen=True, slots=True)
class Tariff:
    """Hours in which devices cost their cheap price."""

    spans: tuple[tuple[float, float], ...] = ()
    """Seconds of the day, [from, until), not overlapping, growing."""
    midnight_s: float = 0.0
    """The queue's time at some midnight. Days are taken to have 24 hours: a shell renews it after a change of summer time."""

    def cheap_s(self, began_s: float, ended_s: float) -> float:
        """Return the seconds of a span of time that are cheap."""
        spans = self._between(began_s, ended_s)
        return sum(max(0.0, min(ended_s, until_s) - max(began_s, from_s)) for from_s, until_s in spans)

    def next_change_s(self, now_s: float) -> tuple[bool, float]:
        """Return whether it is cheap now, and when that changes next; infinite without cheap hours."""
        for from_s, until_s in self._between(now_s, now_s + 2 * _DAY_S):
            if until_s > now_s:
                return (True, until_s) if from_s <= now_s else (False, from_s)
        return False, math.inf

    def num_spans(self, began_s: float, ended_s: float) -> int:
        """Return how many cheap spans a span of time meets."""
        return sum(until_s > began_s and from_s < ended_s for from_s, until_s in self._between(began_s, ended_s))

    def cost(self, price: float, cheap_price: float | None, began_s: float, ended_s: float) -> float:
        """Return what a device of these prices an hour costs over a span of time; None: no other price in cheap hours."""
        cheap_s = 0.0 if cheap_price is None else self.cheap_s(began_s, ended_s)
        return (price * (ended_s - began_s - cheap_s) + (cheap_price or 0.0) * cheap_s) / 3600.0

    def _between(self, began_s: float, ended_s: float) -> Iterator[tuple[float, float]]:
        if not self.spans:
            return
        day = math.floor((began_s - self.midnight_s) / _DAY_S)
        while (start_s := self.midnight_s + day * _DAY_S) < ended_s:
            for from_s, until_s in self.spans:
                yield start_s + from_s, start_s + until_s
            day += 1


@lru_cache(maxsize=64)
def tariff_of(cheap_hours: str, midnight_s: float = 0.0) -> Tariff:
    """Return the tariff of a setting such as ``"22-6"`` or ``"22:30-6,12-13"``; `ConfigError` for any other text."""
    spans: list[tuple[float, float]] = []
    for part in cheap_hours.split(",") if cheap_hours.strip() else ():
        match = _SPAN.fullmatch(part)
        from_s, until_s = (0.0, 0.0) if match is None else (_seconds(*match.group(1, 2)), _seconds(*match.group(3, 4)))
        if match is None or max(from_s, until_s) > _DAY_S or from_s == until_s:
            raise ConfigError(f"cheap_hours={cheap_hours!r}: expected hours of the day such as 22-6 or 22:30-6,12-13")
        spans += [(from_s, until_s)] if from_s < until_s else [(0.0, until_s), (from_s, _DAY_S)]
    spans = sorted(span for span in spans if span[0] < span[1])
    if any(before[1] > after[0] for before, after in pairwise(spans)):
        raise ConfigError(f"cheap_hours={cheap_hours!r}: these overlap; expected each hour once")
    return Tariff(tuple(spans), midnight_s)


def _seconds(hours: str, minutes: str | None) -> float:
    return int(hours) * 3600.0 + int(minutes or 0) * 60.0
