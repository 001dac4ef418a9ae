"""A queue at one moment, for people: its devices, the jobs that run, those that wait, those that ended last.

From the daemon where one answers: it alone knows why a job waits, who else is on a device, when a job will be over. From
the queue's file where none does, or where all of a long list is wanted: a hundred thousand rows cost little there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler.client import Client, connect
from evenload.scheduler.core.states import ENDED, JobState

NUM_ENDED = 5
"""Jobs that ended are shown so many, the last ones first."""
MAX_WAITING = 40
"""More that wait are counted, not shown."""
PAGE = 1000
ACTIVE = tuple(state for state in JobState if state not in ENDED)
NAMES = {
    "waiting": (JobState.PENDING,),
    "running": (JobState.STARTING, JobState.RUNNING, JobState.RESIZING, JobState.PREEMPTING),
    "ended": tuple(ENDED),
    **{state.lower(): (state,) for state in JobState},
}
"""What ``--state`` takes."""
MOST_FORESEEN = 5000
"""Where more wait, the daemon isn't asked why each does and when it starts: that would take it seconds."""
_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which jobs are asked for: where no states are, those that have not ended, and the last few that have."""

    user: str | None = None
    states: tuple[JobState, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueView:
    """What was found."""

    folder: Path
    now_s: float
    is_live: bool
    """The daemon told it."""
    jobs: Sequence[Mapping[str, Any]]
    """As `messages.JobRow`, in the order of submission; what only the daemon knows is missing without it."""
    counts: Mapping[str, int]
    """State → jobs, of the wanted user."""
    devices: Sequence[Mapping[str, Any]] = ()
    """As `messages.DeviceRow`."""
    reservations: Sequence[Mapping[str, Any]] = ()
    problems: Sequence[str] = ()
    last: int = 0
    """Number of the last event."""
    user: str | None = None


def look(folder: Path, wanted: Wanted) -> QueueView:
    """The queue in `folder` as it is now.

    Raises:
        QueueError: there is none.
    """
    try:
        with connect(folder, start=False, timeout_s=_ANSWER_S) as line:
            return ask(line, wanted)
    except QueueError as error:
        if not folder.exists() or (is_readable(folder) and not (folder / "queue.sqlite").exists()):
            raise QueueError(f"there is no queue in {folder}; the first evenload submit makes one") from error
        if not is_readable(folder / "queue.sqlite"):
            raise
    return read(folder, wanted)


def ask(line: Client, wanted: Wanted) -> QueueView:
    """What the daemon tells."""
    status = line.call("status")
    num_active = sum(num for state, num in status["counts"].items() if state not in ENDED)
    if num_active > MOST_FORESEEN and is_readable(line.folder / "queue.sqlite"):
        stored = read(line.folder, wanted)
        return replace(
            stored,
            is_live=True,
            devices=status["devices"],
            reservations=status["reservations"],
            problems=status["problems"],
            last=status["last"],
        )
    states = list(wanted.states or ACTIVE)
    first = line.call("list", user=wanted.user, states=states, ended=bool(wanted.states), limit=PAGE)
    ended: list[Any] = []
    if not wanted.states:
        ended = line.call("list", user=wanted.user, states=list(ENDED), ended=True, limit=NUM_ENDED, newest_first=True)[
            "jobs"
        ][::-1]
    counts = first["counts"] if wanted.user is not None else status["counts"]
    return QueueView(
        folder=line.folder,
        now_s=time.time(),
        is_live=True,
        jobs=[*ended, *first["jobs"]],
        counts=counts,
        devices=status["devices"],
        reservations=status["reservations"],
        problems=status["problems"],
        last=status["last"],
        user=wanted.user,
    )


def read(folder: Path, wanted: Wanted) -> QueueView:
    """What the queue's file tells."""
    from evenload.scheduler.store.reader import Reader

    with Reader(folder) as reader:
        counts = {str(state): num for state, num in reader.counts(wanted.user).items()}
        lines = reader.jobs(states=wanted.states or ACTIVE, user=wanted.user, limit=PAGE)
        if not wanted.states:
            last = reader.jobs(states=tuple(ENDED), user=wanted.user, limit=NUM_ENDED, newest_first=True)
            lines = [*reversed(last), *lines]
    jobs = list(map(_row, lines))
    return QueueView(folder, time.time(), is_live=False, jobs=jobs, counts=counts, user=wanted.user)


def newest_jobs(folder: Path) -> Iterator[Mapping[str, Any]]:
    """All jobs, the newest first; from the file where it can be read."""
    if not is_readable(folder / "queue.sqlite"):
        with connect(folder, start=False) as line:
            yield from pages(line, newest_first=True)
        return
    from evenload.scheduler.store.reader import Reader

    with Reader(folder) as reader:
        after, lines = 0, reader.jobs(newest_first=True, limit=PAGE)
        while lines:
            yield from map(_row, lines)
            after = lines[-1].number
            lines = reader.jobs(newest_first=True, limit=PAGE, after=after)


def pages(line: Client, **fields: Any) -> Iterator[Mapping[str, Any]]:
    """All rows of ``list``, page after page."""
    after = 0
    while True:
        answer = line.call("list", ended=True, after=after, limit=PAGE, **fields)
        yield from answer["jobs"]
        if not answer["more"] or not answer["jobs"]:
            return
        after = answer["jobs"][-1]["number"]


def ask_for_all(folder: Path, wanted: Wanted) -> QueueView:
    """All jobs there ever were, through the daemon: where the file is another's."""
    with connect(folder, start=False) as line:
        view = ask(line, wanted)
        states = list(wanted.states or JobState)
        return replace(view, jobs=list(pages(line, user=wanted.user, states=states)))


def _row(line: Any) -> dict[str, Any]:
    row = line._asdict()
    row["devices"] = json.loads(line.devices) if line.devices != "[]" else []
    row["array"] = ""
    return row  # type: ignore[no-any-return]


def is_readable(path: Path) -> bool:
    """Whether this user may read a file, or look into a folder."""
    return os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0))


def parse_states(text: str) -> tuple[JobState, ...]:
    """Reads ``running`` or ``failed,cancelled``.

    Raises:
        ConfigError: there is no such state.
    """
    found: dict[JobState, None] = {}
    for name in text.split(","):
        states = NAMES.get(name.strip().lower())
        if states is None:
            raise ConfigError(f"--state {text}: there is no state {name.strip()!r}; there are {', '.join(NAMES)}")
        found.update(dict.fromkeys(states))
    return tuple(found)
