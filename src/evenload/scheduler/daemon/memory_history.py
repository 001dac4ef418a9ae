"""Memory peaks of past jobs, used for similar new ones: of the same user, and of the same array or command.

Most come from jobs that have ended. The peak of a running job that was measured counts where no other is known, so that a
sweep of long jobs needn't wait for the first to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from evenload.scheduler.core import events
from evenload.scheduler.core.states import ENDED
from evenload.scheduler.core.values import Job, JobSpec
from evenload.scheduler.store.reader import Reader

_MAX_READ = 500
"""Number of jobs that ended before this daemon started and are read."""
_MIN_GROWTH = 1.02
"""Similar jobs get a peak when it is this many times the one they have."""

_MAX_ENDED_KEYS = 100
"""Ended jobs that may still be in the cache of keys before it is cleaned."""

_Key = tuple[str, ...]


class MemoryHistory:
    """Memory peaks of jobs that shared their device, or were allowed to."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._peaks: dict[_Key, int] | None = None
        """Of jobs that have ended."""
        self._so_far: dict[_Key, int] = {}
        """Of running jobs."""
        self._live_keys: dict[str, tuple[_Key, ...]] = {}

    def with_known_peak(self, spec: JobSpec, command: Iterable[str]) -> JobSpec:
        """Return a new job's spec with the known peak of similar jobs; the owner's own value has priority."""
        if not spec.share_device or spec.peak_bytes:
            return spec
        keys = _keys(spec, command)
        peak_bytes = max(self._known().get(key, 0) for key in keys)
        if not peak_bytes and not spec.needs.memory_bytes:
            peak_bytes = max(self._so_far.get(key, 0) for key in keys)
        return replace(spec, peak_bytes=peak_bytes) if peak_bytes else spec

    def learn(self, job: Job, jobs: Mapping[str, Job], now_s: float) -> list[events.SpecChanged]:
        """Add the peak of a job that has ended or was measured; return the changes of similar jobs that have not ended."""
        if not job.spec.share_device or not job.peak_bytes:
            return []
        keys, has_ended = self._keys_of(job), job.state in ENDED
        table = self._known() if has_ended else self._so_far
        for key in keys:
            table[key] = max(table.get(key, 0), job.peak_bytes)
        if len(self._live_keys) > 2 * len(jobs) + _MAX_ENDED_KEYS:
            self._live_keys = {name: job_keys for name, job_keys in self._live_keys.items() if name in jobs}
        changed = []
        for other in jobs.values():
            if not other.spec.share_device or other.spec.user != job.spec.user or other.id == job.id:
                continue
            if not has_ended and (other.spec.needs.memory_bytes or other.peak_bytes):
                continue
            if job.peak_bytes > _MIN_GROWTH * other.spec.peak_bytes and not set(keys).isdisjoint(self._keys_of(other)):
                changed.append(events.SpecChanged(now_s, other.id, replace(other.spec, peak_bytes=job.peak_bytes)))
        return changed

    def _known(self) -> dict[_Key, int]:
        if self._peaks is None:
            self._peaks = {}
            for line in self._reader.jobs(states=tuple(ENDED), newest_first=True, limit=_MAX_READ):
                job = self._reader.job(line.id)
                if job is None or not job.spec.share_device or not job.peak_bytes:
                    continue
                for key in self._keys_of(job):
                    self._peaks[key] = max(self._peaks.get(key, 0), job.peak_bytes)
        return self._peaks

    def _keys_of(self, job: Job) -> tuple[_Key, ...]:
        keys = self._live_keys.get(job.id)
        if keys is None:
            program = self._reader.program(job.id) or {}
            keys = _keys(job.spec, program.get("command", ()))
            if job.state not in ENDED:
                self._live_keys[job.id] = keys
        return keys


def _keys(spec: JobSpec, command: Iterable[str]) -> tuple[_Key, ...]:
    by_command = ("command", spec.user, *command)
    return (by_command, ("array", spec.user, spec.array)) if spec.array else (by_command,)
