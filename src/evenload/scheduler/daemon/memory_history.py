"""What jobs took of a device's memory, for the next ones like them: of the same user, and of the same array or command.

Most is known from those that have ended. One that has run long enough to be measured tells something already, so that a
sweep of long jobs needn't wait for the first to end; it counts where nothing else is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from evenload.scheduler.core import events
from evenload.scheduler.core.states import ENDED
from evenload.scheduler.core.values import Job, JobSpec
from evenload.scheduler.store.reader import Reader

_LOOKS_BACK = 500
"""So many jobs that ended before this daemon began are looked at."""
_NEWS = 1.02
"""A peak is told to others when it is so many times the one they know."""

_MOST_KEPT = 100
"""So many jobs that have ended may still be in what is kept of those that haven't."""

_Key = tuple[str, ...]


class MemoryHistory:
    """Peaks of memory of jobs that shared their device, or might have."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._peaks: dict[_Key, int] | None = None
        """Of those that have ended."""
        self._so_far: dict[_Key, int] = {}
        """Of those that run."""
        self._of_waiting: dict[str, tuple[_Key, ...]] = {}

    def known(self, spec: JobSpec, command: Iterable[str]) -> JobSpec:
        """The wishes of a new job with what is known of others like it; what its owner says stands."""
        if not spec.share_device or spec.peak_bytes:
            return spec
        keys = _keys(spec, command)
        peak_bytes = max(self._known().get(key, 0) for key in keys)
        if not peak_bytes and not spec.needs.memory_bytes:
            peak_bytes = max(self._so_far.get(key, 0) for key in keys)
        return replace(spec, peak_bytes=peak_bytes) if peak_bytes else spec

    def learn(self, job: Job, jobs: Mapping[str, Job], now_s: float) -> list[events.SpecChanged]:
        """Learns from a job that has ended or was measured; what that tells of others that have not ended."""
        if not job.spec.share_device or not job.peak_bytes:
            return []
        keys, has_ended = self._keys_of(job), job.state in ENDED
        table = self._known() if has_ended else self._so_far
        for key in keys:
            table[key] = max(table.get(key, 0), job.peak_bytes)
        if len(self._of_waiting) > 2 * len(jobs) + _MOST_KEPT:
            self._of_waiting = {name: kept for name, kept in self._of_waiting.items() if name in jobs}
        told = []
        for other in jobs.values():
            if not other.spec.share_device or other.spec.user != job.spec.user or other.id == job.id:
                continue
            if not has_ended and (other.spec.needs.memory_bytes or other.peak_bytes):
                continue
            if job.peak_bytes > _NEWS * other.spec.peak_bytes and not set(keys).isdisjoint(self._keys_of(other)):
                told.append(events.SpecChanged(now_s, other.id, replace(other.spec, peak_bytes=job.peak_bytes)))
        return told

    def _known(self) -> dict[_Key, int]:
        if self._peaks is None:
            self._peaks = {}
            for line in self._reader.jobs(states=tuple(ENDED), newest_first=True, limit=_LOOKS_BACK):
                job = self._reader.job(line.id)
                if job is None or not job.spec.share_device or not job.peak_bytes:
                    continue
                for key in self._keys_of(job):
                    self._peaks[key] = max(self._peaks.get(key, 0), job.peak_bytes)
        return self._peaks

    def _keys_of(self, job: Job) -> tuple[_Key, ...]:
        keys = self._of_waiting.get(job.id)
        if keys is None:
            program = self._reader.program(job.id) or {}
            keys = _keys(job.spec, program.get("command", ()))
            if job.state not in ENDED:
                self._of_waiting[job.id] = keys
        return keys


def _keys(spec: JobSpec, command: Iterable[str]) -> tuple[_Key, ...]:
    by_command = ("command", spec.user, *command)
    return (by_command, ("array", spec.user, spec.array)) if spec.array else (by_command,)
