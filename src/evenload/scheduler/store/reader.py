"""Read-only access to a queue, beside its writer or without one."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from evenload.errors import QueueError
from evenload.scheduler.core.states import JobState
from evenload.scheduler.store.schema import CLOCK, DATABASE, check_version

if TYPE_CHECKING:  # a list needs none of these, and they cost more to import than it does
    from evenload.scheduler.clock import QueueClock
    from evenload.scheduler.core.values import Job
    from evenload.scheduler.store.ledger import AttemptRecord, Entry
    from evenload.scheduler.store.savings import Prices


_REPAIR = "; evenload queue stop and evenload queue repair make it whole"


class JobLine(NamedTuple):
    """A job in a list: plain columns, so that 100,000 of them are cheap."""

    number: int
    """In the order of submission; the next page begins after it."""
    id: str
    user: str
    name: str
    state: str
    priority: int
    min_devices: int
    max_devices: int
    devices: str
    """Ids of its devices, as a JSON list."""
    submitted_s: float
    since_s: float
    attempt: int
    done: float
    total: float | None
    rate_per_s: float
    reported_s: float
    reason: str


class AttemptLine(NamedTuple):
    """An attempt with its job, in plain columns."""

    job: str
    name: str
    user: str
    devices: str
    """Ids of its devices, as a JSON list."""
    began_s: float
    ended_s: float | None
    ending: str
    reason: str
    state: str
    """Of the job, as it is now."""


class LogEntry(NamedTuple):
    number: int
    entry: Entry
    extra: dict[str, Any] | None


class Reader:
    """Each method reads one consistent state, without uncommitted events. Used from one thread."""

    def __init__(self, folder: Path) -> None:
        """Open the queue in `folder`; `QueueError` if there is none, or it is of another version."""
        path = folder / DATABASE
        if not path.is_file():
            raise QueueError(f"there is no queue in {folder}")
        self._path = path
        self._last_first: tuple[str, dict[str, Any] | None] | None = None
        with contextlib.ExitStack() as stack, self._sql_errors():
            self._connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10.0, isolation_level=None
            )
            stack.callback(self._connection.close)
            check_version(self._connection)
            stack.pop_all()

    def jobs(
        self,
        *,
        states: Sequence[JobState] = (),
        user: str | None = None,
        after: int = 0,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> list[JobLine]:
        """Return jobs in the order of submission.

        Args:
            states: only those in one of these; all if empty.
            user: only this user's.
            after: only those after this number (before it, if `newest_first`); 0 for all.
            limit: the most to return; None for all.
            newest_first: reverse the order.
        """
        where, values = _where(states, user, [f"number {'<' if newest_first else '>'} {int(after)}"] if after else [])
        order = "DESC" if newest_first else "ASC"
        most = -1 if limit is None else int(limit)
        columns = ", ".join(JobLine._fields)
        found = self._query(f"SELECT {columns} FROM jobs {where} ORDER BY number {order} LIMIT {most}", *values)
        return list(map(JobLine._make, found))

    def clock(self) -> QueueClock:
        """Return the queue's clock, as its daemon last stored it."""
        from evenload.scheduler.clock import ClockAnchor, QueueClock

        facts = dict(self._query("SELECT name, value FROM facts WHERE name IN (?, 'time_s')", CLOCK))
        try:  # without `rows`, which costs a list of jobs more to import than this
            anchor = ClockAnchor(**json.loads(facts[CLOCK])) if CLOCK in facts else None
            return QueueClock(anchor, float(facts.get("time_s", 0.0)))
        except (TypeError, ValueError) as error:
            raise QueueError(f"the clock of the queue {self._path} can't be read: {error}{_REPAIR}") from error

    def text(self, expression: str, *, states: Sequence[JobState] = (), user: str | None = None) -> str:
        """Return the value of an SQL expression that aggregates all jobs, as text.

        The expression is the caller's own, never a user's; its columns are those of `JobLine`.
        """
        where, values = _where(states, user)
        return str(self._query(f"SELECT {expression} FROM jobs {where}", *values)[0][0])

    def joined(
        self,
        expression: str,
        separator: str,
        *,
        states: Sequence[JobState] = (),
        user: str | None = None,
        first: int = 0,
        last: int = -1,
    ) -> str:
        """Return the values of an SQL expression (as in `text`) for each job, joined in the order of submission.

        SQLite builds the text of 100,000 lines several times faster than Python. Only jobs with numbers from `first` to
        `last` are included (-1: to the end); the text is empty without jobs.
        """
        span = [f"number >= {int(first)}", *([f"number <= {int(last)}"] if last >= 0 else [])]
        where, values = _where(states, user, span)
        lines = f"SELECT {expression} AS line FROM jobs {where} ORDER BY number"
        return str(self._query(f"SELECT ifnull(group_concat(line, ?), '') FROM ({lines})", separator, *values)[0][0])

    def span(self) -> tuple[int, int]:
        """Return the numbers of the first and the last job; 0 and -1 without jobs."""
        first, last = self._query("SELECT min(number), max(number) FROM jobs")[0]
        return (0, -1) if first is None else (first, last)

    def counts(self, user: str | None = None) -> dict[JobState, int]:
        where, values = ("", ()) if user is None else ("WHERE user = ?", (user,))
        found = self._query(f"SELECT state, count(*) FROM jobs {where} GROUP BY state", *values)
        return {JobState(state): num for state, num in found}

    def job(self, name: str) -> Job | None:
        from evenload.scheduler.core.values import Job
        from evenload.scheduler.store import rows

        found = self._query("SELECT body FROM jobs WHERE id = ?", name)
        return rows.value_from(Job, found[0][0]) if found else None

    def program(self, name: str) -> dict[str, Any] | None:
        """Return what was stored with the job's `Submitted`."""
        found = self._query("SELECT body FROM programs WHERE job = ?", name)
        if not found:
            return None
        from evenload.scheduler.store.rows import whole_program

        return whole_program(dict(json.loads(found[0][0])), self._first_program)

    def _first_program(self, name: str) -> dict[str, Any] | None:
        """Return the program that those of an array differ from; the last one is kept, as programs never change."""
        if self._last_first is None or self._last_first[0] != name:
            self._last_first = (name, self.program(name))
        return self._last_first[1]

    def attempts(self, name: str) -> list[AttemptRecord]:
        from evenload.scheduler.store import tables

        with self._sql_errors():
            return list(tables.read_attempts(self._connection, "job = ?", name))

    def attempts_since(self, since_s: float, limit: int) -> list[AttemptLine]:
        """Return the attempts that were under way at or after a time of the queue's clock, the newest first."""
        columns = "a.job, j.name, j.user, a.devices, a.began_s, a.ended_s, a.ending, a.reason, j.state"
        statement = (
            f"SELECT {columns} FROM attempts a JOIN jobs j ON j.id = a.job WHERE a.ended_s IS NULL OR a.ended_s >= ? "
            "ORDER BY a.fence DESC LIMIT ?"
        )
        return list(map(AttemptLine._make, self._query(statement, since_s, limit)))

    def device_use(self, since_s: float = -math.inf) -> list[tuple[str, str, float, float | None, str, float, str]]:
        """Return each attempt that held devices at or after a time, in their order.

        User, devices (a JSON list), begin, end; and of its job the id, the time of submission and the needs (JSON).
        """
        statement = (
            "SELECT j.user, a.devices, a.began_s, a.ended_s, j.id, j.submitted_s, "
            "coalesce(json_extract(j.body, '$.spec.needs'), '{}') FROM attempts a JOIN jobs j ON j.id = a.job "
            "WHERE a.ended_s IS NULL OR a.ended_s > ? ORDER BY a.fence"
        )
        return self._query(statement, since_s)

    def waits(self, states: Sequence[JobState]) -> list[tuple[str, float, float]]:
        """Return user, time of submission and wait of each job in one of the states."""
        where, values = _where(states, None)
        return self._query(
            f"SELECT user, submitted_s, coalesce(json_extract(body, '$.waited_s'), 0.0) FROM jobs {where}", *values
        )

    def events_of(self, kind: str, condition: str) -> list[tuple[str, float]]:
        """Return the job's user and the time of each event of a stored kind for which an SQL condition on `e` holds."""
        return self._query(
            f"SELECT j.user, e.time_s FROM events e JOIN jobs j ON j.id = e.job WHERE e.kind = ? AND {condition}", kind
        )

    def prices(self) -> Prices:
        """Return the present prices of the devices, and the cheap hours by the queue's clock."""
        from evenload.scheduler.core.values import Device, Settings
        from evenload.scheduler.store.rows import value_from
        from evenload.scheduler.store.savings import Prices

        devices = [value_from(Device, body) for (body,) in self._query("SELECT body FROM devices ORDER BY position")]
        facts = dict(self._query("SELECT name, value FROM facts WHERE name = 'settings'"))
        hours = value_from(Settings, facts["settings"]).cheap_hours if facts else ""
        return Prices({device.id: device for device in devices}, hours, self.clock().midnight_s)

    def log(self, after: int = 0, job: str | None = None) -> Iterator[LogEntry]:
        """Yield the entries after number `after`, of one job or of all."""
        from evenload.scheduler.store import rows, tables

        with self._sql_errors():
            for row in tables.read_log(self._connection, after, job):
                extra = None if row.extra is None else json.loads(row.extra)
                yield LogEntry(row.number, rows.entry_from(row.kind, row.body), extra)

    def _query(self, statement: str, *values: Any) -> list[Any]:
        with self._sql_errors():
            return self._connection.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def _sql_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            is_damaged = getattr(error, "sqlite_errorcode", 0) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
            hint = _REPAIR if is_damaged else ""
            raise QueueError(f"the queue {self._path} can't be read: {error}{hint}") from error

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _where(states: Sequence[JobState], user: str | None, further: Sequence[str] = ()) -> tuple[str, list[str]]:
    conditions, values = list(further), []
    if states:
        conditions.append(f"state IN ({', '.join('?' * len(states))})")
        values += [str(state) for state in states]
    if user is not None:
        conditions.append("user = ?")
        values.append(user)
    return (f"WHERE {' AND '.join(conditions)}" if conditions else ""), values
