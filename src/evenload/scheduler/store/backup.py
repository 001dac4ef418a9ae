"""Backups of a queue's file, and its repair from what can still be read.

A backup is a copy by ``VACUUM INTO``, which reads one consistent state while the writer goes on, and fails where the file is
damaged. A repair takes the log of the newest backup that is whole, appends the events of the damaged file that follow it
without a gap, and folds the tables anew. The damaged file stays beside the new one.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from evenload.errors import EvenloadError, QueueError
from evenload.scheduler.clock import ClockAnchor, QueueClock, wall_s
from evenload.scheduler.core import events
from evenload.scheduler.paths import ATTEMPT_STARTED, ATTEMPTS, BACKUPS, attempt_folder, log_path
from evenload.scheduler.store import tables
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.lock import WriterLock
from evenload.scheduler.store.rows import value_from, value_text
from evenload.scheduler.store.schema import CLOCK, DATABASE, MIGRATIONS, migrate, version_of
from evenload.scheduler.store.writer import LOCK, QueueStore

NUM_KEPT = 3
_SAME_S = 60.0
"""A job's output is of an attempt that the queue knows, if it was written at most so long after it."""
_NO_END = "its end was in the damaged part of the queue's file"


def back_up(folder: Path) -> Path:
    """Write a backup of the queue and remove all but the newest; raise a `QueueError` where the file can't be copied."""
    kept = folder / BACKUPS
    part = kept / "part"
    try:
        kept.mkdir(mode=0o700, exist_ok=True)
        part.unlink(missing_ok=True)
        with contextlib.closing(_reading(folder / DATABASE)) as connection:
            connection.execute("VACUUM INTO ?", (str(part),))
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fchmod(descriptor, 0o600)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        before = backups(folder)
        made = kept / f"{time.strftime('%Y%m%d-%H%M%S')}.sqlite"
        made_ns = int(wall_s() * 1e9)
        if before:  # it is the newest, also where the clock was set back
            made_ns = max(made_ns, before[0].stat().st_mtime_ns + 1)
        os.utime(part, ns=(made_ns, made_ns))
        part.replace(made)
        for old in before[NUM_KEPT - 1 :]:
            if old != made:
                old.unlink()
    except (OSError, sqlite3.Error) as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)  # a full disk needs its room for the queue
        raise QueueError(f"no backup of the queue {folder / DATABASE} can be written: {error}") from error
    return made


def backups(folder: Path) -> list[Path]:
    """Return the backups of a queue, the newest first."""
    return sorted(
        (folder / BACKUPS).glob("*.sqlite"), key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True
    )


@dataclass(frozen=True, slots=True)
class Repair:
    problems: tuple[str, ...]
    """The damage that was found; nothing was changed where this is empty."""
    num_events: int = 0
    """Events of the queue now, and how many of them are from a backup."""
    num_from_backup: int = 0
    backup: Path | None = None
    damaged: Path | None = None
    """The damaged file, under its new name."""
    held: tuple[str, ...] = ()
    """Jobs that have begun, or ended, since the last of the events: they are held back, so that none runs twice unasked."""


def repair(folder: Path) -> Repair:
    """Check a queue that no daemon writes, and make its file whole again.

    Raises:
        QueueError: a daemon runs, or neither the file nor a backup holds any events.
    """
    if not folder.exists():
        raise QueueError(f"there is no queue in {folder}")
    try:
        lock = WriterLock(folder / LOCK, "evenload queue repair")
    except OSError as error:
        raise QueueError(f"the queue {folder} can't be written by this user: {error}") from error
    try:
        _migrate(folder / DATABASE)
        if not (problems := _problems(folder)):
            return Repair(())
        backup = next((path for path in backups(folder) if _is_whole(path)), None)
        log = [] if backup is None else _readable_log(backup, 0)
        num_from_backup = len(log)
        log += _readable_log(folder / DATABASE, log[-1].number if log else 0)
        if not log:
            raise QueueError(
                f"neither {folder / DATABASE} nor a backup in {folder / BACKUPS} has an event that can be read"
            )
        made = folder / "repaired" / DATABASE
        shutil.rmtree(made.parent, ignore_errors=True)
        made.parent.mkdir(mode=0o700)
        num = _write(made, log, _clock(folder / DATABASE) or (None if backup is None else _clock(backup)))
        held = _hold_begun(made.parent, folder)
        damaged = folder / f"{DATABASE}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                (folder / f"{DATABASE}{suffix}").replace(damaged.with_name(damaged.name + suffix))
        made.replace(folder / DATABASE)
        shutil.rmtree(made.parent, ignore_errors=True)
    finally:
        lock.release()
    return Repair(tuple(problems), num, min(num, num_from_backup), backup, damaged, held)


def _hold_begun(made: Path, folder: Path) -> tuple[str, ...]:
    """Hold back the jobs of the queue in `made` that have gone on since its last event, as the files in `folder` show.

    One that waits by the log has an output of later, or the files of a later attempt, whose program may print nothing. One
    that runs has lost its attempt's files, which stay until its end is recorded; or its program has begun, and the log has
    nothing of its runner, which can't be found any more.
    """
    begun = _begun_attempts(folder)
    with QueueStore(made, holder="evenload queue repair") as store:
        ahead_s = 0.0 if store.anchor is None else QueueClock(store.anchor, store.queue_state.time_s).ahead_s
        held = []
        for job in list(store.queue_state.jobs.values()):
            written_s = -math.inf
            with contextlib.suppress(FileNotFoundError):
                written_s = log_path(folder, job.id).stat().st_mtime - ahead_s
            if (attempt := store.attempt(job.id)) is not None:
                fence = attempt.runner_fence
                files = attempt_folder(folder, job.id, fence.attempt)
                has_gone_on = not files.exists() and (attempt.runner is not None or written_s > attempt.began_s)
                if not has_gone_on and (attempt.runner is not None or begun.get(job.id, 0) < fence.attempt):
                    continue
                store.record(events.Lost(store.queue_state.time_s, job.id, _NO_END))
            else:
                has_output = written_s > (job.since_s + _SAME_S if job.attempt else -math.inf)
                if job.is_held or not (has_output or begun.get(job.id, 0) > job.attempt):
                    continue
            if job.id in store.queue_state.jobs:
                store.record(events.JobHeld(store.queue_state.time_s, job.id))
                held.append(job.id)
        store.commit()
    return tuple(held)


def _begun_attempts(folder: Path) -> dict[str, int]:
    """Return the newest attempt of each job whose program has begun, and whose files are still there."""
    found: dict[str, int] = {}
    for path in (folder / ATTEMPTS).glob(f"*.*/{ATTEMPT_STARTED}"):
        job, _, attempt = path.parent.name.rpartition(".")
        if attempt.isdecimal() and path.stat().st_size:
            found[job] = max(found.get(job, 0), int(attempt))
    return found


def _migrate(database: Path) -> None:
    """Bring the file of an earlier version up to date, whose tables would differ from the log; damage is left to `_problems`."""
    with contextlib.suppress(sqlite3.Error, QueueError):
        with contextlib.closing(_reading(database)) as connection:  # a damaged file stays as it is
            is_earlier = 0 < version_of(connection) < len(MIGRATIONS)
        if is_earlier:
            with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
                migrate(connection, tables.refold)


def _problems(folder: Path) -> list[str]:
    try:
        found = audit(folder)
        with contextlib.closing(_reading(folder / DATABASE)) as connection:
            if (text := tables.get_fact(connection, CLOCK, None)) is not None:
                value_from(ClockAnchor, text)
        return found
    except (sqlite3.Error, QueueError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{type(error).__name__}: {error}"]


def _is_whole(path: Path) -> bool:
    try:
        with contextlib.closing(_reading(path)) as connection:
            return [row[0] for row in connection.execute("PRAGMA integrity_check")] == ["ok"]
    except sqlite3.Error:
        return False


def _reading(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=10.0)


def _readable_log(path: Path, after: int) -> list[tables.LogRow]:
    """Return the events after a number, without a gap, until one can't be read."""
    found: list[tables.LogRow] = []
    with contextlib.suppress(sqlite3.Error), contextlib.closing(_reading(path)) as connection:
        for row in tables.read_log(connection, after):
            if row.number != after + len(found) + 1:
                break
            found.append(row)
    return found


def _clock(path: Path) -> str | None:
    """Return the stored origin of a queue's time; None where it can't be read."""
    with (
        contextlib.suppress(sqlite3.Error, EvenloadError, ValueError, TypeError, AttributeError),
        contextlib.closing(_reading(path)) as connection,
    ):
        text = tables.get_fact(connection, CLOCK, None)
        return None if text is None else value_text(value_from(ClockAnchor, text))
    return None


def _write(path: Path, log: list[tables.LogRow], clock: str | None) -> int:
    """Write a queue's file with these events, up to the first that can't follow those before it; return their number."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, tables.refold, MIGRATIONS)
        connection.execute("BEGIN")
        num = tables.write_from_log(connection, log)
        if clock is not None:  # without it a queue whose machine's clock was set would take that for time that passed
            tables.put_fact(connection, CLOCK, clock)
        connection.execute("COMMIT")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return num
