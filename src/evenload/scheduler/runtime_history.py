"""Run times of a user's earlier jobs, as estimates for similar new ones; used by the daemon and by the simulator. Pure.

Similar are, the nearest first: elements of the same array, jobs with the same command, and jobs that run the same script
with other options. An estimate is the median of the newest of them that succeeded. It is for the job's minimum of devices:
work is taken to speed up like k^0.9, or by the measured speeds of an elastic job. Of a job that gives its number of steps, it is
that number times their median time of a step, if they reported steps: a run of other options may be a short trial.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from evenload.balance.run_times import PastRuns, work_of
from evenload.scheduler.core.events import SpecChanged
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job, JobSpec

_NUM_RUNS = 15
"""Of so many newest runs the median is taken."""
_LEAST_CHANGE = 0.1
"""An estimate that differs by less than this fraction is not changed."""
_MOST_WORDS = 4
_NUM_PAST = 100
"""Of so many newest jobs of the queue the run times are known to the policies."""

RunKey = tuple[str, ...]
_SOURCES = {"array": "of its array", "command": "of the same command", "script": "of the same script"}


@dataclass(frozen=True, slots=True)
class RunEstimate:
    seconds: float
    """On the job's minimum of devices."""
    source: str
    """For people: ``5 runs of the same command``."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Seconds that a run would have taken on one device."""

    whole_s: float
    step_s: float
    """0 if it reported no steps."""


@dataclass
class RuntimeHistory:
    _runs: dict[RunKey, deque[_Run]] = field(default_factory=dict)
    """The newest."""
    _newest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_NUM_PAST))
    _past: PastRuns | None = None

    def add(self, job: Job, keys: Sequence[RunKey]) -> bool:
        """Note a job that has ended, under its `run_keys`; return whether it counts."""
        seconds = _seconds_on_minimum(job)
        if job.state is not JobState.SUCCEEDED or seconds <= 0:
            return False
        self._newest.append((job.spec.needs.min_devices, seconds))
        self._past = None
        least = job.spec.needs.min_devices
        run = _Run(work_of(seconds, least), work_of(_step_s_on_minimum(job), least))
        for key in keys:
            self._runs.setdefault(key, deque(maxlen=_NUM_RUNS)).append(run)
        return True

    def past(self) -> PastRuns:
        """Return the run times of the queue's newest jobs, of all users."""
        if self._past is None:
            self._past = PastRuns(self._newest)
        return self._past

    def learn(
        self, job: Job, jobs: Mapping[str, Job], keys_of: Callable[[Job], Sequence[RunKey]], now_s: float
    ) -> list[SpecChanged]:
        """Note a job that has ended; return the changes of similar jobs of its user that have not."""
        keys = keys_of(job)
        if not self.add(job, keys) or not keys:
            return []
        changed = []
        for other in jobs.values():
            if other.spec.user != job.spec.user or other.id == job.id:
                continue
            others = keys_of(other)
            if not set(keys).isdisjoint(others) and (spec := self.with_estimate(other.spec, others)) != other.spec:
                changed.append(SpecChanged(now_s, other.id, spec))
        return changed

    def estimate(self, spec: JobSpec, keys: Sequence[RunKey]) -> RunEstimate | None:
        """Return the estimate for a job by the first of its `run_keys` that has a run; None without one."""
        for key in keys:
            if runs := self._runs.get(key):
                steps_s = [run.step_s for run in runs if run.step_s > 0]
                if spec.total is not None and steps_s:
                    work = spec.total * median(steps_s)
                else:
                    work = median(run.whole_s for run in runs)
                seconds = work / work_of(1.0, spec.needs.min_devices)
                num = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
                return RunEstimate(round(seconds, 3), f"{num} {_SOURCES[key[0]]}")
        return None

    def with_estimate(self, spec: JobSpec, keys: Sequence[RunKey]) -> JobSpec:
        """Return the spec with the estimate; the same one if its owner gave an estimate, or nothing new is known."""
        if keys and not spec.run_key:
            spec = replace(spec, run_key=" ".join(keys[-1]))
        if spec.estimate_s is not None and not spec.estimate_source:
            return spec
        found = self.estimate(spec, keys)
        if found is None:
            return spec
        if spec.estimate_s is not None and abs(found.seconds - spec.estimate_s) <= _LEAST_CHANGE * spec.estimate_s:
            return spec
        return replace(spec, estimate_s=found.seconds, estimate_source=found.source)


def run_keys(spec: JobSpec, command: Sequence[str]) -> tuple[RunKey, ...]:
    """Return what a job's runs are known by, the nearest first."""
    keys: list[RunKey] = [("array", spec.user, spec.array)] if spec.array else []
    if command:
        keys.append(("command", spec.user, *command))
        if script := _script(command):
            keys.append(("script", spec.user, *script))
    return tuple(keys)


def _script(command: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command up to the file that it runs; empty if no word names one."""
    for num, word in enumerate(command[:_MOST_WORDS], start=1):
        if word.endswith((".py", ".sh")):
            return tuple(command[:num])
    return ()


def _seconds_on_minimum(job: Job) -> float:
    """Return the time a job would have taken on its minimum of devices."""
    least = job.spec.needs.min_devices
    if least == job.spec.needs.max_devices:
        return job.held_s
    step_s = _step_s_on_minimum(job)
    return job.done * step_s if step_s > 0 and job.done > 0 else job.service_device_s / least


def _step_s_on_minimum(job: Job) -> float:
    """Return the seconds that a step takes a job on its minimum of devices; 0 if it reported no speed."""
    needs = job.spec.needs
    rate = job.rate_per_s if needs.min_devices == needs.max_devices else 0.0
    if not rate and len(job.rates) >= needs.min_devices:
        rate = job.rates[needs.min_devices - 1]
    return 1.0 / rate if rate > 0 else 0.0
