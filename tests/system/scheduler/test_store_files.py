"""Where a queue may lie, who writes it, and queues of other versions."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from evenload.errors import ConfigError, QueueError
from evenload.hardware import mount_of
from evenload.scheduler.core import events
from evenload.scheduler.store import tables
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.filesystem import refuse_network
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.schema import APPLICATION_ID, MIGRATIONS, Migration
from evenload.scheduler.store.writer import DATABASE, LOCK, QueueStore
from tests.unit.scheduler.queue import spec
from tests.unit.scheduler.store_history import Happenings

HERE = Path(__file__).parent

MOUNTS = r"""
/dev/sda1 / ext4 rw 0 0
server:/export /home nfs4 rw,vers=4.2 0 0
/dev/sdb1 /home/local\040disk xfs rw 0 0
me@box: /mnt/box fuse.sshfs rw 0 0
mergerfs /mnt/pool fuse.mergerfs rw 0 0
tmpfs /home/ann/over tmpfs rw 0 0
other:/x /home/ann/over nfs rw 0 0
//nas/share /mnt/nas cifs rw 0 0
lustre@tcp:/l /scratch lustre rw 0 0
broken
""".lstrip()


def table_of_mounts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that psutil reads as /proc/self/mounts."""
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(folder / "proc"))
    (folder / "proc" / "self").mkdir(parents=True)
    return folder / "proc" / "self" / "mounts"


@pytest.mark.parametrize(
    ("folder", "kind", "is_refused"),
    [
        ("/var/queue", "ext4", False),
        ("/home/ann", "nfs4", True),
        ("/homestead", "ext4", False),
        ("/home/local disk/queue", "xfs", False),
        ("/mnt/box", "fuse.sshfs", True),
        ("/mnt/pool/a", "fuse.mergerfs", False),
        ("/home/ann/over/b", "nfs", True),
        ("/mnt/nas/queue", "cifs", True),
        ("/scratch/q", "lustre", True),
    ],
)
def test_network_file_systems_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, kind: str, is_refused: bool
) -> None:
    table_of_mounts(tmp_path, monkeypatch).write_text(MOUNTS)
    found = mount_of(Path(folder))
    assert found is not None and found.fs_type == kind
    if is_refused:
        with pytest.raises(
            ConfigError, match=rf"(?s){folder}.*as {kind}, a network file system.*Put it on a local disk"
        ):
            refuse_network(Path(folder))
    else:
        refuse_network(Path(folder))


def test_a_link_to_a_network_file_system_is_seen_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    table = table_of_mounts(tmp_path, monkeypatch)
    table.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/x {real} nfs rw 0 0\n")
    with pytest.raises(ConfigError, match=r"mounted at .*real as nfs"):
        refuse_network(tmp_path / "link" / "queue")
    refuse_network(tmp_path)
    table.unlink()
    refuse_network(tmp_path / "link")
    monkeypatch.undo()
    assert mount_of(Path("/")) is not None


def test_the_second_writer_is_told_who_is_the_first_until_that_is_gone(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from evenload.scheduler.store.writer import QueueStore
store = QueueStore(Path({str(tmp_path)!r}), holder="evenload daemon")
print("there", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None and first.stdout.readline() == "there\n"
        with pytest.raises(
            QueueError, match=rf"already has its writer: evenload daemon, process {first.pid} on .*, since 20"
        ):
            QueueStore(tmp_path, holder="another")
        with Reader(tmp_path) as reader:
            assert reader.jobs() == []
        first.send_signal(signal.SIGKILL)
        first.wait(timeout=20)
        with QueueStore(tmp_path, holder="another") as second:
            assert second.epoch == 2
            with pytest.raises(QueueError, match=f"another, process {os.getpid()} "):
                QueueStore(tmp_path, holder="a third")


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the queue's folder .*file/queue can't be used"):
        QueueStore(tmp_path / "file" / "queue", holder="a test")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / LOCK).symlink_to(tmp_path / "file")
    with pytest.raises(ConfigError, match="can't be used"):
        QueueStore(tmp_path / "linked", holder="a test")
    with pytest.raises(QueueError, match="there is no queue in"):
        Reader(tmp_path / "nowhere")
    with QueueStore(tmp_path / "new", holder="a test"):
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "new" / DATABASE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["other", "garbage"])
def test_what_is_no_queue_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / DATABASE
    if content == "other":
        other = sqlite3.connect(path)
        other.execute("CREATE TABLE photos (id)")
        other.close()
    else:
        path.write_text("no database, but much longer than a header of SQLite would be; so it can be told apart. " * 9)
    before = path.read_bytes()
    for opens in (lambda: QueueStore(tmp_path, holder="a test"), lambda: Reader(tmp_path)):
        with pytest.raises(QueueError, match=r"another program|not a database"):
            opens()
    assert path.read_bytes() == before
    with pytest.raises(QueueError):  # the lock was let go of: the error is the same, not that of the lock
        QueueStore(tmp_path, holder="a test")


def test_a_queue_of_version_1_opens_and_holds_together(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / DATABASE)
    old.executescript((HERE / "store_version_1.sql").read_text())
    old.close()
    with QueueStore(tmp_path, holder="a test") as store:
        assert store.last > 60 and store.queue_state.jobs and store.queue_state.outcomes
        store.record(events.Submitted(store.queue_state.time_s, "new", spec()))
        store.commit()
    assert audit(tmp_path) == []


WIDER = Migration(
    (
        "ALTER TABLE events ADD COLUMN host TEXT",
        "DROP TABLE users",
        "CREATE TABLE users (position INTEGER PRIMARY KEY, name TEXT UNIQUE, limits TEXT, usage_device_s REAL, "
        "accounted_s REAL, num_devices INTEGER, mail TEXT)",
    ),
    refolds=True,
)


def test_the_next_version_is_reached_in_whole_steps(tmp_path: Path) -> None:
    with QueueStore(tmp_path, holder="a test") as store:
        Happenings(store, 4).happen(80)
        store.commit()
        before = store.queue_state.snapshot()
    broken = Migration((*WIDER.statements, "CREATE TABLE events (again)"), refolds=True)
    with pytest.raises(QueueError, match="already exists"):
        QueueStore(tmp_path, holder="a test", migrations=(*MIGRATIONS, broken))
    assert audit(tmp_path) == []
    with QueueStore(tmp_path, holder="a test", migrations=(*MIGRATIONS, WIDER)) as store:
        assert store.queue_state.snapshot() == before
        Happenings(store, 5).happen(20)
        store.commit()
    connection = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)
    folded, stored = tables.fold_history(connection), tables.read_history(connection)
    assert folded.changes.jobs == stored.changes.jobs and folded.changes.attempts == stored.changes.attempts
    assert folded.ledger.queue_state.users == stored.ledger.queue_state.users and folded.programs == stored.programs
    connection.close()
    for opens in (lambda: QueueStore(tmp_path, holder="a test"), lambda: Reader(tmp_path)):
        known = len(MIGRATIONS)
        newer = rf"has schema {known + 1}, this version of Evenload knows {known}: .*a newer one; use that"
        with pytest.raises(QueueError, match=newer):
            opens()


def test_a_reader_does_not_guess_at_an_older_version(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / DATABASE)
    old.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    old.close()
    with pytest.raises(QueueError, match=rf"has schema 0, this version reads {len(MIGRATIONS)}: start its daemon once"):
        Reader(tmp_path)
