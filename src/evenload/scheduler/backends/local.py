"""The backend `local`: the queue of this machine, reached through its daemon."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler import paths, validation
from evenload.scheduler.backends.interface import BackendRequest, JobStatus, SchedulerBackend, check_resolved
from evenload.scheduler.client import Client, connect, with_daemon
from evenload.scheduler.core.layout import layout_of
from evenload.scheduler.core.refusal import refusal
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Device
from evenload.scheduler.job_file import JobFile, to_program, to_spec
from evenload.scheduler.job_lookup import ids_of

_WAIT_S = 30.0


class LocalBackend(SchedulerBackend):
    """The queue in a folder of this machine. Submitting starts its daemon; everything else requires a running one."""

    name = "local"
    lays_out_snapshots = True

    def __init__(self, queue: Path) -> None:
        self.queue = queue.absolute()

    def check(self, job: JobFile, *, is_dry_run: bool) -> tuple[JobFile, tuple[str, ...]]:
        """Check that the queue has such devices; replace names of jobs to wait for by their ids."""
        try:
            with connect(self.queue, start=not is_dry_run) as client:
                _check_devices(job, client.call("status"))
        except QueueError:
            if not is_dry_run:
                raise
            return job, ("no daemon runs, so it is not known yet if the queue has such devices",)
        if is_dry_run:
            return job, ()
        after = [replace(after, job=number) for after in job.after for number in ids_of([after.job], self.queue)]
        return replace(job, after=tuple(after)), ()

    def build_request(self, job: JobFile, snapshot: str = "") -> BackendRequest:
        """Build the fields of the daemon's `submit`: a job, or a list of jobs for an array."""
        check_resolved(job)
        rows = [
            {"spec": _spec_row(job, index), "program": _program_row(job, snapshot, index)} for index in job.indices()
        ]
        message = _array_message(rows) if job.array else rows[0]
        return BackendRequest("local", job.name, json.dumps(message, indent=1))

    def submit(self, request: BackendRequest) -> tuple[str, ...]:
        with connect(self.queue) as client:
            answer = client.call("submit", **json.loads(request.text))
        return tuple(map(str, answer["jobs"] if "jobs" in answer else [answer["job"]]))

    def describe(self, ids: Sequence[str]) -> tuple[JobStatus, ...]:
        with connect(self.queue, start=False) as client:
            return tuple(_status_of(client.call("job", job=job)["job"]) for job in ids)

    def cancel(self, job: str, *, now: bool = False) -> None:
        with connect(self.queue, start=False) as client:
            client.call("cancel", jobs=[job], now=now)

    def logs(self, job: str) -> Path:
        return paths.log_path(self.queue, job)

    def position(self, job: str) -> tuple[int | None, float | None] | str | None:
        """Return (place in line, seconds to its start) of a waiting job, each None if unknown; None if it has started.

        Of a job that can never start, and so was cancelled at once: the reason.
        """
        with connect(self.queue, start=False) as client:
            row = client.call("job", job=job)["job"]
            if row["state"] != JobState.PENDING:
                return str(row["reason"]) if row["state"] == JobState.CANCELLED else None
        place = row.get("position")
        return place, None if row["start_s"] is None else row["start_s"] - time.time()

    def deadline_note(self, job: str) -> str:
        """Return why a job's deadline can't be met, or planned for; empty if it can."""
        with connect(self.queue, start=False) as client:
            return str(client.call("job", job=job)["job"]["deadline_note"])

    def wait(self, ids: Sequence[str]) -> Iterator[JobStatus]:
        """Yield each job's status when it has ended, until all have; a daemon that dies meanwhile is waited for."""
        left, last = list(ids), 0

        def ended(client: Client) -> list[JobStatus]:
            nonlocal last
            last = client.call("wait", after=last, timeout_s=_WAIT_S)["last"]
            found = [_status_of(client.call("job", job=job)["job"]) for job in left]
            return [status for status in found if status.has_ended]

        while left:
            for status in with_daemon(self.queue, ended):
                left.remove(status.id)
                yield status


def snapshot_folder(queue: Path | None = None) -> Path:
    """Return the folder of this user's snapshots: in the queue's folder if the user owns it."""
    if queue is not None:
        with contextlib.suppress(OSError):
            if queue.stat().st_uid == os.geteuid():
                return queue / "snapshots"
    return paths.user_folder() / "snapshots"


def _array_message(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message of an array: what its elements have in common once, so that it stays small however many variables there are."""
    first = rows[0]
    shared = dict(first["program"]["environment"])
    for row in rows:
        shared = {name: value for name, value in shared.items() if row["program"]["environment"].get(name) == value}
    common = {
        part: {name: value for name, value in first[part].items() if all(row[part].get(name) == value for row in rows)}
        for part in ("spec", "program")
    }
    common["program"]["environment"] = shared
    own = []
    for row in rows:
        variables = {name: value for name, value in row["program"]["environment"].items() if name not in shared}
        parts = {
            part: {name: value for name, value in row[part].items() if name not in common[part]}
            for part in ("spec", "program")
        }
        parts["program"]["environment"] = variables
        own.append(parts)
    return {"jobs": own, "common": common, "array": True}


def _status_of(row: Mapping[str, Any]) -> JobStatus:
    return JobStatus(
        id=row["id"],
        state=JobState(row["state"]),
        native=row["state"],
        reason=row["reason"],
        attempt=row["attempt"],
        step=int(row["done"]) if row["done"] else None,
        total=None if row["total"] is None else int(row["total"]),
    )


def _check_devices(job: JobFile, status: Mapping[str, Any]) -> None:
    """Reject a job that no devices of the queue fit."""
    devices = [
        Device(row["id"], host="here", kind=row["kind"], memory_bytes=row["memory_bytes"]) for row in status["devices"]
    ]
    user = pwd.getpwuid(os.geteuid()).pw_name
    reason = refusal(replace(to_spec(job, user), after=()), {}, {}, {}, layout_of(devices))
    if reason is None:
        return
    counts: dict[tuple[str, int], int] = {}
    for device in devices:
        key = device.kind, device.memory_bytes
        counts[key] = counts.get(key, 0) + 1
    listed = ", ".join(
        f"{num} × {kind}" + (f" ({memory / 1e9:.1f} GB)" if memory else "") for (kind, memory), num in counts.items()
    )
    raise ConfigError(f"the job could never start: {reason}. Devices of the queue: {listed or 'none'}")


def _spec_row(job: JobFile, index: int | None) -> dict[str, Any]:
    """The job's spec without what only the daemon knows: its owner and the array's id."""
    row: dict[str, Any] = validation.plain(to_spec(job, "?", index=index))
    del row["user"]
    row.pop("preemptible", None)
    if job.saves is not None:
        row["preemptible"] = job.saves or job.requeue
    if job.array_limit is not None:
        row["array_limit"] = job.array_limit
    return row


def _program_row(job: JobFile, snapshot: str, index: int | None) -> dict[str, Any]:
    program = to_program(job, -1, job.folder, snapshot=snapshot, index=index).to_row()
    del program["uid"]
    return program
