"""`RayQueue`: the queue on Ray: its state, and its log in a `QueueStore`, from which a restarted actor continues.

This module does not use Ray: `ray.controller` carries out what it decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.job.protocol import ProgressReport
from evenload.scheduler.backends.interface import JobStatus, is_element_of
from evenload.scheduler.clock import QueueClock
from evenload.scheduler.core import events
from evenload.scheduler.core.decide import decide, plan
from evenload.scheduler.core.layout import layout_of
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.refusal import refusal
from evenload.scheduler.core.states import WITH_DEVICES, JobState
from evenload.scheduler.core.values import After, Device, Job, JobSpec
from evenload.scheduler.forecast.eta_cache import EtaCache
from evenload.scheduler.forecast.forecast import Forecast
from evenload.scheduler.job_file import JobFile, as_table, job_from, to_spec
from evenload.scheduler.job_lookup import ids_of, spec_by_wall_clock
from evenload.scheduler.learned_restarts import LearnedRestart, lost_s
from evenload.scheduler.learned_speeds import LearnedSpeeds
from evenload.scheduler.runner.lost_programs import final, names_evenload
from evenload.scheduler.spec_rows import changed_spec
from evenload.scheduler.store.event_rows import from_row
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.writer import QueueStore
from evenload.stored_names import RAY_LOG


class RayQueue:
    """The jobs of a Ray cluster; used from one thread. What `record` took is on disk after `commit`."""

    def __init__(self, root: Path, clock: QueueClock | None = None) -> None:
        """Open the queue in `root`. Jobs that were running are lost, because their programs ended with the old actor."""
        self._store = QueueStore(root, holder="the queue on Ray")
        self.clock = clock or QueueClock(self._store.anchor, self._store.queue_state.time_s)
        self._store.anchor = self.clock.anchor()
        self.root = root
        self.names: dict[str, str] = {}
        """Ray's id of a node → its name for people, also of nodes that have left."""
        self._speeds: dict[str, LearnedSpeeds] = {}
        self._restarts: dict[str, LearnedRestart] = {}
        self._etas = EtaCache()
        self._started: dict[str, tuple[int, float]] = {}
        """Job → the attempt whose start is still to be measured, and the steps that were done before."""
        if (log := root / RAY_LOG).exists():
            self._import_log(log)
        self.reader = Reader(root)
        for job in list(self.queue_state.jobs.values()):
            if job.state in WITH_DEVICES:
                self.end(events.Lost(self.now_s, job.id, "the queue on Ray was restarted"))
        self.commit()

    @property
    def queue_state(self) -> QueueState:
        """The present state, including what is not yet committed."""
        return self._store.queue_state

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    def record(self, event: events.QueueEvent, extra: Mapping[str, Any] | None = None) -> None:
        self._store.record(event, extra=extra)

    def end(self, event: events.Lost | events.Yielded) -> None:
        """Record the end of a job's attempt; a failure where its program neither saves nor may run again from the beginning."""
        job = self.queue_state.jobs[event.job]
        file, index = self.program(job.id)
        self.record(event if names_evenload(file.command_of(index), file.folder) else final(event, job))

    def commit(self) -> None:
        """Write all recorded events to disk."""
        self._store.commit()

    def close(self) -> None:
        self.reader.close()
        self._store.close()

    def submit(self, job: JobFile, user: str) -> str:
        """Add a job or an array and return its id; raise a `QueueError` where it is rejected."""
        newest = self.reader.jobs(newest_first=True, limit=1)
        number = str(1 + int(newest[0].id.partition("_")[0]) if newest else 1)
        job = replace(job, after=tuple(self._expanded(job.after)))
        specs = {
            index: spec_by_wall_clock(to_spec(job, user, index=index, array=number), -self.clock.ahead_s)
            for index in job.indices()
        }
        if reason := self.queue_state.refusal(next(iter(specs.values()))):
            raise QueueError(f"{job.name or 'the job'} is rejected: {reason}")
        for index, spec in specs.items():
            event = events.Submitted(self.now_s, number if index is None else f"{number}_{index}", spec)
            self.record(event, {"file": as_table(job), "index": index})
        self.commit()
        return number

    def program(self, job: str) -> tuple[JobFile, int | None]:
        """Return what a job runs, and its index in an array."""
        row = self.reader.program(job)
        if row is None:
            raise QueueError(f"no job {job} in this queue")
        return job_from(row["file"]), row["index"]

    def ids_of(self, text: str) -> list[str]:
        """Return the jobs that a user's text stands for: an id, an array's id, a range of ids, or a name."""
        self.commit()
        known = [line.id for line in self.reader.jobs()]
        found = [name for name in known if is_element_of(name, text)]
        if not found:
            ids = ids_of([text], self.root)
            found = [name for name in known if any(is_element_of(name, job) for job in ids)]
        if not found:
            raise QueueError(f"no job {text} in this queue")
        return found

    def cancel(self, text: str, user: str) -> list[str]:
        """Cancel the jobs that have not ended; return those whose programs must be stopped, or raise a `QueueError`."""
        running = []
        for found in self._own(text, user, "cancel"):
            if found.state is JobState.PENDING:
                self.record(events.Cancelled(self.now_s, found.id, f"cancelled by {user}"))
            else:
                self.record(events.StopRequested(self.now_s, found.id, JobState.CANCELLED, f"cancelled by {user}"))
                running.append(found.id)
        self.commit()
        return running

    def hold(self, text: str, user: str, *, is_held: bool) -> list[str]:
        """Hold waiting jobs back, or let them go; return their ids."""
        jobs = self._own(text, user, "hold" if is_held else "release")
        if len(jobs) > 1:
            jobs = [job for job in jobs if job.state is JobState.PENDING]
        for job in jobs:
            if job.state is not JobState.PENDING:
                raise QueueError(f"job {job.id} is {job.state}: only a pending job can be held back")
        if not jobs:
            raise QueueError(f"nothing to do: none of the jobs of {text} waits")
        for job in jobs:
            self.record((events.JobHeld if is_held else events.Released)(self.now_s, job.id))
        self.commit()
        return [job.id for job in jobs]

    def change(self, text: str, user: str, changes: Mapping[str, Any]) -> list[str]:
        """Change fields of the jobs' specs, all or none; return their ids."""
        if changes.get("deadline_s") is not None:
            raise ConfigError("a deadline has no effect here: only the local queue plans for deadlines")
        changed = []
        for job in self._own(text, user, "change"):
            if "not_before_s" in changes and job.state is not JobState.PENDING:
                raise QueueError(f"job {job.id} is {job.state}: when it begins can be changed only while it waits")
            spec = changed_spec(spec_by_wall_clock(job.spec, self.clock.ahead_s), changes)
            spec = spec_by_wall_clock(spec, -self.clock.ahead_s)
            state = self.queue_state
            if reason := refusal(replace(spec, after=()), {}, {}, state.users, layout_of(state.devices.values())):
                raise QueueError(f"job {job.id} can't be changed: {reason}")
            if job.devices and spec.needs != job.spec.needs:
                raise QueueError(f"job {job.id} is {job.state}: its devices can be changed only while it waits")
            changed.append(events.SpecChanged(self.now_s, job.id, spec))
        for event in changed:
            self.record(event)
        self.commit()
        return [event.job for event in changed]

    def decide(self) -> tuple[events.Command, ...]:
        """Decide what to do now; the decisions are on disk when this returns."""
        commands = decide(self.queue_state.snapshot(), self.now_s)
        for command in commands:
            self.record(command)
        self.commit()
        return commands

    def forecasts(self, job: str = "") -> Mapping[str, Forecast]:
        """Return each job's forecast, as of now or a moment ago; `job` is sure to be there."""
        return self._etas.forecasts(self.queue_state.snapshot(), self._store.last, self.now_s, job)

    def update_devices(self, devices: Sequence[Device], names: Mapping[str, str]) -> None:
        """Add new devices; close those whose node has left, and remove them once no job holds them."""
        self.names |= names
        present = {device.id for device in devices}
        for device in devices:
            if device.id not in self.queue_state.devices:
                self.record(events.DeviceAdded(self.now_s, device))
        for name in list(self.queue_state.devices):
            if name in present:
                continue
            if name not in self.queue_state.closed:
                self.record(events.DeviceClosed(self.now_s, name, "its node has left Ray"))
            if name not in self.queue_state.holder:
                self.record(events.DeviceRemoved(self.now_s, name))
        self.commit()

    def update_progress(self, job: str, report: ProgressReport) -> None:
        """Record a job's progress. A job that reports can save and resume, so it may be preempted from now on."""
        found = self.queue_state.jobs[job]
        if found.done == report.step and found.rate_per_s == report.steps_per_s:
            return
        speeds = self._speeds.setdefault(job, LearnedSpeeds(found.spec.rates, found.rates))
        rates = speeds.learn(found, report.steps_per_s, report.costs, self.queue_state.devices, self.now_s)
        spec = self._with_restart(found, report)
        self.record(events.Reported(self.now_s, job, report.step, report.total, report.steps_per_s, rates))
        if spec is not found.spec:
            self.record(events.SpecChanged(self.now_s, job, spec))
            found = self.queue_state.jobs[job]
        if not found.spec.preemptible and self.program(job)[0].saves is None:
            self.record(events.SpecChanged(self.now_s, job, replace(found.spec, preemptible=True)))

    def note_start(self, job: str) -> None:
        """Note that an attempt begins: its first progress shows what the start has cost."""
        found = self.queue_state.jobs[job]
        self._started[job] = found.attempt, found.done

    def note_stop(self, job: str) -> None:
        """Note that an attempt has ended that was requested to stop: what that has cost."""
        found = self.queue_state.jobs[job]
        if found.state in (JobState.PREEMPTING, JobState.RESIZING):
            self._restarts.setdefault(job, LearnedRestart()).stop_lost_s = self.now_s - found.since_s

    def forget(self, job: str) -> None:
        """Drop what was learned of a job that has ended."""
        if job not in self.queue_state.jobs:
            for known in (self._speeds, self._restarts, self._started):
                known.pop(job, None)

    def describe(self, ids: Sequence[str]) -> list[JobStatus]:
        self.commit()
        waits = plan(self.queue_state.snapshot(), self.now_s, explain=True).waits
        jobs = [self.job(name) for name in self._named(ids)]
        return [_status_of(job, waits.get(job.id, ""), self.names) for job in jobs if job is not None]

    def job(self, name: str) -> Job | None:
        return self.queue_state.jobs.get(name) or self.reader.job(name)

    def _with_restart(self, job: Job, report: ProgressReport) -> JobSpec:
        """Return the job's spec, with the cost of a restart where the first progress of an attempt shows it."""
        attempt, done = self._started.get(job.id, (0, 0.0))
        if attempt != job.attempt or report.steps_per_s <= 0:
            return job.spec
        del self._started[job.id]
        resumed_at = done if report.resumed_at is None else float(report.resumed_at)
        start_s = lost_s(self.now_s - job.attempt_began_s, report.step - resumed_at, report.steps_per_s)
        restart_s = self._restarts.setdefault(job.id, LearnedRestart()).began(start_s, job.spec.restart_s)
        return job.spec if restart_s is None else replace(job.spec, restart_s=restart_s)

    def _named(self, ids: Sequence[str]) -> Iterator[str]:
        for line in self.reader.jobs():
            if not ids or any(is_element_of(line.id, job) for job in ids):
                yield line.id

    def _own(self, text: str, user: str, verb: str) -> list[Job]:
        """Return the jobs of a text that have not ended; raise a `QueueError` where one is another user's, or all have ended."""
        names = self.ids_of(text)
        jobs = [self.queue_state.jobs[name] for name in names if name in self.queue_state.jobs]
        for job in jobs:
            if job.spec.user != user:
                raise QueueError(f"job {job.id} belongs to {job.spec.user}; {user} can't {verb} it")
        if not jobs:
            outcomes = {str(self.queue_state.outcomes[name]) for name in names}
            raise QueueError(f"job {text} has ended: {', '.join(sorted(outcomes))}")
        return jobs

    def _expanded(self, afters: Iterable[After]) -> Iterable[After]:
        """Replace a name by the job, an array by all of its elements."""
        for after in afters:
            yield from [After(name, after.condition) for name in self.ids_of(after.job)]

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


def _status_of(job: Job, wait_reason: str, names: Mapping[str, str]) -> JobStatus:
    hosts = dict.fromkeys(device.partition("/")[0] for device in job.devices)
    return JobStatus(
        id=job.id,
        state=job.state,
        native=str(job.state),
        reason=wait_reason or job.reason,
        hosts=tuple(names.get(host, host) for host in hosts),
        attempt=job.attempt,
        step=int(job.done) if job.done or job.reported_s else None,
        total=None if job.total is None else int(job.total),
        extra={"user": job.spec.user, "name": job.spec.name},
    )
