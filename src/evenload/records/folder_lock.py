"""Allow one process at a time to write a run folder: two would mix their records and replace each other's checkpoints."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import IO

from evenload.errors import ConfigError

LOCK_FILE = "run.lock"


def lock_folder(folder: Path, *, waits: bool = False) -> IO[str]:
    """Lock a run folder, and return the open lock file. The lock is released when that is closed or this process ends.

    Loader workers do not inherit it. With `waits` (a rank that writes from now on) it returns at once, and a thread takes the
    lock when the process that holds it has ended. On a file system without locks nothing is locked.

    Raises:
        ConfigError: another process holds it, or the folder is not writable.
    """
    path = folder / LOCK_FILE
    try:
        file = path.open("a+")
    except FileNotFoundError:
        raise ConfigError(
            f"the run folder {folder} vanished: another process may have begun it anew (--fresh)"
        ) from None
    except OSError as error:
        check_free(folder)
        raise ConfigError(
            f"the run folder {folder} is not writable ({error}); set project_dir to a writable folder"
        ) from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return file  # this file system has no locks
        if waits:
            threading.Thread(target=_wait_for, args=(file,), name="evenload-lock", daemon=True).start()
            return file
        file.close()
        check_free(folder)
        return lock_folder(folder)  # it has ended meanwhile
    if not _is_file_of(file, path):  # the folder was moved aside meanwhile (`--fresh`): another one is in its place
        file.close()
        return lock_folder(folder)
    _sign(file)
    return file


def check_free(folder: Path) -> None:
    """Raise ConfigError if another process is known to hold the lock. Not for its holder: reading would release it."""
    with contextlib.suppress(OSError):  # there is none, or this file system has no locks
        holder, is_held = _read_lock(folder)
        if is_held:
            raise ConfigError(
                f"the run folder {folder} is in use by {holder or 'another process'}: set another project_dir for this run, or "
                "end that one first (several devices make one run: evenload run -d 0,1 train.py). If its machine is down and "
                f"this lock remains, delete {folder / LOCK_FILE}"
            )


def holder_is_gone(folder: Path) -> bool:
    """Return whether the process that locked a run folder last is known to have ended: one of this machine, without the lock.

    Not for a process that holds the lock itself: to close the file would end it.
    """
    try:
        holder, is_held = _read_lock(folder)
    except OSError:  # there is none, or this file system has no locks
        return False
    return not is_held and f" on {socket.gethostname()} since " in f"{holder} since "  # earlier versions wrote no time


def _read_lock(folder: Path) -> tuple[str, bool]:
    wanted = struct.pack("hhqqi", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    with (folder / LOCK_FILE).open("rb") as file:
        is_held = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, wanted))[0] != fcntl.F_UNLCK
        return file.read().decode(errors="replace").strip(), is_held


def _wait_for(file: IO[str]) -> None:
    with contextlib.suppress(OSError, ValueError):  # the run has ended meanwhile
        fcntl.lockf(file, fcntl.LOCK_EX)
        _sign(file)


def _sign(file: IO[str]) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):  # a full disk: who holds it stays unknown
        file.truncate(0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()} since {since}".encode())


def _is_file_of(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
