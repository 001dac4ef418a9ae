"""Measurements of running jobs: their speed per number of devices, and the cost of a stop and resume.

Both come from the programs' reports alone. The cost of a restart is the time lost from the stop request until the first
report of progress of the next attempt, without waiting for devices and without the time of the steps in between. Before the
first stop of a job only its start counts. A restarted daemon has forgotten a stop in progress; it measures the next.

A speed on other numbers of devices than the present one loses weight with its age, so that a job which was slow there is
tried there again; each time that finds the same speed, the next trial comes after twice the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from evenload.scheduler.core import events
from evenload.scheduler.core.speed import rates_from
from evenload.scheduler.core.values import Job
from evenload.scheduler.daemon.runners import LiveAttempt
from evenload.scheduler.daemon.state import DaemonState
from evenload.scheduler.runner.files import RunnerResult

_NEWEST_WEIGHT = 0.5
"""Weight of the newest measured restart against the earlier ones."""
_MIN_CHANGE = 0.1
"""A measured restart that differs by less than this fraction is not recorded again."""


_HALF_LIFE_S = 1800.0
"""A speed on another number of devices counts half after so long; twice as long each time it is found again."""
_LONGEST_HALF_LIFE_S = 24 * 3600.0
_SAME_SPEED = 1.2
"""Two measured speeds count as the same up to this factor."""
_SETTLED_S = 120.0
"""Time after which the speed of an attempt, an average over a minute, has nothing of its start."""


@dataclass
class _Speed:
    rate: float
    at_s: float
    """When it was last measured."""
    half_life_s: float = _HALF_LIFE_S

    def trust(self, now_s: float) -> float:
        return math.exp2(-max(0.0, now_s - self.at_s) / self.half_life_s)


@dataclass
class _JobMeasurements:
    speeds: dict[int, _Speed] = field(default_factory=dict)
    """Number of devices → work per second, as last measured."""
    attempt: int = 0
    """The attempt that was measured last, and its number of devices."""
    size: int = 0
    settled: float = 0.0
    """Its speed as last measured since it settled; 0 before."""
    before: _Speed | None = None
    """What was known of its number of devices when it began."""
    stop_lost_s: float | None = None
    """Time lost by the last stop, until the start of the next attempt is measured."""
    num_restarts: int = 0
    """Number of measured restarts."""


def lost_s(seconds: float, steps: float, rate: float) -> float:
    """Return the time lost of `seconds`, in which a job of `rate` steps per second did `steps`."""
    return max(0.0, seconds - (steps / rate if rate > 0 else 0.0))


def _measure(known: _JobMeasurements, job: Job, rate: float, now_s: float) -> None:
    """Note a job's speed on its devices. Where it drifts within an attempt, it is taken to drift alike on other numbers."""
    size = len(job.devices)
    if known.attempt != job.attempt:
        if known.settled == 0:
            _compare(known)
        known.attempt, known.size, known.settled, known.before = job.attempt, size, 0.0, known.speeds.get(size)
    half_life_s = _HALF_LIFE_S if known.before is None else known.before.half_life_s
    known.speeds[size] = _Speed(rate, now_s, half_life_s)
    if now_s - job.attempt_began_s < _SETTLED_S:
        return
    if known.settled > 0:
        for other, speed in known.speeds.items():
            speed.rate *= rate / known.settled if other != size else 1.0
    else:
        _compare(known)
    known.settled = rate


def _compare(known: _JobMeasurements) -> None:
    """Note if the last attempt found the speed again that was known before it."""
    if known.before is None:
        return
    speed, before = known.speeds[known.size], known.before
    is_same = 1 / _SAME_SPEED <= speed.rate / before.rate <= _SAME_SPEED
    speed.half_life_s = min(_LONGEST_HALF_LIFE_S, 2 * before.half_life_s) if is_same else _HALF_LIFE_S
    known.before = speed


class Learning:
    def __init__(self, state: DaemonState) -> None:
        self._state = state
        self._known: dict[str, _JobMeasurements] = {}

    def reported(self, live: LiveAttempt, job: Job) -> events.Reported | None:
        """Return the event of an attempt's last report; None without a report."""
        report = live.report
        if report is None:
            return None
        rates = None
        if report.steps_per_s > 0 and job.devices and job.spec.needs.min_devices < job.spec.needs.max_devices:
            known, now_s = self._of(job), self._state.clock.now_s()
            _measure(known, job, report.steps_per_s, now_s)
            most = max(len(job.devices), min(job.spec.needs.max_devices, len(self._state.store.queue_state.devices)))
            speeds = {num: speed.rate for num, speed in known.speeds.items()}
            trust = {num: speed.trust(now_s) for num, speed in known.speeds.items()}
            rates = rates_from(speeds, most, job.spec.rates, trust)
        total = None if report.total is None else float(report.total)
        resumed_at = None if live.recorded_s or report.resumed_at is None else float(report.resumed_at)
        now_s = self._state.clock.now_s()
        return events.Reported(now_s, job.id, float(report.step), total, report.steps_per_s, rates, resumed_at)

    def stopped(self, live: LiveAttempt, result: RunnerResult | None, ended_s: float) -> None:
        """Measure the stop of an attempt that ended after a request and will go on later; `ended_s` is when its program ended."""
        report = live.report
        if (
            result is None
            or not result.requested
            or live.requested_s is None
            or live.fence.job not in self._state.store.queue_state.jobs
        ):
            return
        steps, rate = (0.0, 0.0) if report is None else (report.step - live.requested_step, report.steps_per_s)
        known = self._of(self._state.store.queue_state.jobs[live.fence.job])
        known.stop_lost_s = lost_s(ended_s - live.requested_s, max(0.0, steps), rate)

    def began(self, live: LiveAttempt, job: Job) -> events.SpecChanged | None:
        """Measure a restart by the attempt's first progress; return the event that records it, None where nothing changed."""
        first = live.first
        if first is None or not live.measures:
            return None
        known = self._of(job)
        rate = job.rates[min(len(job.devices), len(job.rates)) - 1] if job.rates and job.devices else job.rate_per_s
        start_s = lost_s(live.first_s - job.attempt_began_s, first.step - live.done_before, rate)
        before = job.spec.restart_s
        if known.stop_lost_s is None:
            measured_s = start_s
            if before is not None:
                return None  # a start alone is a worse estimate than the known one
        else:
            measured_s = known.stop_lost_s + start_s
            if known.num_restarts and before is not None:
                measured_s = _NEWEST_WEIGHT * measured_s + (1 - _NEWEST_WEIGHT) * before
            known.num_restarts += 1
            known.stop_lost_s = None
        if before is not None and abs(measured_s - before) <= _MIN_CHANGE * before:
            return None
        return events.SpecChanged(self._state.clock.now_s(), job.id, replace(job.spec, restart_s=round(measured_s, 3)))

    def forget(self, name: str) -> None:
        self._known.pop(name, None)

    def _of(self, job: Job) -> _JobMeasurements:
        known = self._known.get(job.id)
        if known is None:
            known = self._known[job.id] = _JobMeasurements(num_restarts=int(job.num_restarts > 0))
            if job.rates and job.rates != job.spec.rates:  # learned by an earlier daemon
                for attempt in self._state.reader.attempts(job.id):
                    size, at_s = len(attempt.devices), attempt.ended_s
                    if 0 < size <= len(job.rates):
                        known.speeds[size] = _Speed(job.rates[size - 1], job.reported_s if at_s is None else at_s)
        return known
