"""Presence of a queue's daemon, without asking it: does it hold the writer's lock, was it stopped, when did it last work."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from evenload.scheduler import paths


def is_running(folder: Path) -> bool:
    """Return True while a process writes the queue; also where that can't be seen."""
    try:
        descriptor = os.open(folder / paths.WRITER_LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_missing(folder: Path) -> bool:
    """Return True where the daemon has died: it doesn't run, and nobody stopped it."""
    return not is_running(folder) and not was_stopped(folder)


def was_stopped(folder: Path) -> bool:
    """Return True where somebody has stopped the daemon, and nobody has started it since."""
    return (folder / paths.STOPPED).exists()


def note_stopped(folder: Path, is_stopped: bool) -> None:
    """Note that the daemon was requested to end, so that nobody but a client starts it again."""
    if is_stopped:
        (folder / paths.STOPPED).touch(mode=0o600)
    else:
        (folder / paths.STOPPED).unlink(missing_ok=True)


def last_alive_s(folder: Path) -> float | None:
    """Return when the daemon last worked, by the queue's clock; None if unknown."""
    try:
        return float((folder / paths.ALIVE).read_bytes())
    except (OSError, ValueError):
        return None
