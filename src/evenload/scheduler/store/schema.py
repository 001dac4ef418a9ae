"""The tables, and migrations from earlier versions.

Append to `MIGRATIONS` and never change one that was released: each leads from its index to the next version. The current tables
follow from the log, so a migration that only reshapes them drops and creates them, and sets `refolds`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenload.errors import QueueError

DATABASE = "queue.sqlite"
CLOCK = "clock"
"""Name of the fact that holds the `ClockAnchor`."""

APPLICATION_ID = (
    0x45766C64  # "Evld": written into the file, so that another program's database is not taken for a queue
)

CURRENT_TABLES = ("jobs", "programs", "attempts", "devices", "users", "reservations")


@dataclass(frozen=True, slots=True)
class Migration:
    statements: tuple[str, ...]
    refolds: bool = False
    """The current tables are filled from the log afterwards."""


_FIRST = Migration(
    (
        # What there is one of: the settings, the queue's state's clock, the writer's epoch.
        "CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
        """CREATE TABLE events (
            number INTEGER PRIMARY KEY, time_s REAL NOT NULL, kind TEXT NOT NULL, job TEXT, body TEXT NOT NULL,
            extra TEXT)""",
        "CREATE INDEX events_of_job ON events (job, number) WHERE job IS NOT NULL",
        "CREATE TRIGGER events_stay BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'the log only grows'); END",
        "CREATE TRIGGER events_hold BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'the log only grows'); END",
        # `body` is all of a job; the columns before it are what lists and searches read.
        """CREATE TABLE jobs (
            number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, user TEXT NOT NULL, name TEXT NOT NULL,
            state TEXT NOT NULL, priority INTEGER NOT NULL, min_devices INTEGER NOT NULL, max_devices INTEGER NOT NULL,
            devices TEXT NOT NULL, submitted_s REAL NOT NULL, since_s REAL NOT NULL, attempt INTEGER NOT NULL,
            done REAL NOT NULL, total REAL, rate_per_s REAL NOT NULL, reported_s REAL NOT NULL, reason TEXT NOT NULL,
            body TEXT NOT NULL)""",
        "CREATE INDEX jobs_by_state ON jobs (state, number)",
        "CREATE INDEX jobs_by_user ON jobs (user, state, number)",
        "CREATE TABLE programs (job TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID",
        """CREATE TABLE attempts (
            fence INTEGER PRIMARY KEY, job TEXT NOT NULL, attempt INTEGER NOT NULL, devices TEXT NOT NULL,
            began_s REAL NOT NULL, ended_s REAL, ending TEXT NOT NULL, reason TEXT NOT NULL, runner TEXT,
            UNIQUE (job, attempt))""",
        "CREATE UNIQUE INDEX attempts_under_way ON attempts (job) WHERE ended_s IS NULL",
        "CREATE TABLE devices (position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, body TEXT NOT NULL, closed TEXT)",
        """CREATE TABLE users (
            position INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, limits TEXT NOT NULL,
            usage_device_s REAL NOT NULL, accounted_s REAL NOT NULL, num_devices INTEGER NOT NULL)""",
        "CREATE TABLE reservations (position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, body TEXT NOT NULL)",
    )
)

_BILLED_FROM_START = Migration((), refolds=True)
"""Attempts began when they got their devices; now when their program may start."""

# The last one changes nothing: from then on the log may hold `ProgramStarted`, which earlier versions can't read.
MIGRATIONS: tuple[Migration, ...] = (_FIRST, _BILLED_FROM_START, Migration(()))


def version_of(connection: sqlite3.Connection) -> int:
    """Return the version of a queue's file, 0 for an empty one; `QueueError` if it is no queue."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    owner = int(connection.execute("PRAGMA application_id").fetchone()[0])
    tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if owner != APPLICATION_ID and (version or owner or tables):
        raise QueueError(f"{file_of(connection)} is not a queue: it is another program's database; move it away")
    return version


def check_version(connection: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Raise `QueueError` for a file of another version, or one that is no queue."""
    version = version_of(connection)
    if version > len(migrations):
        raise QueueError(_newer(connection, version, len(migrations)))
    if any(each.statements for each in migrations[version:]):  # what only folds the log anew can be read before
        raise QueueError(
            f"the queue {file_of(connection)} has schema {version}, this version reads {len(migrations)}: start its "
            f"daemon once, which brings it up to date"
        )


def migrate(
    connection: sqlite3.Connection,
    refold: Callable[[sqlite3.Connection], None],
    migrations: Sequence[Migration] = MIGRATIONS,
) -> None:
    """Migrate a file to this version, step by step; `refold` fills the current tables from the log.

    Raises `QueueError` if the file is newer than this version, or no queue.
    """
    version = version_of(connection)
    if version > len(migrations):
        raise QueueError(_newer(connection, version, len(migrations)))
    for number in range(version, len(migrations)):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in migrations[number].statements:
                connection.execute(statement)
            if migrations[number].refolds:
                for table in CURRENT_TABLES:
                    connection.execute(f"DELETE FROM {table}")
                refold(connection)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {number + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def file_of(connection: sqlite3.Connection) -> str:
    return str(connection.execute("PRAGMA database_list").fetchone()[2])


def _newer(connection: sqlite3.Connection, version: int, known: int) -> str:
    return (
        f"the queue {file_of(connection)} has schema {version}, this version of Evenload knows {known}: it was written by "
        f"a newer one; use that"
    )
