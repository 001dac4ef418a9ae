"""The queue on Ray: the core's queue state, and its log in a file, from which a restarted controller goes on.

No Ray in here: `ray_controller` carries out what this decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenload.errors import QueueError
from evenload.job.protocol import Report
from evenload.scheduler.backends.interface import Described
from evenload.scheduler.core import events
from evenload.scheduler.core.decide import decide, plan
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.states import HOLDING, JobState
from evenload.scheduler.core.values import After, Device, Job, Settings
from evenload.scheduler.job_file import JobFile, as_table, job_from, to_spec

LOG = "events.jsonl"


class RayQueue:
    """The jobs, what each runs, and the log of all that happened to them."""

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        """Takes up the log in `root` where there is one; what ran then is lost, for its runners ended with their owner."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)  # the log holds variables of jobs
        self.queue_state = QueueState()
        self.files: dict[str, tuple[JobFile, int | None]] = {}
        """Job → what it runs, and its index in an array."""
        self._clock = clock
        self._path = root / LOG
        self._num = 0
        self._last: dict[str, Job] = {}
        for row in _read(self._path):
            self._take(row)
        for job in list(self.queue_state.jobs.values()):
            if job.state in HOLDING:
                self.apply(events.Lost(clock(), job.id, "the queue on Ray was restarted"))

    @property
    def settings(self) -> Settings:
        """How it decides."""
        return self.queue_state.settings

    def submit(self, job: JobFile, user: str) -> str:
        """Takes a job or an array; its id.

        Raises:
            QueueError: it can't be taken.
        """
        number = str(self._num + 1)
        elements = [(number if index is None else f"{number}_{index}", index) for index in job.indices()]
        job = replace(job, after=tuple(self._after(job.after)))
        for _, index in elements[:1]:
            if refusal := self.queue_state.refusal(to_spec(job, user, index=index, array=number)):
                raise QueueError(f"{job.name or 'the job'} is not taken: {refusal}")
        for name, index in elements:
            spec = to_spec(job, user, index=index, array=number)
            self.apply(events.Submitted(self._clock(), name, spec), {"file": as_table(job), "index": index})
        return number

    def cancel(self, job: str, user: str) -> list[str]:
        """Cancels a job or all elements of an array; those whose programs must be asked to stop.

        Raises:
            QueueError: there is no such job, it has ended, or it is another's.
        """
        names = [name for name in self.queue_state.jobs if _is_of(name, job)]
        if not names:
            ended = [name for name in self.queue_state.outcomes if _is_of(name, job)]
            raise QueueError(
                f"job {job} has ended: {self.queue_state.outcomes[ended[0]]}" if ended else f"there is no job {job}"
            )
        running = []
        for name in names:
            held = self.queue_state.jobs[name]
            if held.spec.user != user:
                raise QueueError(f"job {name} is {held.spec.user}'s; {user} can't cancel it")
            if held.state is JobState.PENDING:
                self.apply(events.Cancelled(self._clock(), name, f"cancelled by {user}"))
            else:
                self.apply(events.StopRequested(self._clock(), name, JobState.CANCELLED, f"cancelled by {user}"))
                running.append(name)
        return running

    def decide(self) -> tuple[events.Command, ...]:
        """What to do now, written down already."""
        commands = decide(self.queue_state.snapshot(), self._clock())
        for command in commands:
            self.apply(command)
        return commands

    def see_devices(self, devices: Sequence[Device]) -> None:
        """Ray's nodes come and go; a device whose node is gone is closed first, and dropped when nobody holds it."""
        here = {device.id: device for device in devices}
        for device in devices:
            if device.id not in self.queue_state.devices:
                self.apply(events.DeviceAdded(self._clock(), device))
        for name in list(self.queue_state.devices):
            if name in here:
                continue
            if name not in self.queue_state.closed:
                self.apply(events.DeviceClosed(self._clock(), name, "its node has left Ray"))
            if name not in self.queue_state.holder:
                self.apply(events.DeviceRemoved(self._clock(), name))

    def see_report(self, job: str, report: Report) -> None:
        """How far a job is; one that reports can save and go on, so it may be preempted from now on."""
        held = self.queue_state.jobs[job]
        if held.done == report.step and held.rate_per_s == report.steps_per_s:
            return
        self.apply(events.Reported(self._clock(), job, report.step, report.total, report.steps_per_s))
        if not held.spec.preemptible and self.files[job][0].saves is None:
            self.apply(events.SpecChanged(self._clock(), job, replace(held.spec, preemptible=True)))

    def describe(self, ids: Sequence[str]) -> list[Described]:
        """How jobs are, an array's elements one by one; all that are known where none is named."""
        waits: Mapping[str, str] = plan(self.queue_state.snapshot(), self._clock(), explain=True).waits
        wanted = [name for name in self._last if not ids or any(_is_of(name, job) for job in ids)]
        return [
            _described(self.queue_state.jobs.get(name, self._last[name]), waits.get(name, ""), self.queue_state)
            for name in wanted
        ]

    def apply(self, event: events.Event, extra: Mapping[str, Any] | None = None) -> None:
        """Takes an event and writes it down."""
        row = {**events.as_row(event), **({"extra": extra} if extra else {})}
        self._take(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _take(self, row: dict[str, Any]) -> None:
        event = events.from_row({key: value for key, value in row.items() if key != "extra"})
        for job in self.queue_state.apply(event):
            self._last[job.id] = job
        if isinstance(event, events.Submitted):
            extra = row["extra"]
            self.files[event.job] = (job_from(extra["file"]), extra["index"])
            self._num = max(self._num, int(event.job.partition("_")[0]))

    def _after(self, afters: Iterable[After]) -> Iterable[After]:
        """An array stands for all of its elements."""
        for after in afters:
            names = [name for name in self._last if _is_of(name, after.job)]
            yield from [After(name, after.condition) for name in names] or [after]


def _described(job: Job, wait: str, queue_state: QueueState) -> Described:
    hosts = tuple(dict.fromkeys(queue_state.devices[name].host for name in job.devices if name in queue_state.devices))
    return Described(
        id=job.id,
        state=job.state,
        native=str(job.state),
        reason=wait or job.reason,
        hosts=hosts,
        attempt=job.attempt,
        step=int(job.done) if job.done or job.reported_s else None,
        total=None if job.total is None else int(job.total),
        extra={"user": job.spec.user, "name": job.spec.name},
    )


def _read(path: Path) -> list[dict[str, Any]]:
    """The log's rows; the last line may have been cut off by a crash, and is then as if it had not been written."""
    try:
        lines = path.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]))
        lines.pop()
    return [json.loads(line) for line in lines]


def _is_of(name: str, job: str) -> bool:
    return name == job or name.partition("_")[0] == job
