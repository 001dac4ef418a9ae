"""Where a queue lies: its folder, the files in it, and the socket's address, however long the path is."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from evenload.errors import ConfigError

SYSTEM_FOLDER = Path("/var/lib/evenload/queue")
"""The queue of the whole machine, where root installed one."""

SOCKET = "queue.sock"
DAEMON_LOG = "daemon.log"
START_LOCK = "start.lock"
SETTINGS_FILE = "queue.toml"
LOGS = "logs"
ATTEMPTS = "attempts"


def default_folder() -> Path:
    """The machine's own queue where root runs one, else this user's."""
    with contextlib.suppress(OSError):
        if SYSTEM_FOLDER.stat().st_uid == 0 and stat.S_ISSOCK((SYSTEM_FOLDER / SOCKET).stat().st_mode):
            return SYSTEM_FOLDER
    return user_folder() / "queue"


def user_folder() -> Path:
    """Return the folder of this user's state: `$XDG_STATE_HOME/evenload`, by default `~/.local/state/evenload`."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return base / "evenload"


def log_path(folder: Path, job: str) -> Path:
    """Where the output of a job goes, all attempts in one file. A job's id is a number, so this can't lead elsewhere."""
    return folder / LOGS / f"{job}.log"


def attempt_folder(folder: Path, job: str, attempt: int) -> Path:
    """Where a runner and the daemon leave files for each other."""
    return folder / ATTEMPTS / f"{job}.{attempt}"


@contextlib.contextmanager
def socket_address(folder: Path) -> Iterator[str]:
    """A path of the queue's socket that fits into an address, which holds 107 bytes.

    A longer one is reached through an open folder; such an address holds while this is entered.

    Raises:
        OSError: the folder can't be opened.
    """
    path = str(folder / SOCKET)
    if len(os.fsencode(path)) <= 107:
        yield path
        return
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """The process id, user id and group id at the other end of a Unix socket, as the kernel knows them."""
    size = 3 * 4
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, gid = (int.from_bytes(raw[i : i + 4], sys.byteorder, signed=True) for i in range(0, size, 4))
    return pid, uid, gid


def make_private(folder: Path, mode: int = 0o700) -> None:
    """Makes a folder that only this user may write, or sees that it is one.

    Raises:
        ConfigError: it is a link, no folder, or somebody else's.
    """
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"the queue's folder {folder} can't be made: {error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{folder} is a link or no folder: a queue keeps its files in folders of its own; remove it")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{folder} belongs to user {found.st_uid}, this process is user {os.geteuid()}: a queue keeps its files in "
            f"folders of its own; choose another with --queue"
        )
    kept = stat.S_IMODE(found.st_mode) & (mode | 0o011)
    if kept != stat.S_IMODE(found.st_mode):  # whether others may pass through it, the daemon decides by its settings
        folder.chmod(kept)
