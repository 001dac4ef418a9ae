"""`QueueView`: the state of a queue for display: its devices and its running, waiting and recently ended jobs.

The daemon is the source if it runs: only it knows why a job waits, who else uses a device, and when a job will finish. The
queue's file is the source otherwise, and for long lists.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler.client import Client, connect
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.job_lookup import PAGE, has_readable_file, listed_jobs, row_of_line
from evenload.scheduler.presence import last_alive_s

NUM_ENDED = 5
"""Number of ended jobs shown, the most recent ones."""
MAX_WAITING = 40
"""Number of waiting jobs shown; further ones are counted."""
ACTIVE = tuple(state for state in JobState if state not in ENDED)
STATES_BY_NAME = {
    "waiting": (JobState.PENDING,),
    "running": (JobState.STARTING, JobState.RUNNING, JobState.RESIZING, JobState.PREEMPTING),
    "ended": tuple(ENDED),
    **{state.lower(): (state,) for state in JobState},
}
"""Values of `--state`."""
MAX_EXPLAINED = 5000
"""With more active jobs, the daemon is not asked for wait reasons and ETAs, which would take it seconds."""
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class JobFilter:
    """The jobs to show; without states, those that have not ended and the most recent of those that have."""

    user: str | None = None
    states: tuple[JobState, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueView:
    folder: Path
    now_s: float
    is_live: bool
    jobs: Sequence[Mapping[str, Any]]
    """As `messages.JobRow`, in the order of submission; without the daemon, some fields are missing."""
    counts: Mapping[str, int]
    """Number of jobs by state, of the selected user."""
    devices: Sequence[Mapping[str, Any]] = ()
    reservations: Sequence[Mapping[str, Any]] = ()
    problems: Sequence[str] = ()
    user: str | None = None
    """The selected user; None for all."""
    age_s: float | None = 0.0
    """Age of all this: 0 from the daemon; from the file, the time since a daemon last worked, None if unknown."""
    place: str = ""
    """Where the folder is, if not on this machine."""


def view_of(folder: Path, wanted: JobFilter) -> QueueView:
    """Return the present state of the queue in `folder`; raise `QueueError` if there is none."""
    try:
        with connect(folder, start=False, timeout_s=_TIMEOUT_S) as client:
            return _view_of_daemon(client, wanted)
    except QueueError as error:
        is_readable = os.access(folder, os.R_OK | os.X_OK)
        if not folder.exists() or (is_readable and not (folder / "queue.sqlite").exists()):
            raise QueueError(f"there is no queue in {folder}; the first evenload submit creates it") from error
        if not has_readable_file(folder):
            raise
    return _view_of_file(folder, wanted)


def view_of_all(folder: Path, wanted: JobFilter) -> QueueView:
    """Return all jobs ever submitted, through the daemon."""
    with connect(folder, start=False) as client:
        view = _view_of_daemon(client, wanted)
        states = list(wanted.states or JobState)
        return replace(view, jobs=list(listed_jobs(client, user=wanted.user, states=states)))


def _view_of_daemon(client: Client, wanted: JobFilter) -> QueueView:
    status = client.call("status")
    num_active = sum(num for state, num in status["counts"].items() if state not in ENDED)
    if num_active > MAX_EXPLAINED and has_readable_file(client.folder):
        view = _view_of_file(client.folder, wanted)
    else:
        view = _listed_view(client, wanted, status["counts"])
    return replace(
        view,
        is_live=True,
        devices=status["devices"],
        reservations=status["reservations"],
        problems=status["problems"],
    )


def _listed_view(client: Client, wanted: JobFilter, counts: Mapping[str, int]) -> QueueView:
    def listed(states: Sequence[JobState], **fields: Any) -> dict[str, Any]:
        return client.call("list", user=wanted.user, states=list(states), **fields)

    first = listed(wanted.states or ACTIVE, ended=bool(wanted.states), limit=PAGE)
    ended: list[Any] = []
    if not wanted.states:
        ended = listed(tuple(ENDED), ended=True, limit=NUM_ENDED, newest_first=True)["jobs"][::-1]
    if wanted.user is not None:
        counts = first["counts"]
    jobs = [*ended, *first["jobs"]]
    return QueueView(client.folder, time.time(), is_live=True, jobs=jobs, counts=counts, user=wanted.user)


def view_of_rows(rows: Mapping[str, Any], wanted: JobFilter, place: str) -> QueueView:
    """Return the queue of another backend from its rows of folder, devices, jobs and counts."""
    parts: dict[str, Any] = {name: rows[name] for name in ("devices", "jobs", "counts")}
    return QueueView(Path(rows["folder"]), time.time(), is_live=True, user=wanted.user, place=place, **parts)


def _view_of_file(folder: Path, wanted: JobFilter) -> QueueView:
    from evenload.scheduler.store.reader import Reader

    with Reader(folder) as reader:
        clock, alive_s = reader.clock(), last_alive_s(folder)
        ahead_s = clock.ahead_s
        age_s = None if alive_s is None else max(0.0, clock.now_s() - alive_s)
        counts = {str(state): num for state, num in reader.counts(wanted.user).items()}
        lines = reader.jobs(states=wanted.states or ACTIVE, user=wanted.user, limit=PAGE)
        if not wanted.states:
            last = reader.jobs(states=tuple(ENDED), user=wanted.user, limit=NUM_ENDED, newest_first=True)
            lines = [*reversed(last), *lines]
    jobs = [row_of_line(line, ahead_s) for line in lines]
    return QueueView(folder, time.time(), is_live=False, jobs=jobs, counts=counts, user=wanted.user, age_s=age_s)


def parse_states(text: str) -> tuple[JobState, ...]:
    """Parse `running` or `failed,cancelled`."""
    found: dict[JobState, None] = {}
    for name in text.split(","):
        states = STATES_BY_NAME.get(name.strip().lower())
        if states is None:
            raise ConfigError(f"--state {text}: unknown state {name.strip()!r}; states: {', '.join(STATES_BY_NAME)}")
        found.update(dict.fromkeys(states))
    return tuple(found)


def json_of(view: QueueView) -> str:
    """Return one object, with a line for each job."""
    head = {
        "queue": str(view.folder),
        "time_s": view.now_s,
        "from_daemon": view.is_live,
        "age_s": view.age_s,
        "counts": dict(view.counts),
        "devices": list(view.devices),
        "problems": list(view.problems),
    }
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
    start = json.dumps(head, ensure_ascii=False)[:-1]
    jobs = ",\n".join(map(encode, view.jobs))
    return f'{start}, "jobs": [\n{jobs}\n]}}\n'
