"""Watches over one program until nothing of it is left: requests to stop, the grace, the whole tree, the size of the log."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from types import FrameType

from evenload.errors import QueueError
from evenload.job.protocol import ask_to_stop
from evenload.scheduler.runner import files, processes
from evenload.scheduler.runner.files import Order, Result
from evenload.scheduler.runner.memory import resident_bytes
from evenload.scheduler.runner.start import Started

_LOOK_EVERY_S = 1.0
_ENDING_EVERY_S = 0.05
_MEASURE_EVERY_S = 1.0
_NEWS = 1.02
"""A peak of memory is told when it is so many times the one told before."""
_STRAGGLERS_S = 3.0
"""What a program leaves behind when it ends by itself gets so long after a SIGTERM."""


class Watching:
    """One program, from its start to the end of its last process."""

    def __init__(self, folder: Path, order: Order, started: Started, log: int, wakeup: int) -> None:
        self._folder, self._order, self._started = folder, order, started
        self._log, self._wakeup = log, wakeup
        self._code: int | None = None
        self._asked = ""
        self._deadline_s: float | None = None
        self._is_rest_told = False
        self._was_killed = False
        self._peak_bytes = self._told_bytes = 0
        self._measure_at_s = 0.0
        self.is_terminated = False
        """This runner itself was sent a SIGTERM: the machine goes down, or somebody wants it."""

    def run(self) -> Result:
        """Returns when no process is left."""
        while self._reap():
            self._look()
            is_ending = self._code is not None or self._was_killed
            self._sleep(_ENDING_EVERY_S if is_ending else _LOOK_EVERY_S)
        processes.remove_cgroup(self._started.cgroup)
        return Result(
            self._order.fence,
            self._code,
            self._asked,
            self._was_killed,
            time_s=time.time(),
            peak_bytes=self._peak_bytes,
        )

    def on_terminate(self, number: int, frame: FrameType | None) -> None:
        """For SIGTERM."""
        self.is_terminated = True

    def _reap(self) -> bool:
        """Takes in processes that ended; False once there is none left, for orphans come here too."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._started.pid:
                self._code = os.waitstatus_to_exitcode(status)
                if self._order.measures:  # one that ended between two looks
                    self._peak_bytes = max(self._peak_bytes, usage.ru_maxrss * 1024)

    def _look(self) -> None:
        now_s = time.monotonic()
        self._follow_requests(now_s)
        if self._code is not None and not self._is_rest_told:
            self._is_rest_told = True
            if self._deadline_s is None:
                self._deadline_s = now_s + _STRAGGLERS_S
            self._signal_rest(signal.SIGTERM)  # to a part of the program, its first: it may still save
        if self._deadline_s is not None and now_s >= self._deadline_s:
            if self._code is None and not self._was_killed:
                self._say(f"it didn't end within {self._order.grace_s:g} s of the request: killed")
            self._kill()
        self._trim_log()
        if self._order.measures and now_s >= self._measure_at_s:
            self._measure_at_s = now_s + _MEASURE_EVERY_S
            self._measure()

    def _measure(self) -> None:
        """Looks how much memory the whole tree holds, and tells the daemon of a new peak."""
        tree = processes.below([os.getpid()], processes.all_stats())
        self._peak_bytes = max(self._peak_bytes, resident_bytes(tree))
        if self._peak_bytes > self._told_bytes * _NEWS:
            self._told_bytes = self._peak_bytes
            with contextlib.suppress(OSError):
                files.write_peak(self._folder, self._order.fence, self._peak_bytes)

    def _follow_requests(self, now_s: float) -> None:
        try:
            ask = files.read_ask(self._folder)
        except QueueError:
            ask = None
        if ask is None and self.is_terminated:
            ask = files.Ask("stop", "the runner was asked to end (SIGTERM); is the machine going down?")
        if ask is None or ask.kind == self._asked or self._asked == "kill":
            return
        if self._code is None:
            self._asked = ask.kind
        if ask.kind == "kill":
            self._deadline_s = now_s
        elif self._code is None:
            self._deadline_s = now_s + self._order.grace_s
            with contextlib.suppress(OSError):
                ask_to_stop(files.terms_of(self._folder, self._order), ask.reason)
            processes.send(self._started.pid, signal.SIGTERM, self._started.start_ticks)

    def _kill(self) -> None:
        self._was_killed = self._was_killed or self._code is None
        processes.kill_cgroup(self._started.cgroup)
        self._signal_rest(signal.SIGKILL)

    def _signal_rest(self, number: int) -> None:
        stats = processes.all_stats()
        rest = processes.below([os.getpid()], stats)
        processes.kill_all(rest, stats, number)

    def _sleep(self, most_s: float) -> None:
        """Until a signal, or for so long."""
        if self._deadline_s is not None:
            most_s = min(most_s, max(_ENDING_EVERY_S, self._deadline_s - time.monotonic()))
        if select.select([self._wakeup], [], [], most_s)[0]:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._wakeup, 4096):
                    pass

    def _trim_log(self) -> None:
        """A log that grew too large loses its older part; the program goes on writing to the same file."""
        try:
            size = os.fstat(self._log).st_size
            if size <= self._order.log_bytes:
                return
            with Path(self._order.log).open("rb") as file:
                file.seek(max(0, size - self._order.log_bytes // 4))
                kept = file.read(self._order.log_bytes // 4)
            os.ftruncate(self._log, 0)
            self._say(f"the log grew over {self._order.log_bytes} bytes; what was before this line is dropped")
            os.write(self._log, kept[kept.find(b"\n") + 1 :])
        except OSError:
            return  # a full disk: the program hears of it itself

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._log, f"evenload: {text}\n".encode())
