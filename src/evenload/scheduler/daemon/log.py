"""The daemon's own log: lines with the time, in a file of bounded size."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from evenload.errors import ConfigError

_LARGEST_BYTES = 4 * 2**20


class DaemonLog:
    """Writes to standard error, which for a background daemon is a file of bounded size."""

    def __init__(self, path: Path | None = None) -> None:
        """Redirect standard output and error to the file, so that it holds the interpreter's messages too."""
        self._path = path
        if path is not None:
            try:
                self._redirect(path)
            except OSError as error:
                raise ConfigError(f"the daemon's log {path} can't be written: {error}") from error

    def write(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(line)
            sys.stderr.flush()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._rotate(self._path)

    def _rotate(self, path: Path) -> None:
        if os.fstat(2).st_size > _LARGEST_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
            self._redirect(path)

    @staticmethod
    def _redirect(path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
