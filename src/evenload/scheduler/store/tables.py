"""Reading and writing of the tables, and folding of the log."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from evenload.errors import EvenloadError
from evenload.scheduler.core import events
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.core.values import Device, Job, Limits, Reservation, Settings, User
from evenload.scheduler.store import rows
from evenload.scheduler.store.event_rows import stored_kind
from evenload.scheduler.store.ledger import AttemptRecord, Changes, Entry, Fence, Ledger

_ENDED = tuple(str(state) for state in sorted(ENDED))
_ATTEMPT_COLUMNS = "fence, job, attempt, devices, began_s, ended_s, ending, reason, runner"


@dataclass(frozen=True, slots=True)
class LogRow:
    number: int
    time_s: float
    kind: str
    job: str | None
    body: str
    extra: str | None = None
    """Text of the plain values stored beside the event."""


@dataclass(slots=True)
class History:
    """The whole history of a queue: the ledger, and all jobs, programs and attempts ever."""

    ledger: Ledger
    changes: Changes
    programs: dict[str, str] = field(default_factory=dict)


def log_row(number: int, entry: Entry, extra: Mapping[str, Any] | None) -> LogRow:
    """Return the row of an entry; `QueueError` if it can't be stored."""
    row = rows.entry_row(entry)
    what = f"the event {type(entry).__name__}"
    return LogRow(
        number,
        entry.time_s,
        stored_kind(type(entry)),
        getattr(entry, "job", None),
        rows.text_of(row, what),
        None if extra is None else rows.text_of(dict(extra), f"what comes with {what}"),
    )


def write(
    connection: sqlite3.Connection,
    ledger: Ledger,
    changes: Changes,
    log: list[LogRow],
) -> None:
    _write_log(connection, log)
    programs = {row.job: row.extra for row in log if row.kind == events.Submitted.__name__ and row.extra is not None}
    write_current(connection, ledger, changes, programs)


def write_current(
    connection: sqlite3.Connection, ledger: Ledger, changes: Changes, programs: Mapping[Any, str]
) -> None:
    queue_state = ledger.queue_state
    connection.executemany(_JOB_WRITE, [_job_row(job) for job in changes.jobs.values()])
    connection.executemany("INSERT INTO programs (job, body) VALUES (?, ?)", programs.items())
    connection.executemany(_ATTEMPT_WRITE, [_attempt_row(attempt) for attempt in changes.attempts.values()])
    for kind, name in changes.removed:
        connection.execute(f"DELETE FROM {kind}s WHERE id = ?", (name,))
    for name in changes.devices:
        if (device := queue_state.devices.get(name)) is not None:
            connection.execute(_DEVICE_WRITE, (name, rows.value_text(device), queue_state.closed.get(name)))
    for name in changes.reservations:
        if (reservation := queue_state.reservations.get(name)) is not None:
            connection.execute(_RESERVATION_WRITE, (name, rows.value_text(reservation)))
    # A new user's place is that in the queue's state; known ones keep theirs.
    known = [name for name in queue_state.users if name in changes.users] if len(changes.users) > 1 else changes.users
    connection.executemany(_USER_WRITE, [_user_row(queue_state.users[name]) for name in known])
    put_fact(connection, "time_s", queue_state.time_s)
    if changes.has_settings:
        put_fact(connection, "settings", rows.value_text(queue_state.settings))


def read_ledger(connection: sqlite3.Connection) -> Ledger:
    """Read the ledger from the current tables; the time depends on the number of jobs that have not ended."""
    settings = get_fact(connection, "settings", None)
    devices = connection.execute("SELECT id, body, closed FROM devices ORDER BY position").fetchall()
    users = connection.execute(
        "SELECT name, limits, usage_device_s, accounted_s, num_devices FROM users ORDER BY position"
    )
    reservations = connection.execute("SELECT id, body FROM reservations ORDER BY position")
    states = {str(state): state for state in JobState}
    outcomes = connection.execute(f"SELECT id, state FROM jobs WHERE state IN {_ENDED}")
    jobs = connection.execute(f"SELECT id, body FROM jobs WHERE state NOT IN {_ENDED} ORDER BY number")
    ledger = Ledger()
    ledger.queue_state = QueueState(
        time_s=float(get_fact(connection, "time_s", 0.0)),
        settings=Settings() if settings is None else rows.value_from(Settings, settings),
        devices={name: rows.value_from(Device, body) for name, body, _ in devices},
        closed={name: closed for name, _, closed in devices if closed is not None},
        users={name: User(name, rows.value_from(Limits, limits), *use) for name, limits, *use in users},
        reservations={name: rows.value_from(Reservation, body) for name, body in reservations},
        jobs={name: rows.value_from(Job, body) for name, body in jobs},
        outcomes={name: states[state] for name, state in outcomes},
    )
    for attempt in read_attempts(connection, "ended_s IS NULL"):
        ledger.open[attempt.fence.job] = attempt
    ledger.last = int(connection.execute("SELECT coalesce(max(number), 0) FROM events").fetchone()[0])
    return ledger


def read_history(connection: sqlite3.Connection) -> History:
    changes = Changes()
    for (body,) in connection.execute("SELECT body FROM jobs ORDER BY number"):
        job = rows.value_from(Job, body)
        changes.jobs[job.id] = job
    for attempt in read_attempts(connection, "1"):
        changes.attempts[attempt.fence.number] = attempt
    programs = dict(connection.execute("SELECT job, body FROM programs").fetchall())
    return History(read_ledger(connection), changes, programs)


def fold_history(connection: sqlite3.Connection) -> History:
    ledger, changes, programs = Ledger(), Changes(), {}
    for row in read_log(connection):
        ledger.apply(rows.entry_from(row.kind, row.body), changes)
        if row.extra is not None and row.kind == events.Submitted.__name__:
            programs[str(row.job)] = row.extra
    return History(ledger, changes, programs)


def _write_log(connection: sqlite3.Connection, log: list[LogRow]) -> None:
    connection.executemany(
        "INSERT INTO events (number, time_s, kind, job, body, extra) VALUES (?, ?, ?, ?, ?, ?)",
        [(row.number, row.time_s, row.kind, row.job, row.body, row.extra) for row in log],
    )


def write_from_log(connection: sqlite3.Connection, log: list[LogRow]) -> int:
    """Fill an empty queue with the events of a log, up to the first that can't be read or follow; return their number."""
    ledger, changes, programs = Ledger(), Changes(), {}
    good: list[LogRow] = []
    for row in log:
        try:
            ledger.apply(rows.entry_from(row.kind, row.body), changes)
        except (EvenloadError, ValueError, TypeError):
            break
        good.append(row)
        if row.extra is not None and row.kind == events.Submitted.__name__:
            programs[str(row.job)] = row.extra
    _write_log(connection, good)
    write_current(connection, ledger, changes, programs)
    return len(good)


def refold(connection: sqlite3.Connection) -> None:
    history = fold_history(connection)
    write_current(connection, history.ledger, history.changes, history.programs)


def read_log(connection: sqlite3.Connection, after: int = 0, job: str | None = None) -> Iterator[LogRow]:
    """Yield the rows of the log after number `after`; of one job, if given."""
    columns = "SELECT number, time_s, kind, job, body, extra FROM events WHERE number > ?"
    if job is None:
        found = connection.execute(f"{columns} ORDER BY number", (after,))
    else:
        found = connection.execute(f"{columns} AND job = ? ORDER BY number", (after, job))
    return (LogRow(*row) for row in found)


def read_attempts(connection: sqlite3.Connection, condition: str, *values: Any) -> Iterator[AttemptRecord]:
    found = connection.execute(f"SELECT {_ATTEMPT_COLUMNS} FROM attempts WHERE {condition} ORDER BY fence", values)
    for number, job, attempt, devices, began_s, ended_s, ending, reason, runner in found:
        facts = None if runner is None else json.loads(runner)
        fence = Fence(job, attempt, number)
        yield AttemptRecord(fence, tuple(json.loads(devices)), began_s, ended_s, ending, reason, facts)


def get_fact(connection: sqlite3.Connection, name: str, default: Any) -> Any:
    found = connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return default if found is None else found[0]


def put_fact(connection: sqlite3.Connection, name: str, value: Any) -> None:
    connection.execute("INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)", (name, value))


def _upsert(table: str, key: str, columns: str) -> str:
    names = columns.split()
    changes = ", ".join(f"{name} = excluded.{name}" for name in names if name != key)
    marks = ", ".join("?" * len(names))
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks}) ON CONFLICT ({key}) DO UPDATE SET {changes}"


_JOB_WRITE = _upsert(
    "jobs",
    "id",
    "id user name state priority min_devices max_devices devices submitted_s since_s attempt done total rate_per_s "
    "reported_s reason body",
)
_ATTEMPT_WRITE = _upsert("attempts", "fence", _ATTEMPT_COLUMNS.replace(",", ""))
_DEVICE_WRITE = _upsert("devices", "id", "id body closed")
_USER_WRITE = _upsert("users", "name", "name limits usage_device_s accounted_s num_devices")
_RESERVATION_WRITE = _upsert("reservations", "id", "id body")


def _job_row(job: Job) -> tuple[Any, ...]:
    spec = job.spec
    return (
        job.id, spec.user, spec.name, str(job.state), spec.priority, spec.needs.min_devices, spec.needs.max_devices,
        json.dumps(job.devices), job.submitted_s, job.since_s, job.attempt, job.done, job.total, job.rate_per_s,
        job.reported_s, job.reason, rows.value_text(job),
    )  # fmt: skip


def _attempt_row(attempt: AttemptRecord) -> tuple[Any, ...]:
    runner = None if attempt.runner is None else json.dumps(dict(attempt.runner))
    fence = attempt.fence
    return (
        fence.number, fence.job, fence.attempt, json.dumps(attempt.devices), attempt.began_s, attempt.ended_s,
        attempt.ending, attempt.reason, runner,
    )  # fmt: skip


def _user_row(user: User) -> tuple[Any, ...]:
    return (user.name, rows.value_text(user.limits), user.usage_device_s, user.accounted_s, user.num_devices)
