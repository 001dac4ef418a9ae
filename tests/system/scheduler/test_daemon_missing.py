"""A daemon that dies without anybody to start it again: the runners do, and what is shown meanwhile says its age."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from evenload.cli.queue import _service
from evenload.errors import QueueError
from evenload.job.processes import all_stats, descendants
from evenload.scheduler import paths, presence, user_service
from evenload.scheduler.backends.local import LocalBackend
from evenload.scheduler.client import connect
from evenload.views.queue.text import notes
from evenload.views.queue.view import JobFilter, view_of
from tests.system.scheduler.daemons import Box, box, kill, until


def test_a_daemon_that_died_is_started_by_the_runners(tmp_path: Path) -> None:
    """Also by one whose program ends meanwhile; what waits goes on. A daemon that was stopped stays so."""
    with box() as queue:
        queue.settings("[cpu]\nslots = 1\n")
        queue.start()
        first = queue.submit("sh", "-c", f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done")
        queue.wait_for(first, "RUNNING")
        second = queue.submit("sleep", "1000")
        queue.kill()
        time.sleep(6.0)
        view = view_of(queue.folder, JobFilter())
        assert not view.is_live and view.age_s is not None and view.age_s > 4
        assert any("this is the state of" in note and " ago" in note for note in notes(view))
        (tmp_path / "go").touch()
        queue.daemon = None
        assert queue.wait_for(first, "SUCCEEDED", "FAILED")["attempt"] == 1
        queue.wait_for(second, "RUNNING")
        (runner,) = queue.runners()
        pid = queue.call("status")["pid"]
        assert pid not in descendants([runner], all_stats())
        kill([pid])  # while a program runs
        until(lambda: presence.is_missing(queue.folder), queue.log)
        assert queue.wait_for(second, "RUNNING")["attempt"] == 1
        pid = queue.call("status")["pid"]
        os.kill(pid, signal.SIGTERM)
        until(lambda: not presence.is_running(queue.folder), queue.log)
        assert not presence.is_missing(queue.folder), "runners start one that is missing"


def test_who_waits_for_a_job_goes_on_waiting(tmp_path: Path) -> None:
    """`submit --wait` outlives the daemon, as the job does; and an interactive job's end is awaited where it died before."""
    with box() as queue:
        queue.settings("[cpu]\nslots = 1\n")
        queue.start()
        queue.client().close()
        script = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; exit 3"
        words = ["submit", "--queue", str(queue.folder), "--wait", "--no-snapshot", "--", "sh", "-c", script]
        waiting = subprocess.Popen(
            [sys.executable, "-m", "evenload.cli.main", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        try:
            until(lambda: queue.call("list")["jobs"], queue.log)
            queue.wait_for("1", "RUNNING")
            time.sleep(1.0)  # it waits by now
            queue.kill()
            time.sleep(1.0)
            queue.start()
            queue.client().close()
            (tmp_path / "go").touch()
            _, said = waiting.communicate(timeout=60)
        finally:
            waiting.kill()
            waiting.wait()
        queue.kill()
        starting = threading.Timer(0.3, queue.start)
        starting.start()
        try:
            (status,) = LocalBackend(queue.folder).wait(["1"])
        finally:
            starting.join()
    assert status.reason == "exit code 3"
    assert (waiting.returncode, "job 1 failed: exit code 3" in said) == (3, True), said


def stop(queue: Box) -> None:
    queue.call("stop")
    assert queue.daemon is not None and queue.daemon.wait(60) == 0


def test_who_waits_for_a_job_of_a_stopped_queue_is_notified(tmp_path: Path) -> None:
    """Nobody starts the daemon again, so waiting ends soon, not after a minute; a restart in that time is no stop."""
    with box() as queue:
        queue.start()
        queue.client().close()
        words = ["submit", "--queue", str(queue.folder), "--wait", "--no-snapshot", "--", "sleep", "1000"]
        waiting = subprocess.Popen(
            [sys.executable, "-m", "evenload.cli.main", *words],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert waiting.stdout is not None
            assert any(line.startswith("watch: ") for line in waiting.stdout), "it waits from now on"
            until(lambda: queue.call("list")["jobs"], queue.log)
            queue.wait_for("1", "RUNNING")
            stop(queue)
            queue.start()
            queue.client().close()
            time.sleep(1.0)
            assert waiting.poll() is None, "it was restarted"
            stop(queue)
            began_s = time.monotonic()
            _, said = waiting.communicate(timeout=60)
        finally:
            waiting.kill()
            waiting.wait()
        assert f"stopped waiting for job 1: the queue {queue.folder} was stopped" in said
        assert waiting.returncode == 2 and time.monotonic() - began_s < 30.0
        queue.start()
        queue.call("cancel", jobs=["1"], now=True)
        queue.wait_for("1", "CANCELLED")


def test_a_unit_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs this Python's daemon for this queue; where there is no systemd, cron can do it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    unit = configparser.ConfigParser(interpolation=None)
    unit.read_string(user_service.unit_text(tmp_path / "100% a 'queue'"))
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[0] == sys.executable
    assert words[-2:] == [str(tmp_path / "100%% a 'queue'"), "--foreground"], "systemd makes one % of two"
    assert unit["Unit"]["StartLimitIntervalSec"] == "0", "a full disk would end the attempts to start it"
    assert unit["Service"]["KillMode"] == "process", "jobs would end with the daemon"
    if shutil.which("systemctl") is None:
        with pytest.raises(QueueError, match=r"no systemd; with cron.*@reboot"):
            user_service.install(tmp_path / "queue", lambda: None, lambda: None)
        assert not user_service.is_offered(tmp_path)


def test_a_service_leaves_a_daemon_stopped_that_was_stopped(tmp_path: Path) -> None:
    """`evenload queue stop` makes room for a repair, so units start only a daemon that ended in another way."""
    shipped = (Path(user_service.__file__).parent / "daemon" / "evenload-queue.service").read_text()
    for text in (shipped, user_service.unit_text(tmp_path)):
        unit = configparser.ConfigParser(interpolation=None)
        unit.read_string(text)
        assert unit["Service"]["Restart"] == "on-failure"
    with box() as queue:
        queue.start()
        queue.call("stop")
        assert queue.daemon is not None and queue.daemon.wait(60) == 0
        queue.start()
        queue.client().close()
        queue.kill()
        assert queue.daemon.returncode != 0
        (queue.folder / "queue.sqlite").write_bytes(b"damaged " * 1000)
        queue.start()
        assert queue.daemon.wait(60) != 0


@pytest.mark.parametrize("fails_at", ["daemon-reload", "enable"])
def test_a_queue_goes_on_where_systemd_refuses_its_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    """As for a login without a bus: the daemon runs, and the unit is offered again. An earlier unit stays."""
    _pretend_systemd(tmp_path, monkeypatch, fails_at)
    with box() as queue:
        queue.start()
        before = queue.call("status")["pid"]
        with pytest.raises(QueueError, match=f"{fails_at}.* failed: no bus; nothing was changed; with cron.*@reboot"):
            _service(queue.folder)
        assert (queue.call("status")["pid"] == before) == (fails_at == "daemon-reload")
        assert user_service.is_offered(queue.folder)
        earlier = user_service.unit_text(queue.folder).replace("on-failure", "always")
        user_service.unit_path().write_text(earlier)
        with pytest.raises(QueueError, match="nothing was changed"):
            _service(queue.folder)
        assert user_service.unit_path().read_text() == earlier
        user_service.unit_path().write_text(user_service.unit_text(queue.folder / "other"))
        with pytest.raises(QueueError, match="the unit of another queue"):
            _service(queue.folder)
        queue.call("stop")
        assert queue.daemon is not None and queue.daemon.wait(60) == 0


def test_a_daemon_of_systemd_has_no_rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit works and is starting, but not at boot: no other daemon may take its place meanwhile."""
    _pretend_systemd(tmp_path, monkeypatch, "enable-linger")
    with box() as queue:
        queue.start()
        queue.client().close()
        with pytest.raises(QueueError, match=r"works while you are logged in, but .* failed: no bus; with cron"):
            _service(queue.folder)
        assert not presence.is_running(queue.folder), "systemd's would fail and be started again each second"


def _pretend_systemd(folder: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str) -> None:
    """Have commands that start nothing in place of systemd's; the one with `fails_at` in its command line fails."""
    for name in ("systemctl", "loginctl"):
        path = folder / name
        path.write_text(f'#!/bin/sh\ncase "$*" in *{fails_at}*) echo no bus >&2; exit 1;; esac\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))


def test_a_folder_in_which_no_daemon_can_start_is_named(tmp_path: Path) -> None:
    """Such as one on a disk that is full or read-only."""
    paths.make_private(tmp_path / "queue")
    (tmp_path / "queue" / paths.START_LOCK).mkdir()
    with pytest.raises(QueueError, match="can't start"):
        connect(tmp_path / "queue")
