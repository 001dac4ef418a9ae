"""Cost of a stop and resume of one job, learned from its stops and starts; used by both queues that run programs. Pure.

It is the time lost from the stop request until the first report of progress of the next attempt, without waiting for devices
and without the time of the steps in between. Before the first stop of a job only its start counts.
"""

from __future__ import annotations

from dataclasses import dataclass

_NEWEST_WEIGHT = 0.5
"""Weight of the newest measurement against the earlier ones."""
_MIN_CHANGE = 0.1
"""A measurement that differs by less than this fraction is not recorded again."""


def lost_s(seconds: float, steps: float, rate: float) -> float:
    """Return the time lost of `seconds`, in which a job of `rate` steps per second did `steps`."""
    return max(0.0, seconds - (steps / rate if rate > 0 else 0.0))


def updated_s(measured_s: float, before_s: float | None, *, averages: bool = True) -> float | None:
    """Return the seconds to record now, an average with those of before; None where these stay."""
    if before_s is not None:
        if averages:
            measured_s = _NEWEST_WEIGHT * measured_s + (1 - _NEWEST_WEIGHT) * before_s
        if abs(measured_s - before_s) <= _MIN_CHANGE * before_s:
            return None
    return round(measured_s, 3)


@dataclass
class LearnedRestart:
    num_restarts: int = 0
    """Number of measured restarts."""
    stop_lost_s: float | None = None
    """Time lost by the last stop, until the start of the next attempt is measured."""

    def began(self, start_s: float, before_s: float | None) -> float | None:
        """Note the time that a start lost; return the cost of a restart, None where `before_s` stays."""
        if self.stop_lost_s is None:  # a start alone is a worse estimate than a known one
            return updated_s(start_s, None) if before_s is None else None
        measured_s = updated_s(self.stop_lost_s + start_s, before_s, averages=self.num_restarts > 0)
        self.num_restarts += 1
        self.stop_lost_s = None
        return measured_s
