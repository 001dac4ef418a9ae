"""One process writes a run folder: a second one would mix its records and replace its checkpoints."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import IO

from evenload.errors import ConfigError

LOCK_FILE = "run.lock"


def lock_folder(folder: Path) -> IO[str]:
    """Acquire the lock of a run folder. It ends with the file or this process; loader workers do not inherit it.

    Raises:
        ConfigError: another process holds it, or the folder is not writable.
    """
    path = folder / LOCK_FILE
    try:
        file = path.open("a+")
    except FileNotFoundError:
        raise ConfigError(f"the run folder {folder} is in use by another process, which begins it anew") from None
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} is not writable ({error}); set project_dir to a writable folder"
        ) from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return file  # this file system has no locks
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ConfigError(
            f"the run folder {folder} is in use by {holder}: set another project_dir for this run, or end that one first "
            "(several devices make one run: evenload run -d 0,1 train.py). If its machine is down and this lock remains, "
            f"delete {path}"
        ) from None
    if not _is_file_of(file, path):  # the folder was moved aside meanwhile (`--fresh`): another one is in its place
        file.close()
        return lock_folder(folder)
    with contextlib.suppress(OSError):  # a full disk: who holds it stays unknown
        file.truncate(0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
    return file


def holder_is_gone(folder: Path) -> bool:
    """Return whether the process that locked a run folder last is known to have ended: one of this machine, without the lock.

    Not for a process that holds the lock itself: to close the file would end it.
    """
    wanted = struct.pack("hhqqi", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            is_here = file.read().endswith(f" on {socket.gethostname()}".encode())
            return is_here and struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, wanted))[0] == fcntl.F_UNLCK
    except OSError:  # there is none, or this file system has no locks
        return False


def _is_file_of(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
