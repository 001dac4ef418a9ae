"""Estimates of run times from the queue's own record: for new jobs, and for waiting ones when a similar one has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evenload.balance.run_times import PastRuns
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job, JobSpec
from evenload.scheduler.runtime_history import RunKey, RuntimeHistory, run_keys
from evenload.scheduler.store.reader import Reader

_MAX_READ = 1000
"""Number of jobs that succeeded before this daemon started and are read."""
_MAX_ENDED_KEYS = 100
"""Ended jobs that may still be in the cache of keys before it is cleaned."""


class RunEstimates:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._history: RuntimeHistory | None = None
        self._live_keys: dict[str, tuple[RunKey, ...]] = {}

    def with_estimate(self, spec: JobSpec, command: Sequence[str]) -> JobSpec:
        """Return a new job's spec with the estimate by similar jobs; the owner's own has priority."""
        return self._known().with_estimate(spec, run_keys(spec, command))

    def learn(self, job: Job, jobs: Mapping[str, Job], now_s: float) -> list[events.SpecChanged]:
        """Add the run of a job that has ended; return the changes of similar jobs that have not ended."""
        changed = self._known().learn(job, jobs, self._keys_of, now_s)
        if len(self._live_keys) > 2 * len(jobs) + _MAX_ENDED_KEYS:
            self._live_keys = {name: keys for name, keys in self._live_keys.items() if name in jobs}
        return changed

    def past(self) -> PastRuns:
        """Return the run times of the queue's newest jobs."""
        return self._known().past()

    def _known(self) -> RuntimeHistory:
        if self._history is None:
            self._history = RuntimeHistory()
            lines = self._reader.jobs(states=(JobState.SUCCEEDED,), newest_first=True, limit=_MAX_READ)
            for line in reversed(lines):
                if (job := self._reader.job(line.id)) is not None:
                    self._history.add(job, self._keys_of(job))
            self._live_keys.clear()
        return self._history

    def _keys_of(self, job: Job) -> tuple[RunKey, ...]:
        keys = self._live_keys.get(job.id)
        if keys is None:
            program = self._reader.program(job.id) or {}
            keys = self._live_keys[job.id] = run_keys(job.spec, program.get("command", ()))
        return keys
