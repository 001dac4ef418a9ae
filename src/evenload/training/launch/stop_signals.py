"""SIGINT and SIGTERM of the supervisor: collected, not acted on, so that its loop decides."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def collect_stop_signals(received: list[int], ignore_afterwards: bool) -> Iterator[None]:
    """Append SIGINT and SIGTERM to `received` instead of ending this process; has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)

    def collect(number: int, _: object) -> None:
        # Python calls this once for several signals that came while a thread kept it busy (an import of torch), but
        # writes a byte for each.
        numbers: list[int] = []
        with suppress(BlockingIOError):
            numbers = [byte for byte in os.read(reader, 4096) if byte in _NUMBERS]
        received.extend(numbers or [number])

    before_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, collect) for number in _NUMBERS}
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, signal.SIG_IGN if ignore_afterwards else handler)
        signal.set_wakeup_fd(before_fd)
        os.close(reader)
        os.close(writer)
