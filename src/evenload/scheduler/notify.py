"""Notify users of the end of a job: by a command, a webhook or mail, without delaying the queue.

Each message is sent by its own process, which runs as the job's owner, so that a daemon run by root does nothing for a user
that the user could not do: the command itself, sendmail, or `python -m evenload.scheduler.notify URL` for a webhook. It is
limited to `TIMEOUT_S`; failures go to the daemon's log. A message being sent when the daemon ends is not sent again.
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
from evenload.scheduler.program import JobProgram

TIMEOUT_S = 30.0
WEBHOOK_TIMEOUT_S = 10.0
MAX_PENDING = 10_000
"""Further messages are dropped, with a line in the log."""
_NUM_SENDERS = 4
_SENDMAIL_FOLDERS = "/usr/sbin:/usr/lib:/usr/local/sbin"
_IN_FOLDER = 'cd "$1" 2>/dev/null || cd /; shift; exec "$@"'
"""Run as the owner: root may have no access to a home on another machine."""


class Notifier:
    """Sends messages from daemon threads, which do not keep the process alive."""

    def __init__(self, log: Callable[[str], None], timeout_s: float = TIMEOUT_S) -> None:
        """`log` receives a line for each message that can't be sent; it is called from other threads."""
        self._log = log
        self._timeout_s = timeout_s
        self._pending: queue.Queue[tuple[JobProgram, str, dict[str, Any]]] = queue.Queue(MAX_PENDING)
        self._num_senders = 0

    def send(self, program: JobProgram, job: Job, reason: str = "", *, ahead_s: float = 0.0) -> None:
        """Send the job's notifications and return at once.

        Args:
            program: names the targets.
            job: as it is now.
            reason: given if it differs from the job's own.
            ahead_s: seconds by which the wall clock is ahead of the queue's.
        """
        message = message_of(program, job, reason, ahead_s)
        for target in program.notify:
            try:
                self._pending.put_nowait((program, target, message))
            except queue.Full:
                self._log(f"job {job.id}: {target} not notified: {MAX_PENDING} messages are pending already")
                continue
            if self._num_senders < min(_NUM_SENDERS, self._pending.qsize()):
                self._num_senders += 1
                threading.Thread(target=self._work, name="notify", daemon=True).start()

    def wait(self) -> None:
        """Wait until all messages have been sent or have failed."""
        self._pending.join()

    def _work(self) -> None:
        while True:
            program, target, message = self._pending.get()
            try:
                problem = _send_as_owner(program, target, message, self._timeout_s)
                if problem:
                    self._log(f"job {message['job']}: notifying {target} failed: {problem}")
            except Exception as error:  # a thread that ends would leave all later messages unsent
                self._log(f"job {message['job']}: notifying {target} failed: {error}")
            finally:
                self._pending.task_done()


def message_of(program: JobProgram, job: Job, reason: str = "", ahead_s: float = 0.0) -> dict[str, Any]:
    """Return the message: the JSON that a webhook, or a command on its standard input, receives; its times by the wall clock."""
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
        "submitted_s": job.submitted_s + ahead_s,
        "ended_s": job.since_s + ahead_s,
        "held_s": job.held_s,
        "attempts": job.attempt,
        "done": job.done,
        "total": job.total,
        "text": text,  # displayed by Slack and Mattermost
        "content": text,  # displayed by Discord
    }


@dataclass(frozen=True, slots=True)
class _SendCommand:
    command: tuple[str, ...]
    stdin: bytes
    variables: Mapping[str, str] = field(default_factory=dict)


def _send_command(target: str, message: Mapping[str, Any], path: str) -> _SendCommand:
    kind, _, rest = target.partition(":")
    content = json.dumps(message).encode()
    match kind:
        case "command":
            names = ("name", "state", "reason", "text")
            variables = {f"EVENLOAD_JOB_{name.upper()}": str(message[name]).replace("\0", "") for name in names}
            return _SendCommand(
                tuple(shlex.split(rest)), content, {**variables, "EVENLOAD_JOB_ID": str(message["job"])}
            )
        case "webhook":
            return _SendCommand((sys.executable, "-P", "-m", "evenload.scheduler.notify", rest), content)
        case "mail":
            program = find_sendmail(path)
            if program is None:
                raise QueueError("this machine has no sendmail")
            return _SendCommand((program, "-i", "--", rest), _mail(rest, message))
        case _:
            raise QueueError("expected command:COMMAND, webhook:URL or mail:ADDRESS")


def find_sendmail(path: str) -> str | None:
    """Return the sendmail program from `path` or its usual folders; None if there is none."""
    return shutil.which("sendmail", path=f"{path}:{_SENDMAIL_FOLDERS}")


def _send_as_owner(program: JobProgram, target: str, message: Mapping[str, Any], timeout_s: float) -> str:
    """Send the message; return the problem, empty if there is none."""
    variables = {"PATH": os.environ.get("PATH", os.defpath), **program.environment, **_own_variables(program.uid)}
    try:
        command = _send_command(target, message, variables["PATH"])
        process = subprocess.Popen(
            ["/bin/sh", "-c", _IN_FOLDER, "sh", program.folder, *command.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={**variables, **command.variables},
            start_new_session=True,
            **_owner_of(program.uid),
        )
    except (OSError, ValueError, KeyError, QueueError) as error:
        return str(error)
    try:
        output, _ = process.communicate(command.stdin, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout_s:g} s"
    finally:
        _end_session(process)
    if process.returncode == 0:
        return ""
    lines = output.decode(errors="replace").strip().splitlines()
    return f"exit code {process.returncode}{f': {lines[-1][:300]}' if lines else ''}"


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the process and everything that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _owner_of(uid: int) -> dict[str, Any]:
    """Arguments of `Popen` that switch from root to the job's owner; empty if this process is the owner's."""
    if os.geteuid() != 0 or uid == 0:
        return {}
    entry = pwd.getpwuid(uid)
    return {"user": uid, "group": entry.pw_gid, "extra_groups": os.getgrouplist(entry.pw_name, entry.pw_gid)}


def _own_variables(uid: int) -> dict[str, str]:
    """The owner's variables, and PYTHONPATH if Evenload is found through it."""
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
    """Post the content; return the problem, empty if there is none."""
    if not url.startswith(("http://", "https://")):
        return "expected a URL that begins with http:// or https://"
    headers = {"Content-Type": "application/json", "User-Agent": "evenload"}
    request = urllib.request.Request(url, data=content, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT_S) as answer:
            answer.read(1024)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        return str(error)
    return ""


def main() -> int:
    """Post standard input to the URL in the arguments; print the problem if there is one."""
    problem = _post(sys.argv[1], sys.stdin.buffer.read())
    if problem:
        print(problem)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
