"""Backups of a queue's file, and its repair after damage."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import time
from pathlib import Path

import pytest

from evenload.cli.show import _show_queue_job
from evenload.errors import QueueError
from evenload.job.processes import boot_id, boottime_s
from evenload.scheduler import paths
from evenload.scheduler.clock import ClockAnchor
from evenload.scheduler.core import events
from evenload.scheduler.core.values import Device
from evenload.scheduler.daemon import backups as daemon_backups
from evenload.scheduler.daemon.backups import HourlyBackups
from evenload.scheduler.store import backup
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.ledger import RunnerStarted
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


def test_the_newest_backup_stays_after_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are removed, whatever the clock showed when they were made."""
    _submit(tmp_path, 1, 5)
    shown_s = [5e8, 6e8, 7e8, 1e8, 1e8]
    monkeypatch.setattr(backup, "wall_s", lambda: shown_s[0])
    names = iter("abcde")
    monkeypatch.setattr(backup.time, "strftime", lambda form: next(names))
    while shown_s:
        made = backup.back_up(tmp_path)
        assert backup.backups(tmp_path)[0] == made
        shown_s.pop(0)
    assert [path.stem for path in backup.backups(tmp_path)] == ["e", "d", "c"]


def test_a_backup_that_fails_leaves_no_part_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk needs the room; the next try follows soon."""
    _submit(tmp_path, 1, 5)
    log: list[str] = []
    backups = HourlyBackups(tmp_path, log.append)

    def fails(path: Path, *, ns: tuple[int, int]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def run(now_s: float) -> int:
        backups.run_if_due(now_s, 5)
        backups.close()
        return len(list((tmp_path / paths.BACKUPS).glob("*")))

    assert run(0.0) == 0
    with monkeypatch.context() as patched:
        patched.setattr(backup.os, "utime", fails)
        assert run(3600.0) == 0 and "No space left" in log[0]
    assert run(3700.0) == 0
    assert run(4000.0) == 1 and not backups.problem


def test_a_daemon_that_is_killed_every_half_hour_backs_up_every_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _submit(tmp_path, 1, 5)
    now_s, made = 1e9, []
    for module in (backup, daemon_backups):
        monkeypatch.setattr(module, "wall_s", lambda: now_s)
    for half_hour in range(9):
        now_s = 1e9 + 1800.0 * half_hour
        backups = HourlyBackups(tmp_path, print)  # a daemon's own
        for minute in range(30):
            backups.run_if_due(now_s + 60.0 * minute, half_hour)
            backups.close()
        made.append(len(backup.backups(tmp_path)) and backup.backups(tmp_path)[0].stat().st_mtime)
    assert made[2] > 0 and len(set(made[2:])) >= 3


def test_a_queue_that_this_user_cannot_write_is_named(tmp_path: Path) -> None:
    (tmp_path / "queue").write_text("no folder")
    with pytest.raises(QueueError, match="can't be written by this user"):
        backup.repair(tmp_path / "queue")


def test_who_reads_a_damaged_queue_is_told_of_the_repair(tmp_path: Path) -> None:
    _submit(tmp_path, 1, 200)
    _damage(tmp_path / DATABASE, 0.9)
    with pytest.raises(QueueError, match="malformed; evenload queue stop and evenload queue repair make it whole"):
        _num_jobs(tmp_path)
    with pytest.raises(QueueError, match="there is no queue in"):
        backup.repair(tmp_path / "nowhere")


def test_a_name_that_is_no_job_and_no_run_is_both_for_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _submit(tmp_path, 1, 1)
    monkeypatch.setattr(paths, "default_folder", lambda: tmp_path)
    with pytest.raises(QueueError, match="fisrt: there is no such run folder, and no job 'fisrt' in this queue"):
        _show_queue_job("fisrt", None, as_json=False)
    assert not _show_queue_job("runs/fisrt", None, as_json=False)


def test_an_empty_file_beside_backups_is_damage(tmp_path: Path) -> None:
    """A queue that lost its file must not begin anew without a word."""
    _submit(tmp_path, 1, 5)
    backup.back_up(tmp_path)
    for lose in (lambda path: path.write_bytes(b""), Path.unlink):
        lose(tmp_path / DATABASE)
        with pytest.raises(QueueError, match="evenload queue repair"):
            QueueStore(tmp_path, holder="test")
        assert backup.repair(tmp_path).num_events == 5 and _num_jobs(tmp_path) == 5


def test_a_repair_holds_back_jobs_that_began_after_the_backup(tmp_path: Path) -> None:
    """They wait by the backup, but have an output: they may have ended, and would run twice."""
    _submit(tmp_path, 1, 3)
    backup.back_up(tmp_path)
    (tmp_path / paths.LOGS).mkdir()
    paths.log_path(tmp_path, "2").write_text("it began")
    (tmp_path / DATABASE).write_bytes(b"")
    assert backup.repair(tmp_path).held == ("2",)
    with QueueStore(tmp_path, holder="test") as store:
        assert [job.id for job in store.queue_state.jobs.values() if job.is_held] == ["2"]
    assert audit(tmp_path) == []


def _run_since(folder: Path, state: str) -> None:
    """A backup of job 1, which has devices and whose program begins; then its end is recorded, and the file is lost."""
    with QueueStore(folder, holder="test") as store:
        store.anchor = ClockAnchor(boot_id(), -boottime_s() + 10.0, 0.0)
        store.record(events.DeviceAdded(1.0, Device("d0", "h")))
        store.record(events.Submitted(1.0, "1", spec(preemptible=False)), extra={"command": ["true"]})
        store.record(events.Placed(2.0, "1", ("d0",), 1))
        if state == "RUNNING":
            store.record(RunnerStarted(2.0, "1", 1, {"pid": 1, "start_ticks": 1, "boot_id": "x"}))
            store.record(events.JobStarted(2.0, "1"))
        store.commit()
        backup.back_up(folder)
        store.record(events.Lost(9.0, "1"))
        store.commit()
    (folder / DATABASE).write_bytes(b"")


@pytest.mark.parametrize("state", ["RUNNING", "STARTING"])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_repair_holds_back_jobs_that_ended_after_the_backup(tmp_path: Path, state: str, is_known: bool) -> None:
    """Of a program that has ended no file is left but its output; of one whose runner the log lacks, that it began."""
    attempt = paths.attempt_folder(tmp_path, "1", 1)
    (tmp_path / paths.LOGS).mkdir()
    if is_known:  # its runner goes on; or its program has not begun, and it gets one
        attempt.mkdir(parents=True)
        (attempt / paths.ATTEMPT_STARTED).touch()
    elif state == "STARTING":
        paths.log_path(tmp_path, "1").write_text("it began")
    _run_since(tmp_path, state)
    held = backup.repair(tmp_path).held
    with QueueStore(tmp_path, holder="test") as store:
        job = store.queue_state.jobs["1"]
    assert (held, job.state, job.is_held) == (((), state, False) if is_known else (("1",), "PENDING", True))
    assert audit(tmp_path) == []


def test_a_repair_holds_back_a_job_whose_program_runs_without_the_queue(tmp_path: Path) -> None:
    """The log has nothing of its runner, so no daemon can find it."""
    attempt = paths.attempt_folder(tmp_path, "1", 1)
    attempt.mkdir(parents=True)
    (attempt / paths.ATTEMPT_STARTED).write_text("12.0")
    _run_since(tmp_path, "STARTING")
    assert backup.repair(tmp_path).held == ("1",)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_repair_holds_back_a_job_that_began_anew_and_prints_nothing(tmp_path: Path, has_begun: bool) -> None:
    """It waits by the log. A second program would share the files of the one that runs."""
    with QueueStore(tmp_path, holder="test") as store:
        store.anchor = ClockAnchor(boot_id(), time.time() - boottime_s(), 0.0)
        now_s = time.time()
        store.record(events.DeviceAdded(now_s, Device("d0", "h")))
        store.record(events.Submitted(now_s, "1", spec()), extra={"command": ["true"]})
        store.record(events.Placed(now_s, "1", ("d0",), 1))
        store.record(events.Yielded(now_s, "1"))
        store.commit()
    backup.back_up(tmp_path)
    (tmp_path / DATABASE).write_bytes(b"")
    (tmp_path / paths.LOGS).mkdir()
    paths.log_path(tmp_path, "1").write_text("of its first attempt")
    attempt = paths.attempt_folder(tmp_path, "1", 2)
    attempt.mkdir(parents=True)
    (attempt / paths.ATTEMPT_STARTED).write_text("12.0" if has_begun else "")
    assert backup.repair(tmp_path).held == (("1",) if has_begun else ())


@pytest.mark.parametrize("has_backup", [True, False])
def test_a_repair_keeps_the_queues_time(tmp_path: Path, has_backup: bool) -> None:
    """Without its origin, a clock that was set forward would count as time for which jobs have run."""
    anchor = ClockAnchor(boot_id(), -boottime_s() + 1000.0, 86_400.0)
    with QueueStore(tmp_path, holder="test") as store:
        store.anchor = anchor
        store.record(events.Submitted(5.0, "1", spec()), extra={"command": ["true"]})
        store.commit()
    if has_backup:
        backup.back_up(tmp_path)
        (tmp_path / DATABASE).write_bytes(b"")
    else:
        with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
            connection.execute("UPDATE jobs SET state = 'FAILED'")
            connection.commit()
    assert backup.repair(tmp_path).damaged is not None
    with QueueStore(tmp_path, holder="test") as store:
        assert store.anchor == anchor


@pytest.mark.parametrize("text", ["{", "null", '{"boot": 5}', 7])
def test_a_clock_that_cannot_be_read_is_damage(tmp_path: Path, text: object) -> None:
    """No daemon opens such a queue."""
    _submit(tmp_path, 1, 5)
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        connection.execute("INSERT OR REPLACE INTO facts VALUES ('clock', ?)", (text,))
        connection.commit()
    assert backup.repair(tmp_path).num_events == 5
    with QueueStore(tmp_path, holder="test") as store:
        assert store.anchor is None


def test_a_repair_compares_outputs_by_the_queues_time(tmp_path: Path) -> None:
    """The wall clock is a day behind it: an output of now is newer than the job's last attempt all the same."""
    now_s = time.time() + 86_400.0
    with QueueStore(tmp_path, holder="test") as store:
        store.anchor = ClockAnchor(boot_id(), now_s - boottime_s(), -86_400.0)
        store.record(events.DeviceAdded(now_s - 3600.0, Device("d0", "h")))
        store.record(events.Submitted(now_s - 3600.0, "1", spec()), extra={"command": ["true"]})
        store.record(events.Placed(now_s - 3600.0, "1", ("d0",), 1))
        store.record(events.Yielded(now_s - 1800.0, "1"))
        store.commit()
    backup.back_up(tmp_path)
    (tmp_path / DATABASE).write_bytes(b"")
    (tmp_path / paths.LOGS).mkdir()
    paths.log_path(tmp_path, "1").write_text("it began anew")
    assert backup.repair(tmp_path).held == ("1",)


def test_a_queue_of_an_earlier_version_is_not_damaged(tmp_path: Path) -> None:
    _submit(tmp_path, 1, 20)
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        connection.execute("PRAGMA user_version = 1")
        connection.commit()
    assert backup.repair(tmp_path) == backup.Repair(())
    assert _num_jobs(tmp_path) == 20 and not list(tmp_path.glob("*.damaged-*"))
