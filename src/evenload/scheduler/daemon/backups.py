"""Hourly backups of the queue's file, in a thread, so that no request waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from evenload.errors import QueueError
from evenload.scheduler.clock import wall_s
from evenload.scheduler.store.backup import back_up, backups

_EVERY_S = 3600.0
_SOON_S = 300.0
"""Time until the first one, and until one that failed is tried again."""


class HourlyBackups:
    def __init__(self, folder: Path, log: Callable[[str], None]) -> None:
        self._folder, self._log = folder, log
        self._due_s: float | None = None
        self._last = -1
        self._thread: threading.Thread | None = None
        self._has_failed = False
        self.problem = ""
        """Error of the last backup; empty if it succeeded."""

    def run_if_due(self, now_s: float, last: int) -> None:
        """Back the queue up if an hour has passed since the last time, and event number `last` isn't in that backup."""
        if self._due_s is None:
            self._due_s = now_s + self._left_s()
        if self._has_failed:
            self._due_s, self._has_failed = min(self._due_s, now_s + _SOON_S), False
        if now_s < self._due_s or (self._thread is not None and self._thread.is_alive()):
            return
        self._due_s = now_s + _EVERY_S
        if last == self._last:
            return
        self._last = last
        self._thread = threading.Thread(target=self._back_up, name="evenload-backup", daemon=True)
        self._thread.start()

    def _back_up(self) -> None:
        try:
            back_up(self._folder)
            self.problem = ""
        except QueueError as error:
            self.problem = (
                f"{error}; if the file is damaged, evenload queue stop and evenload queue repair make it whole"
            )
            self._last, self._has_failed = -1, True
            self._log(self.problem)

    def _left_s(self) -> float:
        """Return the time until the next is due; an earlier daemon may have made the last, by another clock."""
        newest = next(iter(backups(self._folder)), None)
        return _SOON_S if newest is None else min(_EVERY_S, max(0.0, newest.stat().st_mtime + _EVERY_S - wall_s()))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
