"""Paths of a queue: its folder, the files in it, and the socket's address, however long the path is."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from evenload.errors import ConfigError

SYSTEM_FOLDER = Path("/var/lib/evenload/queue")
"""The queue of the whole machine, if root installed one."""

SOCKET = "queue.sock"
DAEMON_LOG = "daemon.log"
START_LOCK = "start.lock"
ALIVE = "daemon.alive"
STOPPED = "daemon.stopped"
WRITER_LOCK = "writer.lock"
SETTINGS_FILE = "queue.toml"
LOGS = "logs"
ATTEMPTS = "attempts"
BACKUPS = "backups"
ATTEMPT_STARTED = "started"
"""File in an attempt's folder, with the time at which its program began."""


def default_folder() -> Path:
    """Return the machine's queue if root runs one, else this user's."""
    with contextlib.suppress(OSError):
        if SYSTEM_FOLDER.stat().st_uid == 0 and stat.S_ISSOCK((SYSTEM_FOLDER / SOCKET).stat().st_mode):
            return SYSTEM_FOLDER
    return user_folder() / "queue"


def option_for(queue: Path) -> str:
    """Return the option that names a queue in a command line to type, after a space; empty for the default one."""
    return "" if queue == default_folder().absolute() else f" --queue {shlex.quote(str(queue))}"


def user_folder() -> Path:
    """Return the folder of this user's state: `$XDG_STATE_HOME/evenload`, by default `~/.local/state/evenload`."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise ConfigError(
            f"the folder of your queue is in your home folder, and this user has none: set HOME ({error})"
        ) from error
    return base / "evenload"


def log_path(folder: Path, job: str) -> Path:
    """Return the path of a job's output, for all attempts. A job's id is a number, so the path can't lead elsewhere."""
    return folder / LOGS / f"{job}.log"


def attempt_folder(folder: Path, job: str, attempt: int) -> Path:
    """Return the folder for files between a runner and the daemon."""
    return folder / ATTEMPTS / f"{job}.{attempt}"


@contextlib.contextmanager
def socket_address(folder: Path, name: str = SOCKET) -> Iterator[str]:
    """Yield a path of a socket, by default the queue's, that fits into the 107 bytes of an address.

    It is valid inside the ``with`` block; a longer path is reached through an open folder.
    """
    path = str(folder / name)
    if len(os.fsencode(path)) <= 107:
        yield path
        return
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Return the peer's process, user and group id of a Unix socket, from the kernel."""
    size = 3 * 4
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, gid = (int.from_bytes(raw[i : i + 4], sys.byteorder, signed=True) for i in range(0, size, 4))
    return pid, uid, gid


def make_private(folder: Path, mode: int = 0o700) -> None:
    """Make a folder that only this user may write; raise a `ConfigError` for a link, a file, or another user's folder."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"the queue's folder {folder} can't be made: {error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{folder} is a link or a file: a queue keeps its files in its own folders; remove it")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{folder} belongs to user {found.st_uid}, this process is user {os.geteuid()}: a queue keeps its files in "
            f"its own folders; choose another with --queue"
        )
    kept = stat.S_IMODE(found.st_mode) & (mode | 0o011)
    if kept != stat.S_IMODE(found.st_mode):  # the daemon's settings decide whether others may pass through
        folder.chmod(kept)
