"""Backups of a queue's file, and its repair after damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenload.errors import QueueError
from evenload.scheduler.core import events
from evenload.scheduler.store import backup
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.schema import DATABASE
from evenload.scheduler.store.writer import QueueStore
from tests.unit.scheduler.queue import spec


def _submit(folder: Path, first: int, num: int) -> None:
    with QueueStore(folder, holder="test") as store:
        for number in range(first, first + num):
            store.record(events.Submitted(float(number), str(number), spec(name="x" * 90)), extra={"command": ["true"]})
        store.commit()


def _damage(path: Path, part: float) -> None:
    """Overwrites the last `part` of a file, but not its first page."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(max(4096, int(size * (1 - part))))
        file.write(b"\xa5" * (size - file.tell()))


def _num_jobs(folder: Path) -> int:
    with Reader(folder) as reader:
        return len(reader.jobs())


def test_a_damaged_queue_is_made_whole_from_its_backup(tmp_path: Path) -> None:
    _submit(tmp_path, 1, 200)
    for _ in range(backup.NUM_KEPT + 1):
        made = backup.back_up(tmp_path)
    assert made in backup.backups(tmp_path) and len(backup.backups(tmp_path)) <= backup.NUM_KEPT
    _submit(tmp_path, 201, 200)
    _damage(tmp_path / DATABASE, 0.5)
    with pytest.raises(QueueError), QueueStore(tmp_path, holder="test") as store:
        store.record(events.Submitted(999.0, "999", spec()))
        store.commit()
        raise QueueError(audit(tmp_path)[0])
    done = backup.repair(tmp_path)
    assert done.problems and done.num_from_backup == 200 and done.damaged is not None and done.damaged.exists()
    assert 200 <= _num_jobs(tmp_path) <= 401 and audit(tmp_path) == []
    assert backup.repair(tmp_path).damaged is None
    _submit(tmp_path, 5000, 1)


def test_without_a_backup_what_can_be_read_stays(tmp_path: Path) -> None:
    """Tables that don't follow from the log are folded anew; a daemon that runs is in the way."""
    _submit(tmp_path, 1, 50)
    import sqlite3

    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("UPDATE jobs SET state = 'FAILED' WHERE number > 25")
    connection.close()
    with QueueStore(tmp_path, holder="a daemon"), pytest.raises(QueueError, match="a daemon"):
        backup.repair(tmp_path)
    assert backup.repair(tmp_path).num_events == 50
    assert _num_jobs(tmp_path) == 50 and audit(tmp_path) == []


def test_a_damaged_file_makes_no_backup(tmp_path: Path) -> None:
    _submit(tmp_path, 1, 200)
    good = backup.back_up(tmp_path)
    _damage(tmp_path / DATABASE, 0.9)
    with pytest.raises(QueueError, match="no backup"):
        backup.back_up(tmp_path)
    assert backup.backups(tmp_path) == [good]
