"""Client of a queue's daemon: connects, starts the daemon where none runs, sends requests and receives replies."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from evenload.errors import QueueError
from evenload.job.protocol import VARIABLE
from evenload.scheduler import messages, paths, presence

_START_S = 60.0
_RETRY_S = 0.5
_RESTART_S = 10.0
"""A queue that was stopped counts as one that is restarted (by systemd, or with newer code) for so long."""
_DAEMON = "evenload.scheduler.daemon"
_T = TypeVar("_T")


class Client:
    """A connection to a queue's daemon; used from one thread."""

    def __init__(self, folder: Path, connection: socket.socket, timeout_s: float) -> None:
        self.folder = folder
        self._connection = connection
        self._timeout_s = timeout_s
        self._rest = b""

    def call(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Send a request and return its result, or raise its error; `scheduler.messages` lists the verbs."""
        line = messages.encode({"verb": verb, **fields})
        if len(line) > messages.LARGEST_REQUEST_BYTES:
            raise QueueError(
                f"a message of {len(line)} bytes: the queue takes at most {messages.LARGEST_REQUEST_BYTES}; submit fewer "
                f"jobs together, or with fewer variables"
            )
        wait_s = fields.get("timeout_s")
        own_s = float(wait_s) if isinstance(wait_s, int | float) else 0.0
        self._connection.settimeout(self._timeout_s + own_s)
        try:
            self._connection.sendall(line)
            reply = messages.decode(self._read_line())
        except TimeoutError:
            self.close()
            raise QueueError(
                f"the daemon of the queue {self.folder} didn't reply within {self._timeout_s + own_s:g} s: "
                f"{verb} may or may not have taken effect"
            ) from None
        except OSError as error:
            self.close()
            raise QueueError(
                f"the daemon of the queue {self.folder} ended before it replied ({error}): "
                f"{verb} may or may not have taken effect"
            ) from error
        if not reply.get("ok"):
            raise messages.error_from(reply.get("error"))
        result = reply.get("result")
        return result if isinstance(result, dict) else {}

    def _read_line(self) -> bytes:
        parts, size = [self._rest], len(self._rest)
        while b"\n" not in parts[-1]:
            part = self._connection.recv(1 << 16)
            if not part:
                raise ConnectionResetError("the daemon closed the connection")
            parts.append(part)
            size += len(part)
            if size > messages.LARGEST_REPLY_BYTES:
                raise ConnectionResetError(f"a reply of more than {messages.LARGEST_REPLY_BYTES} bytes")
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    @property
    def is_closed(self) -> bool:
        """True once the daemon has ended, or didn't reply; an error that it replied leaves the connection open."""
        return self._connection.fileno() < 0

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(folder: Path | None = None, *, start: bool = True, timeout_s: float = 30.0) -> Client:
    """Connect to the queue in `folder`, by default `paths.default_folder`; `timeout_s` is for each reply.

    Raises:
        QueueError: no daemon runs (and `start` is False), or it doesn't start; the message has the last lines of its log.
    """
    where = (paths.default_folder() if folder is None else folder).absolute()
    connection = _try(where, timeout_s)
    if connection is None and start:
        _start(where)
        connection = _try(where, timeout_s)
    if connection is None:
        raise QueueError(f"no daemon runs for the queue {where}; evenload queue start starts it{_last_lines(where)}")
    return Client(where, connection, timeout_s)


def with_daemon(folder: Path, work: Callable[[Client], _T]) -> _T:
    """Return what `work` returns for a connection; where the daemon dies, begin it again once that was started again."""
    while True:
        with _connect_again(folder) as client:
            try:
                return work(client)
            except QueueError:
                if not client.is_closed:
                    raise


def _connect_again(folder: Path) -> Client:
    """Connect to a daemon that has run: where it died, wait while it is started again, by a runner or a service.

    Nobody starts one again that somebody has stopped, so that is an error soon.
    """
    began_s = time.monotonic()
    while True:
        try:
            return connect(folder, start=False)
        except QueueError as error:
            waited_s = time.monotonic() - began_s
            if waited_s > _RESTART_S and presence.was_stopped(folder):
                raise QueueError(
                    f"the queue {folder} was stopped: running jobs go on, others don't start until "
                    f"evenload queue start, or the next evenload submit"
                ) from error
            if waited_s > _START_S:
                raise
        time.sleep(_RETRY_S)


def _try(folder: Path, timeout_s: float) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with paths.socket_address(folder) as address:
            connection.connect(address)
        _, uid, _ = paths.peer_of(connection)
        owner = folder.stat().st_uid
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError, ConnectionResetError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise QueueError(f"the queue {folder} can't be reached: {error}") from error
    if uid not in (owner, 0):
        connection.close()
        raise QueueError(f"the queue {folder} belongs to user {owner}, but user {uid} listens there: nothing was sent")
    return connection


def _start(folder: Path) -> None:
    """Start the daemon; of several clients that try at once, one starts it and the others wait."""
    if folder == paths.SYSTEM_FOLDER and os.geteuid() != 0:
        raise QueueError(f"the machine's queue {folder} isn't running; root starts it: systemctl start evenload-queue")
    if VARIABLE in os.environ:
        raise QueueError(
            f"no daemon runs for the queue {folder}, and a job can't start it, because the daemon would end with "
            f"the job; start it from outside"
        )
    paths.make_private(folder)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        opened = os.open(folder / paths.START_LOCK, flags, 0o600)
    except OSError as error:
        raise QueueError(f"the daemon of the queue {folder} can't start: {error}") from error
    with os.fdopen(opened, "r+") as lock:
        _lock(lock.fileno(), folder)
        connection = _try(folder, _START_S)
        if connection is not None:
            connection.close()
            return
        command = [sys.executable, "-P", "-m", _DAEMON, "--queue", str(folder)]
        try:
            done = subprocess.run(
                command,
                cwd="/",
                env=daemon_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_START_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise QueueError(
                f"the daemon of the queue {folder} didn't start within {_START_S:g} s{_last_lines(folder)}"
            ) from None
        if done.returncode:
            text = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
            raise QueueError(f"the daemon of the queue {folder} didn't start: {text}")


def daemon_environment() -> dict[str, str]:
    """Return the environment of a daemon, which runs in another folder: relative paths are made absolute."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if paths := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(
            str(Path(path).absolute()) for path in paths.split(os.pathsep) if path
        )
    return environment


def _lock(descriptor: int, folder: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise QueueError(
                    f"another process has been starting the daemon of {folder} for {_START_S:g} s"
                ) from None
            time.sleep(0.05)


def _last_lines(folder: Path, num: int = 5) -> str:
    try:
        with (folder / paths.DAEMON_LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").splitlines()[-num:]
    except OSError:
        return ""
    return (
        "".join(f"\n  {line}" for line in (f"its log {folder / paths.DAEMON_LOG} ends with:", *lines)) if lines else ""
    )
