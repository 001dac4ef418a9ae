"""Speeds of one job on numbers of devices, learned from its reports; used by the daemon and by the simulator. Pure.

A job that reports its step costs (`balance.scaling`) gets a model of them, which predicts all numbers of devices, and the
best batch for each where it chooses its batch. For any other job `balance.speed_curve` puts a curve through measured speeds.

A speed on other devices than the present ones loses weight with its age, so that a job which was slow there is tried there
again; each time that finds the same speed, the next trial comes after twice the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from evenload.balance.batch import efficiency
from evenload.balance.scaling import StepCosts, StepPoint, fit_scaling
from evenload.balance.speed_curve import rates_from
from evenload.scheduler.core.layout import layout_of
from evenload.scheduler.core.values import Device, Job

_HALF_LIFE_S = 1800.0
"""A speed on another number of devices counts half after so long; twice as long each time it is found again."""
_COSTS_HALF_LIFE_S = 6 * 3600.0
"""The same of step costs: several of them make one model."""
_LONGEST_HALF_LIFE_S = 24 * 3600.0
_SAME_SPEED = 1.2
"""Two measured speeds count as the same up to this factor."""
_SETTLED_S = 120.0
"""Time after which the speed of an attempt, an average over a minute, has nothing of its start."""
_REACH = 2
"""A model predicts for up to this many times the most devices that it was measured on, as in Pollux."""
_MOST_POINTS = 64

_Key = tuple[int, ...]
"""A number of devices; with step costs also that of hosts, the batch, and the number of micro-batches."""


@dataclass
class _Speed:
    rate: float
    at_s: float
    """When it was last measured."""
    half_life_s: float
    costs: StepCosts | None = None
    """As measured; `rate` may have drifted since."""
    cost_rate: float = 0.0
    """The rate when `costs` were measured."""

    def trust(self, now_s: float) -> float:
        return math.exp2(-max(0.0, now_s - self.at_s) / self.half_life_s)


@dataclass
class LearnedSpeeds:
    given: tuple[float, ...] = ()
    """Work a second on 1, 2, … devices by the owner; only its shape counts."""
    earlier: tuple[float, ...] = ()
    """The same as an earlier daemon learned it; the shape until a model is fitted to more than one number of devices."""
    _speeds: dict[_Key, _Speed] = field(default_factory=dict)
    _measured: tuple[int, _Key] = (0, ())
    """The attempt that was measured last, and on what."""
    _settled: float = 0.0
    """Its speed as last measured since it settled; 0 before."""
    _before: _Speed | None = None
    """The speed known for its devices when it began."""
    _costs: StepCosts | None = None
    """The newest."""

    def remember(self, num_devices: int, rate: float, at_s: float) -> None:
        """Take over a speed that an earlier daemon knew."""
        self._speeds[num_devices,] = _Speed(rate, at_s, _HALF_LIFE_S)

    def measure(self, job: Job, rate: float, now_s: float, costs: StepCosts | None = None, num_hosts: int = 1) -> None:
        """Note a job's speed on its devices, in work a second above 0, and its step costs if it reports them.

        Where it drifts within an attempt, it is taken to drift alike on other devices.
        """
        if costs is None and self._costs is not None:
            return  # the first steps of an attempt
        size = len(job.devices)
        key: _Key = (size,) if costs is None else (size, num_hosts, costs.batch_size, costs.num_micro)
        half_life_s = _HALF_LIFE_S if costs is None else _COSTS_HALF_LIFE_S
        speed_now = rate if costs is None else 1.0 / costs.step_s
        if self._measured != (job.attempt, key):
            if self._settled == 0:
                self._compare()
            self._measured, self._settled, self._before = (job.attempt, key), 0.0, self._speeds.get(key)
        if self._before is not None:
            half_life_s = self._before.half_life_s
        self._speeds.pop(key, None)  # the newest is the last
        self._speeds[key] = _Speed(speed_now, now_s, half_life_s, costs, speed_now)
        self._costs = costs
        if len(self._speeds) > _MOST_POINTS:
            del self._speeds[next(iter(self._speeds))]
        if now_s - max(job.attempt_began_s, job.since_s) < _SETTLED_S:
            return
        if self._settled > 0:
            for other, speed in self._speeds.items():
                speed.rate *= speed_now / self._settled if other != key else 1.0
        else:
            self._compare()
        self._settled = speed_now

    def learn(
        self, job: Job, rate: float, costs: StepCosts | None, devices: Mapping[str, Device], now_s: float
    ) -> tuple[float, ...] | None:
        """Note what a job reports on its devices; return its `rates` on up to as many as it could use of `devices`.

        None where nothing can be learned: the number of its devices is fixed, or it has no speed yet.
        """
        needs = job.spec.needs
        if rate <= 0 or not job.devices or needs.min_devices == needs.max_devices:
            return None
        num_hosts = len({devices[name].host for name in job.devices if name in devices}) or 1
        self.measure(job, rate, now_s, costs, num_hosts)
        most = max(len(job.devices), min(needs.max_devices, len(devices)))
        return self.rates(job, rate, most, layout_of(devices.values()).host_size, now_s)

    def rates(self, job: Job, rate: float, most: int, host_size: int, now_s: float) -> tuple[float, ...]:
        """Return the work a second on 1, 2, … devices, of which the job does `rate` on its present ones.

        `most`: the devices that it could use here. It gets a shorter curve where a model can't reach so far yet.
        """
        costs, size = self._costs, len(job.devices)
        trust = {key: speed.trust(now_s) for key, speed in self._speeds.items()}
        if costs is None:
            plain = {key[0]: speed.rate for key, speed in self._speeds.items() if len(key) == 1}
            return rates_from(plain, most, self.given, {num: trust[num,] for num in plain})
        points = [_point(key, speed, trust[key]) for key, speed in self._speeds.items() if speed.costs is not None]
        sizes = {point.num_devices for point in points}
        if len(sizes) == 1 and (shape := self.earlier or self.given):
            return rates_from({size: rate}, most, shape)
        model = fit_scaling(points)
        reach = max(size, min(most, _REACH * max(sizes)))
        measured_size, num_hosts, *_ = self._measured[1]
        if measured_size != size:
            num_hosts = -(-size // host_size)
        now_per_s = costs.batch_size / model.step_s(num_hosts, size, costs.batch_size, costs.cap)
        if costs.base_batch and costs.noise_samples is not None:
            now_per_s *= efficiency(costs.noise_samples, costs.base_batch, costs.batch_size)
        return tuple(rate * value / now_per_s for value in model.goodputs(costs, reach, host_size))

    def _compare(self) -> None:
        """Note if the last attempt found the speed again that was known before it."""
        before, speed = self._before, self._speeds.get(self._measured[1])
        if before is None or speed is None:
            return
        is_same = 1 / _SAME_SPEED <= speed.rate / before.rate <= _SAME_SPEED
        first_s = _HALF_LIFE_S if speed.costs is None else _COSTS_HALF_LIFE_S
        speed.half_life_s = min(_LONGEST_HALF_LIFE_S, 2 * before.half_life_s) if is_same else first_s
        self._before = speed


def _point(key: _Key, speed: _Speed, trust: float) -> StepPoint:
    if speed.costs is None:
        raise ValueError("a speed without step costs")
    num_devices, num_hosts = key[:2]
    point = StepPoint.of(speed.costs, num_hosts, num_devices, trust)
    slower = speed.cost_rate / speed.rate
    return point._replace(compute_s=point.compute_s * slower, step_s=point.step_s * slower)
