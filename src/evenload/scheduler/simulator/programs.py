"""Programs of simulated jobs: the interface, and programs described by a duration or a table of speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from evenload.balance.scaling import StepCosts
from evenload.errors import ConfigError
from evenload.scheduler.simulator.cluster import DeviceShape

_MOST_SCALING = 10.0
"""Far beyond any job's; n to a larger power can't be computed with."""


@dataclass(frozen=True)
class ProgramReport:
    done: float
    total: float
    """All of its work; the simulator hides or disturbs it where the queue isn't to know."""
    rate_per_s: float
    rates: tuple[float, ...] | None = None
    """Work a second on 1, 2, … devices by its own account; None if nothing is new since the last report."""
    costs: StepCosts | None = None
    """Its step costs, if it measures them."""
    is_learned: bool = False
    """True if the queue learns its speeds from its reports, as from those of a real job."""


class SimulatedProgram(Protocol):
    """A job's behaviour between events: its speed changes only at times that it knows beforehand."""

    is_done: bool

    def start(self, shape: DeviceShape) -> None:
        """Run on these devices from now on, from where it stood."""

    def until_change_s(self) -> float:
        """Return the seconds of running until its speed changes or it is done."""

    def advance(self, seconds: float) -> None:
        """Run for some seconds, at most until the next change."""

    def report(self) -> ProgramReport:
        """Return its present report."""


class TimedProgram:
    """A program of a known duration, as in recorded traces: ``speed = speed of its devices · (n / n₀)^scaling``.

    Of unequal devices an Evenload job has the mean speed, any other that of the slowest. Speeds measured on 1, 2, … devices
    replace the power, and are reported to the queue.
    """

    def __init__(
        self,
        duration_s: float,
        num_devices: int,
        scaling: float,
        rates: tuple[float, ...] = (),
        is_evenload: bool = False,
    ) -> None:
        """Take the duration on `num_devices` devices of speed 1."""
        self._is_evenload = is_evenload
        if not 0 < duration_s < math.inf:
            raise ConfigError(f"a job of {duration_s} s, or steps: expected a number above 0")
        if not -_MOST_SCALING <= scaling <= _MOST_SCALING:
            raise ConfigError(f"scaling={scaling}: expected a number such as 0.9, of at most {_MOST_SCALING:g}")
        if rates and (len(rates) < num_devices or not all(0 < rate < math.inf for rate in rates)):
            raise ConfigError(f"rates={rates}: expected numbers above 0 for 1, 2, … at least {num_devices} devices")
        self._total, self._num, self._scaling = duration_s, num_devices, scaling
        self._curve = tuple(rate / rates[num_devices - 1] for rate in rates)
        self._is_curve_reported = not rates
        self._done = 0.0
        self._rate = 0.0
        self.is_done = False

    def rate(self, shape: DeviceShape) -> float:
        num = shape.num_devices
        speedup = self._curve[min(num, len(self._curve)) - 1] if self._curve else (num / self._num) ** self._scaling
        return shape.speed(self._is_evenload) * float(speedup)

    def start(self, shape: DeviceShape) -> None:
        self._rate = self.rate(shape)

    def until_change_s(self) -> float:
        return (self._total - self._done) / self._rate

    def advance(self, seconds: float) -> None:
        self._done = min(self._total, self._done + self._rate * seconds)
        self.is_done = self._total - self._done <= 1e-9 * self._total

    def report(self) -> ProgramReport:
        rates = None if self._is_curve_reported else self._curve
        self._is_curve_reported = True
        return ProgramReport(self._done, self._total, self._rate, rates, is_learned=not self._curve)


class TypedProgram(TimedProgram):
    """A program of a number of steps, whose speed on each kind and number of devices is in a table (Gavel)."""

    def __init__(
        self, steps: float, name: str, rates: Mapping[tuple[str, int], float], is_evenload: bool = False
    ) -> None:
        """`rates`: (kind, number of devices) → steps a second, of devices with the kind's usual speed of 1."""
        super().__init__(steps, 1, 1.0, is_evenload=is_evenload)
        self._name, self._rates = name, rates

    def rate(self, shape: DeviceShape) -> float:
        """Return the steps a second; `ConfigError` if the table has no such kind or number of devices."""
        num = shape.num_devices
        known = [self._rates.get((kind, num)) for kind in set(shape.kinds)]
        if None in known or not all(known):
            sizes = sorted({n for kind, n in self._rates if kind in shape.kinds})
            raise ConfigError(
                f"job type {self._name!r} on {num} devices of kind {', '.join(sorted(set(shape.kinds)))}: the table of "
                f"speeds has {', '.join(map(str, sizes)) or 'no number of'} devices of such"
            )
        speeds = zip(shape.kinds, shape.speeds, strict=True)
        parts = tuple(self._rates[kind, num] * speed for kind, speed in speeds)
        return sum(parts) / num if self._is_evenload else min(parts)


def alone_s(program: SimulatedProgram, shape: DeviceShape) -> float:
    """Return the seconds a new program takes from start to end on such devices, undisturbed; uses it up."""
    program.start(shape)
    seconds = 0.0
    while not program.is_done:
        part_s = program.until_change_s()
        program.advance(part_s)
        seconds += part_s
    return seconds
