"""The end of a worker that has left its run: it holds a device, so it ends also where the script's own code hangs idle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from evenload.job.processes import all_stats, stat_of

THREADS_S, IDLE_S = 30.0, 60.0
"""Times without work after which it no longer waits for the script's threads, and after which it ends."""
_EVERY_S, _LONGEST_GAP_S, _LEAST_PART, _LEAST_BYTES = 1.0, 10.0, 0.002, 1 << 16
_left = threading.Event()
_gives_up = threading.Event()
"""Nothing has worked for `THREADS_S`."""


def watch_end(num_bytes: Callable[[], int]) -> None:
    """Note that this process has left, and end it when neither it nor what it has started has worked for `IDLE_S`.

    Work is time on a processor, a wait for a disk, or a transfer; `num_bytes` counts those of its connections.
    """
    _left.set()
    threading.Thread(target=_end_if_idle, args=(num_bytes,), name="evenload-left", daemon=True).start()


def join_threads() -> None:
    """Wait for the script's threads that are no daemons, as the interpreter does at its end."""
    for thread in threading.enumerate():
        if not thread.daemon and thread not in (threading.current_thread(), threading.main_thread()):
            while thread.is_alive() and not _gives_up.is_set():
                thread.join(_EVERY_S if _left.is_set() else None)


def _end_if_idle(num_bytes: Callable[[], int]) -> None:
    since_s = looked_s = time.monotonic()
    before_s, bytes_before = 0.0, num_bytes()
    while looked_s - since_s < IDLE_S:
        time.sleep(_EVERY_S)
        stats = [stat for stat in all_stats().values() if stat.session == os.getpid()]
        used_s = sum(stat.cpu_ticks for stat in stats) / os.sysconf("SC_CLK_TCK") - time.thread_time()
        threads = [stat_of(int(path.name)) for path in Path("/proc/self/task").iterdir()]
        works = any(stat is not None and stat.state == "D" for stat in (*stats, *threads))
        works |= abs(used_s - before_s) > _LEAST_PART * IDLE_S or abs(num_bytes() - bytes_before) >= _LEAST_BYTES
        now_s = time.monotonic()
        if works or now_s - looked_s > _LONGEST_GAP_S:  # or it was stopped
            since_s, before_s, bytes_before = now_s, used_s, num_bytes()
        looked_s = now_s
        if looked_s - since_s >= THREADS_S:
            _gives_up.set()
    with suppress(OSError):  # not by sys.stderr, which may be the script's own
        os.write(2, f"evenload: a rank that has left ends: it has not worked for {IDLE_S:g} s\n".encode())
    os._exit(0)
