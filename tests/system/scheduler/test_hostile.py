"""What a hostile user of the machine may try on a queue that root shares, each case refused and none harmful.

The users are real: a forked child becomes one, and talks to the socket as it likes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evenload.errors import EvenloadError
from evenload.scheduler import messages, paths
from evenload.scheduler.client import connect
from evenload.scheduler.store.writer import DATABASE, LOCK
from evenload.stored_names import REPORT_FOLDER, REQUEST_FILE, SPEC_FILE
from tests.system.scheduler.daemons import Box, box, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users, which root alone can")

MALLORY, ANN = 65534, 1  # nobody and daemon, which every Linux has
_SETTINGS = "shared = true\n[cpu]\nslots = 2\n"


@pytest.fixture(scope="module")
def queue() -> Iterator[Box]:
    with box() as made:
        made.settings(_SETTINGS)
        made.start()
        made.client().close()
        yield made


@pytest.fixture
def ann(queue: Box) -> Iterator[str]:
    """A job of Ann's that runs, with a secret."""
    job = str(as_user(ANN, lambda: _submit(queue, "sleep", "1000", environment={"TOKEN": "ann's secret"})))
    queue.wait_for(job, "RUNNING")
    yield job
    queue.call("cancel", jobs=[job], now=True)
    queue.wait_for(job, "CANCELLED")


def as_user(uid: int, act: Callable[[], Any]) -> Any:
    """What a child of that user returns; an error of Evenload's is its text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        entry = pwd.getpwuid(uid)
        os.setgroups([])
        os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
        os.setresuid(uid, uid, uid)
        os.environ["HOME"] = "/nonexistent"
        try:
            said: Any = act()
        except EvenloadError as error:
            said = f"refused: {error}"
        except OSError as error:
            said = f"denied: {error}"
        except BaseException as error:
            said = f"failed: {type(error).__name__} {error}"
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    text = b""
    while part := os.read(reading, 65536):
        text += part
    os.close(reading)
    os.waitpid(pid, 0)
    return json.loads(text)


def _submit(queue: Box, *command: str, spec: dict[str, Any] | None = None, **program: Any) -> str:
    row = {"command": list(command), "folder": "/", "grace_s": 5.0, **program}
    return str(_ask(queue, "submit", spec=spec or {}, program=row)["job"])


def _ask(queue: Box, verb: str, **fields: Any) -> dict[str, Any]:
    with connect(queue.folder, start=False) as client:
        return client.call(verb, **fields)


@contextlib.contextmanager
def _raw(queue: Box) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as line, paths.socket_address(queue.folder) as address:
        line.settimeout(20)
        line.connect(address)
        yield line


def _say(queue: Box, *parts: bytes) -> str:
    """Sends bytes, and what comes back until the daemon closes or the first line is whole."""
    with _raw(queue) as line:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                line.sendall(part)
        said = b""
        while b"\n" not in said:
            try:
                part = line.recv(65536)
            except ConnectionResetError:
                return "closed"
            if not part:
                return said.decode() or "closed"
            said += part
        return said.decode()


def _lives(queue: Box) -> bool:
    """The daemon answers, quickly, whatever has happened."""
    began_s = time.monotonic()
    assert queue.call("status")["pid"] == queue.daemon.pid  # type: ignore[union-attr]
    return time.monotonic() - began_s < 10


# Another's job.


@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("cancel", {"now": True}),
        ("cancel", {}),
        ("hold", {}),
        ("release", {}),
        ("change", {"priority": -5}),
        ("change", {"hard_limit_s": 0.001}),
    ],
)
def test_anothers_job_is_left_alone(queue: Box, ann: str, verb: str, fields: dict[str, Any]) -> None:
    named = {"job": ann} if verb == "change" else {"jobs": [ann]}
    said = as_user(MALLORY, lambda: _ask(queue, verb, **named, **fields))
    assert "only its owner or an admin" in said
    assert queue.state(ann)["state"] == "RUNNING" and _lives(queue)


def test_anothers_job_hidden_among_ones_own_is_left_alone(queue: Box, ann: str) -> None:
    def act() -> Any:
        own = _submit(queue, "true", spec={"not_before_s": 4e9})
        try:
            return _ask(queue, "cancel", jobs=[own, ann])
        finally:
            _ask(queue, "cancel", jobs=[own])

    assert "only its owner" in as_user(MALLORY, act)
    assert queue.state(ann)["state"] == "RUNNING"


def test_anothers_environment_log_and_files_cannot_be_read(queue: Box, ann: str) -> None:
    def act() -> list[str]:
        told = _ask(queue, "job", job=ann)
        assert "secret" not in json.dumps(told), told
        tried = []
        folder = paths.attempt_folder(queue.folder, ann, 1)
        files = [queue.folder / DATABASE, queue.folder / f"{DATABASE}-wal", paths.log_path(queue.folder, ann)]
        for path in (*files, folder / SPEC_FILE, folder / REPORT_FOLDER / "report.json", folder / REQUEST_FILE):
            try:
                path.read_bytes()
                tried.append(str(path))
            except OSError:
                continue
        for path in (queue.folder, queue.folder / paths.LOGS, queue.folder / paths.ATTEMPTS, folder):
            with contextlib.suppress(PermissionError):
                tried.append(str(list(path.iterdir())))
        return tried

    assert as_user(MALLORY, act) == []


def test_a_job_runs_as_its_owner_without_what_the_daemon_has(queue: Box) -> None:
    script = "id -u; id -g; id -G; umask; env; ls /proc/self/fd; cat /proc/$PPID/environ; kill -9 $PPID; echo alive"
    job = as_user(MALLORY, lambda: _submit(queue, "sh", "-c", script))
    done = queue.wait_for(job, "SUCCEEDED", "FAILED")
    output = queue.output(job)
    entry = pwd.getpwuid(MALLORY)
    assert output.split("\n")[:3] == [str(MALLORY), str(entry.pw_gid), str(entry.pw_gid)]
    assert done["state"] == "SUCCEEDED" and "alive" in output and "Permission denied" in output
    for name in os.environ.keys() - {"PATH", "LANG", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "_"}:
        assert f"\n{name}=" not in output, name
    assert paths.log_path(queue.folder, job).stat().st_uid == MALLORY


# Who one is.


def test_a_forged_user_is_not_believed(queue: Box) -> None:
    row = {"command": ["id"], "folder": "/"}
    for fields in (
        {"spec": {"user": "root"}, "program": row},
        {"spec": {}, "program": {**row, "uid": 0}},
        {"spec": {}, "program": row, "user": "root"},
        {"spec": {}, "program": row, "uid": 0},
    ):
        said = as_user(MALLORY, lambda fields=fields: _ask(queue, "submit", **fields))
        assert said.startswith("refused"), said


@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("stop", {}),
        ("set", {"settings": {"policy": "fifo"}}),
        ("limits", {"user": "nobody", "share": 100.0}),
        ("reserve", {"devices": ["cpu:0"], "start_s": 0.0, "end_s": 4e9, "users": ["nobody"]}),
        ("unreserve", {"reservation": "r1"}),
    ],
)
def test_what_is_an_admins_is_refused(queue: Box, verb: str, fields: dict[str, Any]) -> None:
    assert "for this queue's admins" in as_user(MALLORY, lambda: _ask(queue, verb, **fields)) and _lives(queue)


def test_nobody_goes_first_by_his_own_priority(queue: Box) -> None:
    assert "may give up to 0" in as_user(MALLORY, lambda: _submit(queue, "true", spec={"priority": 5}))

    def act() -> Any:
        job = _submit(queue, "true", spec={"not_before_s": 4e9})
        try:
            return _ask(queue, "change", job=job, priority=5)
        finally:
            _ask(queue, "cancel", jobs=[job])

    assert "may give up to 0" in as_user(MALLORY, act)


def test_nobody_plays_a_runner(queue: Box, ann: str) -> None:
    for fence in range(1, 40):
        said = as_user(MALLORY, lambda fence=fence: _ask(queue, "runner", job=ann, attempt=1, fence=fence))
        assert "daemon's own runners" in said
        break
    assert "is over" in str(_refused(queue, "runner", job=ann, attempt=7, fence=1))
    assert queue.state(ann)["state"] == "RUNNING"


def _refused(queue: Box, verb: str, **fields: Any) -> str:
    with pytest.raises(EvenloadError) as error:
        queue.call(verb, **fields)
    return str(error.value)


# Names and paths.


def test_names_lead_nowhere(queue: Box) -> None:
    def act() -> list[str]:
        job = _submit(queue, "true", spec={"name": "../../../etc/passwd"})
        told = [_ask(queue, "job", job=job)["job"]["log"]]
        for name in ("../1", "1/../../x", "", "\0", "1.log"):
            try:
                told.append(str(_ask(queue, "job", job=name)))
            except EvenloadError:
                continue
        return told

    told = as_user(MALLORY, act)
    assert len(told) == 1 and Path(told[0]).parent == queue.folder / paths.LOGS and Path(told[0]).stem.isdigit()


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "a\x00b", "‮gnp", "x" * 10_000, "\ud800"])
def test_names_that_would_play_with_a_terminal_are_refused(queue: Box, name: str) -> None:
    row = {"spec": {"name": name}, "program": {"command": ["true"], "folder": "/"}}
    line = json.dumps({"v": 2, "verb": "submit", **row}).encode() + b"\n"
    assert '"ok":false' in as_user(MALLORY, lambda: _say(queue, line)) and _lives(queue)


def test_a_log_that_was_replaced_by_a_link_is_not_followed(queue: Box) -> None:
    """Only root can do it to a queue of root's; who ran the queue's folder on a bad disk would see this."""
    victim = queue.folder.parent / "victim"
    victim.write_text("precious")
    number = int(as_user(MALLORY, lambda: _submit(queue, "true"))) + 1
    paths.log_path(queue.folder, str(number)).symlink_to(victim)
    job = as_user(MALLORY, lambda: _submit(queue, "echo", "overwritten"))
    assert job == str(number)
    assert "log" in queue.wait_for(job, "FAILED", "SUCCEEDED")["reason"]
    assert victim.read_text() == "precious" and _lives(queue)


def test_a_folder_of_logs_that_is_a_link_is_refused(tmp_path: Path) -> None:
    with box() as made:
        made.settings(_SETTINGS)
        (made.folder / paths.LOGS).symlink_to(tmp_path)
        with pytest.raises(EvenloadError, match="is a link"):
            connect(made.folder)
        assert list(tmp_path.iterdir()) == []


def test_files_that_a_job_leaves_for_the_daemon_lead_nowhere(queue: Box) -> None:
    """A report that is a link, a pipe, or too large; links in the folder that the daemon removes."""
    victim = queue.folder.parent / "kept"
    victim.mkdir(exist_ok=True)
    (victim / "file").write_text("precious")
    script = f"""
        told=$(dirname $(sed 's/.*"report_file": "\\([^"]*\\)".*/\\1/' $EVENLOAD_JOB))
        rm -f $told/report.json; ln -s /etc/shadow $told/report.json; ln -s {victim} $told/link; sleep 1.2
        rm $told/report.json; mkfifo $told/report.json; sleep 1.2
        rm $told/report.json; head -c 5000000 /dev/zero > $told/report.json
        touch $told/../stop && echo wrote; ls $told/..; echo end"""
    job = as_user(MALLORY, lambda: _submit(queue, "sh", "-c", script))
    done = queue.wait_for(job, "SUCCEEDED", "FAILED")
    assert done["state"] == "SUCCEEDED" and "wrote" not in queue.output(job)
    assert (victim / "file").read_text() == "precious"
    until(lambda: not paths.attempt_folder(queue.folder, job, 1).exists(), queue.log)
    assert _lives(queue)


def test_a_program_that_can_not_be_run_is_refused_or_fails_alone(queue: Box) -> None:
    for program in (
        {"command": []},
        {"command": "rm -rf /"},
        {"command": ["a\0b"]},
        {"command": [1, 2]},
        {"command": ["true"], "folder": "relative"},
        {"command": ["true"], "environment": {"A=B": "c"}},
        {"command": ["true"], "environment": ["A"]},
        {"command": ["true"], "grace_s": -1},
        {"command": ["true"], "grace_s": "1e999"},
        {"command": ["true"], "options": {"partition": "all"}},
        {"command": ["true"], "backend": "slurm"},
        {"command": ["true"], "sudo": True},
    ):
        said = as_user(MALLORY, lambda p=program: _ask(queue, "submit", program={"folder": "/", **p}))
        assert str(said).startswith("refused"), (program, said)


def test_root_does_not_enter_folders_for_a_user(queue: Box) -> None:
    """The program enters its folder as its owner, not as the daemon."""
    secret = queue.folder.parent / "roots"
    secret.mkdir(mode=0o700, exist_ok=True)
    job = as_user(MALLORY, lambda: _submit(queue, "ls", folder=str(secret)))
    assert "Permission denied" in queue.wait_for(job, "FAILED", "SUCCEEDED")["reason"]


# The socket.


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"hello\n",
        b"[]\n",
        b"null\n",
        b'{"v": 2}\n',
        b'{"v": 3, "verb": "status"}\n',
        b'{"v": 2, "verb": ["status"]}\n',
        b'{"v": 2, "verb": "_close"}\n',
        b'{"v": 2, "verb": "list", "limit": NaN}\n',
        b'{"v": 2, "verb": "list", "after": 1e999}\n',
        b'{"v": 2, "verb": "list", "limit": ' + b"9" * 5000 + b"}\n",
        b'{"v": 2, "verb": "list", "states": [[]]}\n',
        b'{"v": 2, "verb": "list", "user": {"a": 1}}\n',
        b'{"v": 2, "verb": "wait", "after": "x"}\n',
        b'{"v": 2, "verb": "submit", "jobs": [[]]}\n',
        b'{"v": 2, "verb": "submit", "spec": {"needs": 5}, "program": {"command": ["x"], "folder": "/"}}\n',
        b'{"v": 2, "verb": "submit", "spec": {"after": [1]}, "program": {"command": ["x"], "folder": "/"}}\n',
        b'{"v": 2, "verb": "submit", "spec": {"estimate_s": "x"}, "program": {"command": ["x"], "folder": "/"}}\n',
        b'{"v": 2, "verb": "submit", "spec": {"retries": true}, "program": {"command": ["x"], "folder": "/"}}\n',
        b'{"v": 2, "verb": "cancel", "jobs": [1]}\n',
        b'{"v": 2, "verb": "status", "x": ' + b"[" * 100_000 + b"}\n",
        b"\xff\xfe\x00\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=range(23),
)
def test_messages_that_are_none_are_refused(queue: Box, line: bytes) -> None:
    said = as_user(MALLORY, lambda: _say(queue, line))
    assert '"ok":false' in said and "failed at this" not in said, said
    assert _lives(queue)


def test_a_line_without_an_end_is_cut_off(queue: Box) -> None:
    part = b"x" * 65536
    said = as_user(MALLORY, lambda: _say(queue, *[part] * (2 * messages.LARGEST_REQUEST_BYTES // len(part))))
    assert said == "closed" or '"ok":false' in said
    assert _lives(queue)


def test_half_a_message_is_not_waited_for_for_ever(queue: Box) -> None:
    began_s = time.monotonic()
    assert as_user(MALLORY, lambda: _say(queue, b'{"v": 2, "verb": ')) == "closed"
    assert time.monotonic() - began_s < 60 and _lives(queue)


def test_one_user_can_not_take_all_connections(queue: Box) -> None:
    def act() -> str:
        with contextlib.ExitStack() as stack:
            lines = [stack.enter_context(_raw(queue)) for _ in range(60)]
            told = select.select(lines, [], [], 20)[0]  # nobody asked anything: who is told something is refused
            said = told[0].recv(65536) if told else b""
            return said.decode()

    assert "too many connections" in as_user(MALLORY, act)
    assert _lives(queue)


def test_a_flood_of_one_user_does_not_keep_another_out(queue: Box) -> None:
    """A child asks as fast as it can, reads nothing, and hangs up, again and again."""
    pid = os.fork()
    if pid == 0:
        os.setresuid(MALLORY, MALLORY, MALLORY)
        question = messages.encode({"verb": "status"}) * 2000
        while True:
            with contextlib.suppress(OSError), _raw(queue) as line:
                line.settimeout(0.2)
                line.sendall(question)
    try:
        time.sleep(1.0)
        worst_s = 0.0
        for _ in range(20):
            began_s = time.monotonic()
            as_user(ANN, lambda: _ask(queue, "status"))
            worst_s = max(worst_s, time.monotonic() - began_s)
        assert worst_s < 10
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert _lives(queue)


def test_a_flood_of_jobs_stops_at_the_limit(queue: Box) -> None:
    queue.call("limits", user=pwd.getpwuid(MALLORY).pw_name, max_queued=5)
    row = {"spec": {"not_before_s": 4e9}, "program": {"command": ["true"], "folder": "/"}}
    try:
        said = as_user(MALLORY, lambda: _ask(queue, "submit", jobs=[row] * 6))
        assert "may have 5" in said
        assert "expected 1 to 1000" in as_user(MALLORY, lambda: _ask(queue, "submit", jobs=[row] * 1001))
        assert queue.call("list", user=pwd.getpwuid(MALLORY).pw_name)["jobs"] == []
    finally:
        queue.call("limits", user=pwd.getpwuid(MALLORY).pw_name, max_queued=None)


def test_a_descriptor_passed_along_and_a_hang_up_change_nothing(queue: Box) -> None:
    def act() -> str:
        with _raw(queue) as line:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", line.fileno()))]
            line.sendmsg([messages.encode({"verb": "status"})], rights)
        return "hung up"

    for _ in range(50):
        assert as_user(MALLORY, act) == "hung up"
    assert _lives(queue)
    daemon = queue.daemon
    assert daemon is not None and len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())) < 60


# The folder.


def test_the_queues_files_are_its_owners_alone(queue: Box) -> None:
    modes = {
        name: (queue.folder / name).stat().st_mode & 0o777 for name in (DATABASE, LOCK, paths.LOGS, paths.ATTEMPTS)
    }
    assert modes == {DATABASE: 0o600, LOCK: 0o600, paths.LOGS: 0o711, paths.ATTEMPTS: 0o711}

    def act() -> list[str]:
        done = []
        for path in (queue.folder / "x", queue.folder / paths.LOGS / "1.log2", queue.folder / paths.ATTEMPTS / "x"):
            with contextlib.suppress(OSError):
                path.write_text("x")
                done.append(str(path))
        with contextlib.suppress(OSError):
            (queue.folder / paths.SOCKET).unlink()
            done.append("socket")
        return done

    assert as_user(MALLORY, act) == []


def test_another_users_socket_in_a_folder_receives_nothing() -> None:
    with box() as made:
        made.folder.mkdir()
        os.chown(made.folder, ANN, -1)
        made.folder.chmod(0o777)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setresuid(MALLORY, MALLORY, MALLORY)
            with socket.socket(socket.AF_UNIX) as trap, paths.socket_address(made.folder) as address:
                trap.bind(address)
                trap.listen()
                os.write(writing, b"1")
                time.sleep(60)
            os._exit(0)
        try:
            os.read(reading, 1)
            with pytest.raises(EvenloadError, match="listens there"):
                connect(made.folder)
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(reading)
            os.close(writing)


def test_no_queue_is_begun_in_anothers_folder() -> None:
    with box() as made:
        made.folder.mkdir()
        os.chown(made.folder, MALLORY, -1)
        with pytest.raises(EvenloadError, match="belongs to user 65534"):
            connect(made.folder)
