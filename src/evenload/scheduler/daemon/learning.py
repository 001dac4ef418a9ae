"""Measurements of running jobs: their speed per number of devices, and the cost of a stop and resume.

Both come from the programs' reports alone; `learned_speeds` makes a curve of speeds of them, `learned_restarts` the cost of a
restart. A restarted daemon has forgotten a stop in progress; it measures the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from evenload.scheduler.core import events
from evenload.scheduler.core.values import Job
from evenload.scheduler.daemon.runners import LiveAttempt
from evenload.scheduler.daemon.state import DaemonState
from evenload.scheduler.learned_restarts import LearnedRestart, lost_s, updated_s
from evenload.scheduler.learned_speeds import LearnedSpeeds
from evenload.scheduler.runner.files import RunnerResult


@dataclass
class _JobMeasurements:
    speeds: LearnedSpeeds = field(default_factory=LearnedSpeeds)
    restart: LearnedRestart = field(default_factory=LearnedRestart)


class Learning:
    def __init__(self, state: DaemonState) -> None:
        self._state = state
        self._known: dict[str, _JobMeasurements] = {}

    def reported(self, live: LiveAttempt, job: Job) -> events.Reported | None:
        """Return the event of an attempt's last report; None without a report."""
        report = live.report
        if report is None:
            return None
        now_s, devices = self._state.clock.now_s(), self._state.store.queue_state.devices
        rates = self._of(job).speeds.learn(job, report.steps_per_s, report.costs, devices, now_s)
        total = None if report.total is None else float(report.total)
        resumed_at = None if live.recorded_s or report.resumed_at is None else float(report.resumed_at)
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
        known.restart.stop_lost_s = lost_s(ended_s - live.requested_s, max(0.0, steps), rate)

    def began(self, live: LiveAttempt, job: Job) -> events.SpecChanged | None:
        """Measure a restart by the attempt's first progress; return the event that records it, None where nothing changed."""
        first = live.first
        if first is None or not live.measures:
            return None
        known = self._of(job)
        rate = job.rates[min(len(job.devices), len(job.rates)) - 1] if job.rates and job.devices else job.rate_per_s
        start_s = lost_s(live.first_s - job.attempt_began_s, first.step - live.done_before, rate)
        measured_s = known.restart.began(start_s, job.spec.restart_s)
        if measured_s is None:
            return None
        return events.SpecChanged(self._state.clock.now_s(), job.id, replace(job.spec, restart_s=measured_s))

    def resized(self, job: Job, seconds: float) -> events.SpecChanged | None:
        """Measure a change without a stop, in which the devices that came or went were idle; return as `began` does."""
        num_changed = abs(len(job.target) - len(job.devices))
        idle_s = seconds * num_changed / max(len(job.target), len(job.devices))
        if (resize_s := updated_s(idle_s, job.spec.resize_s)) is None:
            return None
        return events.SpecChanged(self._state.clock.now_s(), job.id, replace(job.spec, resize_s=resize_s))

    def forget(self, name: str) -> None:
        self._known.pop(name, None)

    def _of(self, job: Job) -> _JobMeasurements:
        known = self._known.get(job.id)
        if known is None:
            is_learned = bool(job.rates) and job.rates != job.spec.rates  # by an earlier daemon
            speeds = LearnedSpeeds(job.spec.rates, job.rates if is_learned else ())
            known = self._known[job.id] = _JobMeasurements(speeds, LearnedRestart(int(job.num_restarts > 0)))
            if is_learned:
                for attempt in self._state.reader.attempts(job.id):
                    size, at_s = len(attempt.devices), attempt.ended_s
                    if 0 < size <= len(job.rates):
                        speeds.remember(size, job.rates[size - 1], job.reported_s if at_s is None else at_s)
        return known
