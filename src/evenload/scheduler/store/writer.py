"""The only writer of a queue. A commit is atomic, and on disk when it returns."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from evenload.errors import ConfigError, QueueError, StaleError
from evenload.scheduler.clock import ClockAnchor
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.values import Job
from evenload.scheduler.paths import BACKUPS, WRITER_LOCK
from evenload.scheduler.store import rows, tables
from evenload.scheduler.store.filesystem import refuse_network
from evenload.scheduler.store.ledger import AttemptRecord, Changes, Entry, Fence
from evenload.scheduler.store.lock import WriterLock
from evenload.scheduler.store.schema import CLOCK, MIGRATIONS, Migration, migrate, version_of
from evenload.scheduler.store.schema import DATABASE as DATABASE

LOCK = WRITER_LOCK

_BUSY_S = 10.0


class QueueStore:
    """A queue's log and tables, opened for writing by this process alone; used from one thread.

    `record` takes an event, `commit` writes all recorded events to disk as one transaction. Replies and actions must wait for
    the commit. A commit costs one wait for the disk, however many events it holds, so the daemon records everything that
    has arrived, commits, and then replies.
    """

    def __init__(self, folder: Path, *, holder: str, migrations: Sequence[Migration] = MIGRATIONS) -> None:
        """Open the queue in `folder`, which is created for this user alone if it is missing.

        Args:
            folder: on a local disk.
            holder: name of this writer, for the error of others: ``"evenload daemon"``.
            migrations: for tests.

        Raises:
            ConfigError: the folder can't be used, or is on a network file system.
            QueueError: another process writes it, or the file is of a later version, or no queue.
        """
        self.folder = folder
        try:
            refuse_network(folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_network(folder)  # again: looking into it may have mounted something
            self._lock = WriterLock(folder / LOCK, holder)
        except OSError as error:
            raise ConfigError(f"the queue's folder {folder} can't be used: {error}") from error
        self._connection: sqlite3.Connection | None = None
        try:
            self._connection = _opened(folder / DATABASE)
            if not version_of(self._connection) and any((folder / BACKUPS).glob("*.sqlite")):
                raise QueueError(
                    f"the queue {folder / DATABASE} is empty, and it has backups: evenload queue repair makes it whole "
                    f"from them; move {folder / BACKUPS} away for a new queue"
                )
            migrate(self._connection, tables.refold, migrations)
            self.epoch = _next_epoch(self._connection)
            """Number of times that a writer opened this queue; only the latest may write, whatever happened to its lock."""
            self._ledger = tables.read_ledger(self._connection)
            self._anchor = _stored_anchor(self._connection)
        except sqlite3.Error as error:
            self.close()
            is_full = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
            hint = (
                "make room on it"
                if is_full
                else "if it is damaged, evenload queue repair makes it whole from its backups"
            )
            raise QueueError(f"the queue {folder / DATABASE} can't be opened: {error}; {hint}") from error
        except BaseException:
            self.close()
            raise
        self._forget()

    @property
    def queue_state(self) -> QueueState:
        """The queue with all recorded events, committed or not. Read-only: use `record` to change it."""
        return self._ledger.queue_state

    @property
    def last(self) -> int:
        return self._ledger.last

    @property
    def anchor(self) -> ClockAnchor | None:
        """Origin of the queue's time; None in a new queue. On disk after the next `commit`."""
        return self._anchor

    @anchor.setter
    def anchor(self, anchor: ClockAnchor) -> None:
        self._anchor, self._has_new_anchor = anchor, True

    def attempts(self) -> tuple[AttemptRecord, ...]:
        """Return the running attempts: a new daemon adopts them or declares them lost."""
        return tuple(self._ledger.open.values())

    def attempt(self, job: str) -> AttemptRecord | None:
        return self._ledger.open.get(job)

    def fence(self, job: str) -> Fence:
        """Return the fence of the job's running attempt, for its runner.

        Raises `QueueError` if there is none, or it isn't committed yet: after a crash it would never have existed.
        """
        attempt = self._ledger.open.get(job)
        if attempt is None:
            raise QueueError(f"no attempt of job {job} is under way")
        if self._log and attempt.fence.number >= self._log[0].number:
            raise QueueError(f"attempt {attempt.fence.attempt} of job {job} isn't on disk yet: commit first")
        return attempt.fence

    def check(self, fence: Fence) -> None:
        """Raise `StaleError` for a runner of an earlier attempt."""
        self._ledger.check(fence)

    def record(
        self, entry: Entry, *, fence: Fence | None = None, extra: Mapping[str, Any] | None = None
    ) -> tuple[Job, ...]:
        """Record an event, to be on disk after the next `commit`; return the jobs that it changed.

        Args:
            entry: the event.
            fence: of the runner that reports it; None for the daemon's own events.
            extra: plain values to store beside the event; with a `Submitted`, the job's program.

        Raises:
            StaleError: the fence is of an attempt that is over, or of another job.
            QueueError: the event can't follow those before it, or can't be stored. Only this one is refused.
        """
        self._open()
        row = tables.log_row(self._ledger.last + 1, entry, extra)
        if fence is not None:
            if fence.job != row.job:
                raise StaleError(f"a runner of job {fence.job} speaks for job {row.job}")
            self._ledger.check(fence)
        changed = self._ledger.apply(entry, self._changes)
        self._log.append(row)
        return changed

    def commit(self) -> None:
        """Write all recorded events to disk as one transaction.

        Raises:
            QueueError: it can't be written (a full disk). Everything since the last commit is undone, in memory too.
            StaleError: another process writes this queue now; this store can't be used any more.
        """
        connection = self._open()
        if not self._log and not self._has_new_anchor:
            return
        try:
            connection.execute("BEGIN IMMEDIATE")
            epoch = tables.get_fact(connection, "epoch", None)
            if epoch != self.epoch:
                raise StaleError(
                    f"the queue {self.folder} has a writer of epoch {epoch}, this process is that of epoch {self.epoch}: "
                    f"another has taken over, so this one has to end"
                )
            tables.write(connection, self._ledger, self._changes, self._log)
            if self._has_new_anchor and self._anchor is not None:
                tables.put_fact(connection, CLOCK, rows.value_text(self._anchor))
            connection.execute("COMMIT")
        except StaleError:
            self.close()
            raise
        except BaseException as error:
            self._undo(connection)
            if isinstance(error, sqlite3.Error):
                raise QueueError(
                    f"the queue {self.folder / DATABASE} can't be written: {error}; all since the last commit is undone"
                ) from error
            raise
        self._forget()

    def close(self) -> None:
        """Close the queue. Recorded events that are not committed are lost."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise QueueError(f"the store of the queue {self.folder} is closed")
        return self._connection

    def _forget(self) -> None:
        self._changes = Changes()
        self._log: list[tables.LogRow] = []
        self._has_new_anchor = False

    def _undo(self, connection: sqlite3.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            self._ledger, self._anchor = tables.read_ledger(connection), _stored_anchor(connection)
        except sqlite3.Error:
            self.close()  # without a known state nothing can be done
        self._forget()


def _stored_anchor(connection: sqlite3.Connection) -> ClockAnchor | None:
    text = tables.get_fact(connection, CLOCK, None)
    return None if text is None else rows.value_from(ClockAnchor, text)


def _opened(path: Path) -> sqlite3.Connection:
    """Open the database with a write-ahead log and each commit forced to disk; only this user may read it."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    for folder in (path.parent, path.parent.parent):  # SQLite forces the file to disk, but not its name
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        version_of(connection)  # another program's database is left as it is
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise QueueError(
                f"SQLite keeps no write-ahead log of {path} (it says {mode!r}): is its folder on a local disk?"
            )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA trusted_schema = OFF")
        stack.pop_all()
    return connection


def _next_epoch(connection: sqlite3.Connection) -> int:
    connection.execute("BEGIN IMMEDIATE")
    epoch = int(tables.get_fact(connection, "epoch", 0)) + 1
    tables.put_fact(connection, "epoch", epoch)
    connection.execute("COMMIT")
    return epoch
