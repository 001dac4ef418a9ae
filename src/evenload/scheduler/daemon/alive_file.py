"""A file with the time at which the daemon last worked, by the queue's clock: the age of what the queue's file shows."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from evenload.scheduler import paths

_NUM_BYTES = 32


class AliveFile:
    """Written once a second in place, so that a full disk doesn't matter, and not forced to disk."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(folder / paths.ALIVE, flags, 0o600)
        self.last_s = 0.0
        """When an earlier daemon last worked; 0 if unknown."""
        with contextlib.suppress(ValueError):
            self.last_s = float(os.pread(self._descriptor, _NUM_BYTES, 0))

    def write(self, now_s: float) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, f"{now_s:.3f}".ljust(_NUM_BYTES).encode(), 0)

    def close(self) -> None:
        os.close(self._descriptor)
