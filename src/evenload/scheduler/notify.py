"""Tells people how a job ended: by a command, a webhook, or mail; as the job's owner, and never in the queue's way.

The daemon hands a message over and goes on. Each is sent by a process of its own
(``python -m evenload.scheduler.notify``) that runs as the job's owner, so that a daemon run by root does nothing for a
user that the user couldn't do. It has `TIMEOUT_S`; what goes wrong is told to the daemon's log. A message that is under
way when the daemon ends is not sent again.
"""

from __future__ import annotations

import contextlib
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
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from evenload.errors import QueueError
from evenload.scheduler.core.values import Job
from evenload.scheduler.program import Program

TIMEOUT_S = 30.0
WEBHOOK_TIMEOUT_S = 10.0
MAX_WAITING = 10_000
"""More messages than this are not kept; the log says so."""
_NUM_SENDERS = 4
_SENDMAIL_PLACES = "/usr/sbin:/usr/lib:/usr/local/sbin"


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


def _send_as_owner(program: Program, target: str, message: Mapping[str, Any], timeout_s: float) -> str:
    """Why it couldn't be sent; empty where it was."""
    order = {"target": target, "message": message, "folder": program.folder}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "evenload.scheduler.notify"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env={"PATH": os.environ.get("PATH", os.defpath), **program.environment, **_own_variables(program.uid)},
        start_new_session=True,
        **_owner_of(program.uid),
    )
    try:
        told, _ = process.communicate(json.dumps(order).encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        told = f"it took longer than {timeout_s:g} s".encode()
    finally:
        _end_session(process)
    if process.returncode == 0:
        return ""
    lines = told.decode(errors="replace").strip().splitlines()
    return (lines[-1] if lines else f"exit code {process.returncode}")[:300]


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


# In the process of its own.


def deliver(target: str, message: Mapping[str, Any], folder: str) -> None:
    """Sends one message.

    Raises:
        QueueError: it can't be sent.
    """
    teller, _, rest = target.partition(":")
    match teller:
        case "command":
            _run_command(rest, message, folder)
        case "webhook":
            _post(rest, message)
        case "mail":
            _mail(rest, message)
        case _:
            raise QueueError(f"{target}: expected command:COMMAND, webhook:URL or mail:ADDRESS")


def _run_command(text: str, message: Mapping[str, Any], folder: str) -> None:
    variables = {f"EVENLOAD_JOB_{name.upper()}": str(message[name]) for name in ("name", "state", "reason", "text")}
    variables["EVENLOAD_JOB_ID"] = str(message["job"])
    try:
        done = subprocess.run(
            shlex.split(text),
            input=json.dumps(message).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder if Path(folder).is_dir() else "/",
            env={**os.environ, **variables},
            check=False,
        )
    except (OSError, ValueError) as error:
        raise QueueError(f"it can't be started: {error}") from error
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        raise QueueError(f"exit code {done.returncode}{f': {lines[-1]}' if lines else ''}")


def _post(url: str, message: Mapping[str, Any]) -> None:
    if not url.startswith(("http://", "https://")):
        raise QueueError(f"{url} is no address that begins with http:// or https://")
    request = urllib.request.Request(
        url,
        data=json.dumps(message).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "evenload"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT_S) as answer:
            answer.read(1024)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise QueueError(str(error)) from error


def _mail(address: str, message: Mapping[str, Any]) -> None:
    program = shutil.which("sendmail", path=f"{os.environ.get('PATH', os.defpath)}:{_SENDMAIL_PLACES}")
    if program is None:
        raise QueueError("this machine has no sendmail")
    mail = EmailMessage()
    mail["To"] = address
    mail["Subject"] = f"evenload: {' '.join(str(message['text']).split())[:150]}"
    lines = [f"{name}: {value}" for name, value in message.items() if name not in ("text", "content")]
    mail.set_content("\n".join((str(message["text"]), "", *lines)))
    try:
        done = subprocess.run([program, "-i", "--", address], input=mail.as_bytes(), capture_output=True, check=False)
    except OSError as error:
        raise QueueError(f"{program}: {error}") from error
    if done.returncode:
        raise QueueError(f"{program}: exit code {done.returncode}: {done.stderr.decode(errors='replace').strip()}")


def main() -> int:
    """Sends the message on standard input; the reason why not is the last line printed."""
    order = json.load(sys.stdin)
    try:
        deliver(order["target"], order["message"], order["folder"])
    except QueueError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
