"""The end of a worker that has left its run: it holds a device, so it ends also where the script's own code hangs."""

from __future__ import annotations

import os
import sys
import threading
import time

from evenload.job.processes import all_stats

THREADS_S, IDLE_S = 30.0, 60.0
"""Limits of a wait for the script's threads, which it ends after its loop, and of a time in which nothing uses a processor."""
_EVERY_S, _LONGEST_GAP_S, _LEAST_PART = 1.0, 10.0, 0.002
_left = threading.Event()


def watch_end() -> None:
    """Note that this process has left, and end it when neither it nor what it has started has worked for `IDLE_S`."""
    _left.set()
    threading.Thread(target=_end_if_idle, name="evenload-left", daemon=True).start()


def join_threads() -> None:
    """Wait for the script's threads that are no daemons, as the interpreter does at its end."""
    limit_s = time.monotonic() + THREADS_S
    for thread in threading.enumerate():
        if not thread.daemon and thread not in (threading.current_thread(), threading.main_thread()):
            thread.join(max(0.0, limit_s - time.monotonic()) if _left.is_set() else None)


def _end_if_idle() -> None:
    since_s = looked_s = time.monotonic()
    before_s = 0.0
    while looked_s - since_s < IDLE_S:
        time.sleep(_EVERY_S)
        ticks = sum(stat.cpu_ticks for stat in all_stats().values() if stat.session == os.getpid())
        used_s, now_s = ticks / os.sysconf("SC_CLK_TCK") - time.thread_time(), time.monotonic()
        if abs(used_s - before_s) > _LEAST_PART * IDLE_S or now_s - looked_s > _LONGEST_GAP_S:  # or it was stopped
            since_s, before_s = now_s, used_s
        looked_s = now_s
    print(
        f"evenload: a rank that has left ends: it has used no processor for {IDLE_S:g} s", file=sys.stderr, flush=True
    )
    os._exit(0)
