"""`RayQueue`: the queue on Ray: its state, and its log in a `QueueStore`, from which a restarted actor continues.

This module does not use Ray: `ray.controller` carries out what it decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenload.errors import QueueError
from evenload.job.protocol import ProgressReport
from evenload.scheduler.backends.interface import JobStatus, is_element_of
from evenload.scheduler.core import events
from evenload.scheduler.core.decide import decide, plan
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.states import WITH_DEVICES, JobState
from evenload.scheduler.core.values import After, Device, Job
from evenload.scheduler.job_file import JobFile, as_table, job_from, to_spec
from evenload.scheduler.store.event_rows import from_row
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.writer import QueueStore
from evenload.stored_names import RAY_LOG


class RayQueue:
    """The jobs of a Ray cluster; used from one thread. What `record` took is on disk after `commit`."""

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        """Open the queue in `root`. Jobs that were running are lost, because their programs ended with the old actor."""
        self._clock = clock
        self._store = QueueStore(root, holder="the queue on Ray")
        if (log := root / RAY_LOG).exists():
            self._import_log(log)
        self._reader = Reader(root)
        for job in list(self.queue_state.jobs.values()):
            if job.state in WITH_DEVICES:
                self.record(events.Lost(clock(), job.id, "the queue on Ray was restarted"))
        self.commit()

    @property
    def queue_state(self) -> QueueState:
        """The present state, including what is not yet committed."""
        return self._store.queue_state

    def record(self, event: events.QueueEvent, extra: Mapping[str, Any] | None = None) -> None:
        self._store.record(event, extra=extra)

    def commit(self) -> None:
        """Write all recorded events to disk."""
        self._store.commit()

    def close(self) -> None:
        self._reader.close()
        self._store.close()

    def submit(self, job: JobFile, user: str) -> str:
        """Add a job or an array and return its id; raise a `QueueError` where it is rejected."""
        newest = self._reader.jobs(newest_first=True, limit=1)
        number = str(1 + int(newest[0].id.partition("_")[0]) if newest else 1)
        job = replace(job, after=tuple(self._expanded(job.after)))
        first = to_spec(job, user, index=job.indices()[0], array=number)
        if refusal := self.queue_state.refusal(first):
            raise QueueError(f"{job.name or 'the job'} is rejected: {refusal}")
        for index in job.indices():
            spec = to_spec(job, user, index=index, array=number)
            event = events.Submitted(self._clock(), number if index is None else f"{number}_{index}", spec)
            self.record(event, {"file": as_table(job), "index": index})
        self.commit()
        return number

    def program(self, job: str) -> tuple[JobFile, int | None]:
        """Return what a job runs, and its index in an array."""
        row = self._reader.program(job)
        if row is None:
            raise QueueError(f"no job {job} in this queue")
        return job_from(row["file"]), row["index"]

    def cancel(self, job: str, user: str) -> list[str]:
        """Cancel a job or an array; return the jobs whose programs must be stopped, or raise a `QueueError`."""
        names = [name for name in self.queue_state.jobs if is_element_of(name, job)]
        if not names:
            ended = [line for line in self._reader.jobs() if is_element_of(line.id, job)]
            raise QueueError(f"job {job} has ended: {ended[0].state}" if ended else f"no job {job} in this queue")
        running = []
        for name in names:
            found = self.queue_state.jobs[name]
            if found.spec.user != user:
                raise QueueError(f"job {name} belongs to {found.spec.user}; {user} can't cancel it")
            if found.state is JobState.PENDING:
                self.record(events.Cancelled(self._clock(), name, f"cancelled by {user}"))
            else:
                self.record(events.StopRequested(self._clock(), name, JobState.CANCELLED, f"cancelled by {user}"))
                running.append(name)
        self.commit()
        return running

    def decide(self) -> tuple[events.Command, ...]:
        """Decide what to do now; the decisions are on disk when this returns."""
        commands = decide(self.queue_state.snapshot(), self._clock())
        for command in commands:
            self.record(command)
        self.commit()
        return commands

    def update_devices(self, devices: Sequence[Device]) -> None:
        """Add new devices; close those whose node has left, and remove them once no job holds them."""
        present = {device.id for device in devices}
        for device in devices:
            if device.id not in self.queue_state.devices:
                self.record(events.DeviceAdded(self._clock(), device))
        for name in list(self.queue_state.devices):
            if name in present:
                continue
            if name not in self.queue_state.closed:
                self.record(events.DeviceClosed(self._clock(), name, "its node has left Ray"))
            if name not in self.queue_state.holder:
                self.record(events.DeviceRemoved(self._clock(), name))
        self.commit()

    def update_progress(self, job: str, report: ProgressReport) -> None:
        """Record a job's progress. A job that reports can save and resume, so it may be preempted from now on."""
        found = self.queue_state.jobs[job]
        if found.done == report.step and found.rate_per_s == report.steps_per_s:
            return
        self.record(events.Reported(self._clock(), job, report.step, report.total, report.steps_per_s))
        if not found.spec.preemptible and self.program(job)[0].saves is None:
            self.record(events.SpecChanged(self._clock(), job, replace(found.spec, preemptible=True)))

    def describe(self, ids: Sequence[str]) -> list[JobStatus]:
        self.commit()
        waits = plan(self.queue_state.snapshot(), self._clock(), explain=True).waits
        names = [line.id for line in self._reader.jobs() if not ids or any(is_element_of(line.id, job) for job in ids)]
        jobs = [self.queue_state.jobs.get(name) or self._reader.job(name) for name in names]
        return [_status_of(job, waits.get(job.id, ""), self.queue_state) for job in jobs if job is not None]

    def _expanded(self, afters: Iterable[After]) -> Iterable[After]:
        """Replace an array by all of its elements."""
        for after in afters:
            names = [line.id for line in self._reader.jobs() if is_element_of(line.id, after.job)]
            yield from [After(name, after.condition) for name in names] or [after]

    def _import_log(self, log: Path) -> None:
        """Import the log file of an earlier version, whose last line may have been cut off by a crash."""
        if self._store.last == 0:  # otherwise it was imported before a crash kept it from being renamed
            for line in log.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    row = json.loads(line)
                    extra = row.pop("extra", None)
                    self.record(from_row(row), extra)
            self.commit()
        log.rename(log.with_name(f"{log.name}.imported"))


def _status_of(job: Job, wait_reason: str, queue_state: QueueState) -> JobStatus:
    hosts = tuple(dict.fromkeys(queue_state.devices[name].host for name in job.devices if name in queue_state.devices))
    return JobStatus(
        id=job.id,
        state=job.state,
        native=str(job.state),
        reason=wait_reason or job.reason,
        hosts=hosts,
        attempt=job.attempt,
        step=int(job.done) if job.done or job.reported_s else None,
        total=None if job.total is None else int(job.total),
        extra={"user": job.spec.user, "name": job.spec.name},
    )
