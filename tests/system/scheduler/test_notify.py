"""Notifications: real commands, a real web server, a real program in sendmail's place."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job, JobSpec
from evenload.scheduler.notify import Notifier
from evenload.scheduler.program import JobProgram

JOB = Job(
    "7", JobSpec("ann", name="gpt"), 1.0, JobState.FAILED, since_s=5.0, attempt=2, held_s=3.0, reason="exit code 3"
)


def program(folder: Path, *notify: str, path: str = os.defpath) -> JobProgram:
    return JobProgram(("python", "train.py"), str(folder), os.geteuid(), environment={"PATH": path}, notify=notify)


class Server(http.server.HTTPServer):
    """Keeps what is posted."""

    posted: list[dict[str, Any]]
    status = 200


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found = self.server
            assert isinstance(found, Server)
            found.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(found.status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as made:
        made.posted = []
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def send(told: list[str], *jobs: JobProgram, timeout_s: float = 30.0) -> None:
    notifier = Notifier(told.append, timeout_s)
    for each in jobs:
        notifier.send(each, JOB)
    notifier.wait()


def test_a_command_gets_the_job_in_variables_and_on_its_input(tmp_path: Path) -> None:
    script = tmp_path / "tell.sh"
    script.write_text('#!/bin/sh\necho "$EVENLOAD_JOB_ID $EVENLOAD_JOB_STATE $1" > told; cat > input\n')
    script.chmod(0o755)
    told: list[str] = []
    send(told, program(tmp_path, "command:./tell.sh 'two words'"))
    assert not told
    assert (tmp_path / "told").read_text() == "7 FAILED two words\n"
    message = json.loads((tmp_path / "input").read_text())
    assert (message["job"], message["state"], message["reason"]) == ("7", "FAILED", "exit code 3")
    assert message["text"] == "job 7 (gpt) failed after 3 s: exit code 3"


def test_a_webhook_gets_json(tmp_path: Path, server: Server) -> None:
    told: list[str] = []
    url = f"http://127.0.0.1:{server.server_port}/hook"
    send(told, program(tmp_path, f"webhook:{url}"))
    assert not told and server.posted[0]["state"] == "FAILED" and server.posted[0]["text"]
    server.status = 500
    send(told, program(tmp_path, f"webhook:{url}"))
    assert "job 7: notifying webhook:http://127.0.0.1" in told[0] and "HTTP Error 500" in told[0]


def test_mail_goes_through_sendmail(tmp_path: Path) -> None:
    (tmp_path / "sendmail").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/given; cat > {tmp_path}/mail\n')
    (tmp_path / "sendmail").chmod(0o755)
    told: list[str] = []
    send(told, program(tmp_path, "mail:ann@example.org", path=f"{tmp_path}:{os.defpath}"))
    assert not told
    assert (tmp_path / "given").read_text() == "-i -- ann@example.org\n"
    mail = (tmp_path / "mail").read_text()
    assert "Subject: evenload: job 7 (gpt) failed after 3 s: exit code 3\n" in mail and "To: ann@example.org" in mail


def test_failures_are_told_and_hold_nothing_up(tmp_path: Path) -> None:
    told: list[str] = []
    targets = (
        "command:/bin/false",
        f"command:{tmp_path}/missing",
        "webhook:http://127.0.0.1:1/",
        f"command:{sys.executable} -c 'print(\"why not\"); raise SystemExit(4)'",
    )
    send(told, program(tmp_path, *targets))
    assert len(told) == 4
    text = "\n".join(sorted(told))
    for part in ("notifying command:/bin/false failed: exit code 1", "not found", "refused", "exit code 4: why not"):
        assert part in text
    told.clear()
    send(told, program(tmp_path, "command:/bin/sleep 600"), timeout_s=1.0)
    assert "took longer than 1 s" in told[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's daemon has jobs of others")
def test_it_is_sent_as_the_jobs_owner(tmp_path: Path) -> None:
    import pwd
    import tempfile

    nobody = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        secret = tmp_path / "secret"
        secret.write_text("root's")
        secret.chmod(0o600)
        job = JobProgram(
            ("true",),
            name,
            nobody.pw_uid,
            notify=(f"command:sh -c 'id -u > who; cat {secret} >> who 2>/dev/null; echo $USER >> who'",),
        )
        told: list[str] = []
        send(told, job)
        assert (folder / "who").read_text() == f"{nobody.pw_uid}\nnobody\n", told
