"""SIGINT and SIGTERM as requests to end, handed to a function instead of ending this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Signals:
    """Hands SIGINT and SIGTERM to a function while it is entered; in a thread other than the first it does nothing.

    Args:
        take: gets the number of each.
        is_last: the process leaves as soon as this is left: one that comes then is too late, and is ignored.
    """

    def __init__(self, take: Callable[[int], None], is_last: bool = False) -> None:
        self._take = take
        self._is_last = is_last
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._is_last else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._take(number)
