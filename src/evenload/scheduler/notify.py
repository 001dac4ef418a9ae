"""Tells people how a job ended: by a command, a webhook, or mail; as the job's owner, and never in the queue's way.

The daemon hands a message over and goes on. Each is sent by a process of its own that runs as the job's owner, so that a
daemon run by root does nothing for a user that the user couldn't do: the command itself, sendmail, or for a webhook
``python -m evenload.scheduler.notify URL``. It has `TIMEOUT_S`; what goes wrong is told to the daemon's log. A message
that is under way when the daemon ends is not sent again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pwd
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import EmailMessage
from typing import Any

from evenload.errors import QueueError
from evenload.scheduler.core.values import Job
from evenload.scheduler.program import Program

TIMEOUT_S = 30.0
WEBHOOK_TIMEOUT_S = 10.0
MAX_WAITING = 10_000
"""More messages than this are not kept; the log says so."""
_NUM_SENDERS = 4
SENDMAIL_PLACES = "/usr/sbin:/usr/lib:/usr/local/sbin"
_IN_FOLDER = 'cd "$1" 2>/dev/null || cd /; shift; exec "$@"'
"""As the owner: root may not be allowed into a home that is mounted from elsewhere."""


class Notifier:
    """Sends messages beside the daemon's work. Its threads are daemons: they never keep a process from ending."""

    def __init__(self, tell: Callable[[str], None], timeout_s: float = TIMEOUT_S) -> None:
        """`tell` gets a line for each message that couldn't be sent; it is called from other threads."""
        self._tell = tell
        self._timeout_s = timeout_s
        self._waiting: queue.Queue[tuple[Program, str, dict[str, Any]]] = queue.Queue(MAX_WAITING)
        self._num_senders = 0

    def send(self, program: Program, job: Job, reason: str = "") -> None:
        """Tells all whom the job names how it ended; returns at once.

        Args:
            program: the job's.
            job: as it ended.
            reason: why, where it is not the job's own `reason`.
        """
        message = message_of(program, job, reason)
        for target in program.notify:
            try:
                self._waiting.put_nowait((program, target, message))
            except queue.Full:
                self._tell(f"job {job.id}: {target} is not told: {MAX_WAITING} messages wait already")
                continue
            if self._num_senders < min(_NUM_SENDERS, self._waiting.qsize()):
                self._num_senders += 1
                threading.Thread(target=self._work, name="notify", daemon=True).start()

    def wait(self) -> None:
        """Until all that was handed over is sent, or has failed."""
        self._waiting.join()

    def _work(self) -> None:
        while True:
            program, target, message = self._waiting.get()
            try:
                problem = _send_as_owner(program, target, message, self._timeout_s)
                if problem:
                    self._tell(f"job {message['job']}: {target} could not be told: {problem}")
            except Exception as error:  # a thread that ends would leave all later messages unsent
                self._tell(f"job {message['job']}: {target} could not be told: {error}")
            finally:
                self._waiting.task_done()


def message_of(program: Program, job: Job, reason: str = "") -> dict[str, Any]:
    """What is told, as plain values: the JSON of a webhook and of a command's standard input."""
    why = reason or job.reason
    called = f"{job.id} ({job.spec.name})" if job.spec.name else job.id
    text = f"job {called} {job.state.lower()} after {job.held_s:.0f} s{f': {why}' if why else ''}"
    return {
        "job": job.id,
        "name": job.spec.name,
        "state": str(job.state),
        "reason": why,
        "user": job.spec.user,
        "command": list(program.command),
        "folder": program.folder,
        "submitted_s": job.submitted_s,
        "ended_s": job.since_s,
        "held_s": job.held_s,
        "attempts": job.attempt,
        "done": job.done,
        "total": job.total,
        "text": text,  # what chat services show: Slack and Mattermost read this,
        "content": text,  # Discord this
    }


@dataclass(frozen=True, slots=True)
class _Errand:
    """A process that sends one message."""

    command: tuple[str, ...]
    said: bytes
    """On its standard input."""
    variables: Mapping[str, str] = field(default_factory=dict)


def _errand(target: str, message: Mapping[str, Any], path: str) -> _Errand:
    teller, _, rest = target.partition(":")
    content = json.dumps(message).encode()
    match teller:
        case "command":
            names = ("name", "state", "reason", "text")
            variables = {f"EVENLOAD_JOB_{name.upper()}": str(message[name]).replace("\0", "") for name in names}
            return _Errand(tuple(shlex.split(rest)), content, {**variables, "EVENLOAD_JOB_ID": str(message["job"])})
        case "webhook":
            return _Errand((sys.executable, "-P", "-m", "evenload.scheduler.notify", rest), content)
        case "mail":
            program = shutil.which("sendmail", path=f"{path}:{SENDMAIL_PLACES}")
            if program is None:
                raise QueueError("this machine has no sendmail")
            return _Errand((program, "-i", "--", rest), _mail(rest, message))
        case _:
            raise QueueError("expected command:COMMAND, webhook:URL or mail:ADDRESS")


def _send_as_owner(program: Program, target: str, message: Mapping[str, Any], timeout_s: float) -> str:
    """Why it couldn't be sent; empty where it was."""
    variables = {"PATH": os.environ.get("PATH", os.defpath), **program.environment, **_own_variables(program.uid)}
    try:
        errand = _errand(target, message, variables["PATH"])
        process = subprocess.Popen(
            ["/bin/sh", "-c", _IN_FOLDER, "sh", program.folder, *errand.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={**variables, **errand.variables},
            start_new_session=True,
            **_owner_of(program.uid),
        )
    except (OSError, ValueError, KeyError, QueueError) as error:
        return str(error)
    try:
        told, _ = process.communicate(errand.said, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout_s:g} s"
    finally:
        _end_session(process)
    if process.returncode == 0:
        return ""
    lines = told.decode(errors="replace").strip().splitlines()
    return f"exit code {process.returncode}{f': {lines[-1][:300]}' if lines else ''}"


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Whatever it started ends with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _owner_of(uid: int) -> dict[str, Any]:
    """What makes a process of root's one of the job's owner; nothing where this is the owner already."""
    if os.geteuid() != 0 or uid == 0:
        return {}
    entry = pwd.getpwuid(uid)
    return {"user": uid, "group": entry.pw_gid, "extra_groups": os.getgrouplist(entry.pw_name, entry.pw_gid)}


def _own_variables(uid: int) -> dict[str, str]:
    """Who it runs as; and where this Evenload is found, where it isn't installed."""
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return variables
    return {**variables, "HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}


def _mail(address: str, message: Mapping[str, Any]) -> bytes:
    mail = EmailMessage()
    mail["To"] = address
    mail["Subject"] = f"evenload: {' '.join(str(message['text']).split())[:150]}"
    lines = [f"{name}: {value}" for name, value in message.items() if name not in ("text", "content")]
    mail.set_content("\n".join((str(message["text"]), "", *lines)))
    return mail.as_bytes()


def _post(url: str, content: bytes) -> str:
    """Why it couldn't be posted; empty where it was."""
    if not url.startswith(("http://", "https://")):
        return "expected an address that begins with http:// or https://"
    headers = {"Content-Type": "application/json", "User-Agent": "evenload"}
    request = urllib.request.Request(url, data=content, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT_S) as answer:
            answer.read(1024)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        return str(error)
    return ""


def main() -> int:
    """Posts its standard input to the address that it is called with; why not is the last line printed."""
    problem = _post(sys.argv[1], sys.stdin.buffer.read())
    if problem:
        print(problem)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
