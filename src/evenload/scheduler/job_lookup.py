"""Look up jobs of a queue by number, range or name: through its daemon, or in its file when no daemon runs."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler.client import Client, connect
from evenload.scheduler.paths import log_path

if TYPE_CHECKING:
    from evenload.scheduler.clock import QueueClock
    from evenload.scheduler.core.queue_state import QueueState
    from evenload.scheduler.core.values import Job, JobSpec
    from evenload.scheduler.forecast.forecast import Forecast
    from evenload.scheduler.messages import AttemptRow, DeviceRow, JobRow
    from evenload.scheduler.store.ledger import AttemptRecord
    from evenload.scheduler.store.reader import JobLine

PAGE = 1000
MAX_RANGE = 1_000
_BY_NAME = "name="
"""Before a name that is a number or a range of them."""


def ids_of(texts: Sequence[str], folder: Path) -> list[str]:
    """Return the ids that the user's texts stand for: `12`, `12-21`, or the name of a job or an array.

    A job whose name is a number is found by it where no job has that number, and by `name=12` in any case.
    Raises `ConfigError` for an invalid range, and `QueueError` for an unknown name.
    """
    return list(dict.fromkeys(job for text in texts for job in _ids(text, folder)))


def _ids(text: str, folder: Path) -> Iterable[str]:
    if text.startswith(_BY_NAME):
        return _ids_of_name(unicodedata.normalize("NFC", text.removeprefix(_BY_NAME)), newest_jobs(folder))
    if re.fullmatch(r"[1-9][0-9]{0,17}", text):
        return [text] if _has_job(folder, text) else _ids_of_number(text, folder)
    if found := re.fullmatch(r"([1-9][0-9]{0,17})-([1-9][0-9]{0,17})", text):
        first, last = int(found[1]), int(found[2])
        if not first <= last < first + MAX_RANGE:
            raise ConfigError(f"jobs {text}: expected FIRST-LAST, at most {MAX_RANGE} jobs")
        return map(str, range(first, last + 1))
    return _ids_of_name(unicodedata.normalize("NFC", text), newest_jobs(folder))


def _has_job(folder: Path, number: str) -> bool:
    """Return True where a job of the queue has this number; also where that can't be seen."""
    if not has_readable_file(folder):
        return True
    from evenload.scheduler.store.reader import Reader

    with Reader(folder) as reader:
        return reader.job(number) is not None


def _ids_of_number(text: str, folder: Path) -> list[str]:
    """The job of this name; without one the number itself, so that the error is that of a number."""
    try:
        return _ids_of_name(text, newest_jobs(folder))
    except QueueError:
        return [text]


def _ids_of_name(text: str, jobs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The newest job of this name, or all elements of the newest array of this name; `jobs` start with the newest."""
    elements: dict[str, str] = {}
    for row in jobs:
        name, user = str(row["name"]), row["user"]
        if name == text and not elements:
            return [str(row["id"])]
        if name.startswith(f"{text}[") and name.endswith("]"):
            if f"{name} {user}" in elements:
                break  # an older array of the same name
            elements[f"{name} {user}"] = str(row["id"])
    if not elements:
        raise QueueError(
            f"no job {text!r} in this queue: give a job's number or name; evenload ps --all lists all jobs"
        )
    return list(elements.values())[::-1]


def newest_jobs(folder: Path) -> Iterator[Mapping[str, Any]]:
    if not has_readable_file(folder):
        with connect(folder, start=False) as client:
            yield from listed_jobs(client, newest_first=True)
        return
    from evenload.scheduler.store.reader import Reader

    with Reader(folder) as reader:
        after, lines = 0, reader.jobs(newest_first=True, limit=PAGE)
        while lines:
            yield from map(row_of_line, lines)
            after = lines[-1].number
            lines = reader.jobs(newest_first=True, limit=PAGE, after=after)


def listed_jobs(client: Client, **fields: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all rows of the daemon's `list`, page after page."""
    after = 0
    while True:
        answer = client.call("list", ended=True, after=after, limit=PAGE, **fields)
        yield from answer["jobs"]
        if not answer["more"] or not answer["jobs"]:
            return
        after = answer["jobs"][-1]["number"]


def job_state(folder: Path, job: str) -> tuple[str, str]:
    """Return a job's state and its reason; `QueueError` without such a job, or without daemon and readable file."""
    try:
        client = connect(folder, start=False)
    except QueueError:
        if not has_readable_file(folder):
            raise
        found = stored_job(folder, job)
        return str(found.state), found.reason
    with client:
        row = client.call("job", job=job)["job"]
        return row["state"], row["reason"]


def stored_job(folder: Path, job: str) -> Job:
    """Read a job from the queue's file; `QueueError` if there is no such job, or the file can't be read."""
    from evenload.scheduler.store.reader import Reader

    with Reader(folder) as reader:
        found = reader.job(job)
    if found is None:
        raise QueueError(f"no job {job} in the queue {folder}; evenload ps --all lists all jobs")
    return found


def row_of_job(folder: Path, job: Job, clock: QueueClock) -> JobRow:
    """Return a stored job in the form of `messages.JobRow`, without what only the daemon knows; times by the wall clock."""
    ahead_s, first_s = clock.ahead_s, job.first_began_s
    return {
        "id": job.id,
        "number": int(job.id) if job.id.isdigit() else 0,
        "user": job.spec.user,
        "name": job.spec.name,
        "state": str(job.state),
        "priority": job.spec.priority,
        "min_devices": job.spec.needs.min_devices,
        "max_devices": job.spec.needs.max_devices,
        "kinds": list(job.spec.needs.kinds),
        "devices": list(job.devices),
        "submitted_s": job.submitted_s + ahead_s,
        "since_s": job.since_s + ahead_s,
        "first_began_s": None if first_s is None else first_s + ahead_s,
        "held_s": job.held_until(clock.now_s()) if job.devices else job.held_s,
        "attempt": job.attempt,
        "done": job.done,
        "total": job.total,
        "rate_per_s": job.rate_per_s,
        "start_s": None,
        "eta_s": None,
        "estimate_s": job.spec.estimate_s,
        "estimate_source": job.spec.estimate_source,
        "deadline_s": None if job.spec.deadline_s is None else job.spec.deadline_s + ahead_s,
        "deadline_note": "",
        "position": None,
        "reason": job.reason,
        "array": job.spec.array,
        "is_held": job.is_held,
        "shares": [],
        "peak_bytes": job.peak_bytes,
        "idle_s": {},
        "log": str(log_path(folder, job.id)),
    }


def add_forecast(row: JobRow, job: Job, forecast: Forecast, ahead_s: float) -> None:
    """Add a job's place in line, its expected start and why it waits, to its row."""
    row["position"] = forecast.position
    row["start_s"] = None if forecast.start_s is None else forecast.start_s + ahead_s
    row["deadline_note"] = forecast.deadline_note
    if str(job.state) == "PENDING" or not job.reason or forecast.deadline_note:
        row["reason"] = forecast.reason or job.reason


def row_of_device(state: QueueState, name: str, label: str) -> DeviceRow:
    """Return a device's row; what only a daemon measures is empty."""
    device, jobs = state.devices[name], list(state.holder.get(name, ()))
    return {
        "id": name,
        "label": label,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "speed": device.speed,
        "price_per_hour": device.price_per_hour,
        "power_w": device.power_w,
        "job": jobs[0] if jobs else "",
        "jobs": jobs,
        "excess_bytes": 0,
        "closed": state.closed.get(name, ""),
        "external": [],
        "ghost_bytes": 0,
        "used_bytes": 0,
    }


def spec_by_wall_clock(spec: JobSpec, ahead_s: float) -> JobSpec:
    """Return a stored spec with its times of day by the wall clock, which is so far ahead of the queue's."""
    times = {name: getattr(spec, name) for name in ("not_before_s", "deadline_s")}
    return replace(spec, **{name: time_s + ahead_s for name, time_s in times.items() if time_s is not None})


def row_of_attempt(attempt: AttemptRecord, ahead_s: float) -> AttemptRow:
    return {
        "attempt": attempt.fence.attempt,
        "devices": list(attempt.devices),
        "began_s": attempt.began_s + ahead_s,
        "ended_s": None if attempt.ended_s is None else attempt.ended_s + ahead_s,
        "ending": attempt.ending,
        "reason": attempt.reason,
        "pid": None if attempt.runner is None else int(attempt.runner["pid"]),
    }


def row_of_line(line: JobLine, ahead_s: float = 0.0) -> dict[str, Any]:
    """Return a stored line in the form of the daemon's `list`; the wall clock is so far ahead of the queue's."""
    row = {**line._asdict(), "devices": json.loads(line.devices) if line.devices != "[]" else [], "array": ""}
    return row | {name: getattr(line, name) + ahead_s for name in ("submitted_s", "since_s", "reported_s")}


def has_readable_file(folder: Path) -> bool:
    return os.access(folder / "queue.sqlite", os.R_OK)
