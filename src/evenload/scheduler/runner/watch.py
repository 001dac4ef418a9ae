"""Supervision of one program until nothing of it is left: requests to stop, the grace, the whole tree, the size of the log."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from evenload.errors import QueueError
from evenload.job.processes import all_stats, descendants, send_signal, signal_all
from evenload.job.protocol import request_stop
from evenload.scheduler.runner import files, processes
from evenload.scheduler.runner.daemon_watch import DaemonWatch
from evenload.scheduler.runner.files import AttemptSpec, RunnerRequest, RunnerResult
from evenload.scheduler.runner.memory import resident_bytes
from evenload.scheduler.runner.start import StartedProgram
from evenload.scheduler.runner.terminal import ProgramTerminal

_CHECK_EVERY_S = 1.0
_ENDING_EVERY_S = 0.05
_MIN_PEAK_GROWTH = 1.02
"""A peak of memory is written when it is this many times the one written before."""
_HANG_UP_AFTER_S = 2.0
"""An interactive program that goes on after SIGTERM gets SIGHUP so much later."""
_LEFTOVER_GRACE_S = 3.0
"""Time after SIGTERM for processes that a program leaves behind when it ends by itself."""


class ProgramSupervisor:
    """One program, from its start to the end of its last process."""

    def __init__(
        self,
        folder: Path,
        spec: AttemptSpec,
        program: StartedProgram,
        log: int,
        wakeup: int,
        daemon: DaemonWatch,
        terminal: ProgramTerminal | None = None,
    ) -> None:
        self._folder, self._spec, self._program = folder, spec, program
        self._log, self._wakeup, self._daemon = log, wakeup, daemon
        self._code: int | None = None
        self._ended = files.ended_now()
        self._requested = ""
        self._deadline_s: float | None = None
        self._has_signalled_rest = False
        self._was_killed = False
        self._peak_bytes = self._written_bytes = 0
        self._measure_at_s = 0.0
        self._log_size, self._log_seen_s = 0, time.monotonic()
        self._until_full_s = 2 * _ENDING_EVERY_S
        self._note = files.read_note(folder)
        self._terminal = terminal
        self._hang_up_s: float | None = None
        if terminal is not None:
            terminal.has_started()
        self.is_terminated = False
        """Set on SIGTERM to this runner itself: the machine shuts down, or an admin ends it."""

    def run(self) -> RunnerResult:
        """Return when no process is left."""
        while self._reap():
            self._check()
            is_ending = self._code is not None or self._was_killed
            self._sleep(_ENDING_EVERY_S if is_ending else min(_CHECK_EVERY_S, self._until_full_s / 2))
        if self._terminal is not None:
            self._terminal.close()
        self._trim_log()
        processes.remove_cgroup(self._program.cgroup)
        return RunnerResult(
            self._spec.fence,
            self._code,
            self._requested,
            self._was_killed,
            peak_bytes=self._peak_bytes,
            **self._ended,
        )

    def _reap(self) -> bool:
        """Reap ended processes, orphans too; return False once none is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._program.pid:
                self._code, self._ended = os.waitstatus_to_exitcode(status), files.ended_now()
                if self._spec.measures:  # it may have ended between two measurements
                    self._peak_bytes = max(self._peak_bytes, usage.ru_maxrss * 1024)

    def _check(self) -> None:
        now_s = time.monotonic()
        self._follow_requests(now_s)
        if self._terminal is not None and self._code is None:
            self._follow_terminal(self._terminal, now_s)
        if self._code is not None and not self._has_signalled_rest:
            self._has_signalled_rest = True
            if self._deadline_s is None:
                self._deadline_s = now_s + _LEFTOVER_GRACE_S
            self._signal_tree(signal.SIGTERM)  # for some of the tree the first signal: they may still save
        if self._deadline_s is not None and now_s >= self._deadline_s:
            if self._code is None and not self._was_killed:
                self._write_log(f"it didn't end within {self._spec.grace_s:g} s of the request: killed")
            self._kill()
        if (note := files.read_note(self._folder)) != self._note:
            self._note = note
            self._write_log(note)
        self._trim_log()
        self._daemon.look()
        if self._spec.measures:
            self._measure(now_s)

    def _follow_terminal(self, terminal: ProgramTerminal, now_s: float) -> None:
        """End an interactive program whose terminal was closed; hang up one that a stop request did not end."""
        if terminal.is_hung_up and self._deadline_s is None:
            self._write_log("its terminal was closed")
            self._deadline_s = now_s + self._spec.grace_s
        if self._hang_up_s is not None and now_s >= self._hang_up_s:  # an interactive shell ignores SIGTERM
            self._hang_up_s = None
            send_signal(self._program.pid, signal.SIGHUP, self._program.start_ticks)

    def _measure(self, now_s: float) -> None:
        if now_s < self._measure_at_s:
            return
        self._measure_at_s = now_s + _CHECK_EVERY_S
        tree = descendants([os.getpid()], all_stats())
        self._peak_bytes = max(self._peak_bytes, resident_bytes(tree))
        if self._peak_bytes > self._written_bytes * _MIN_PEAK_GROWTH:
            self._written_bytes = self._peak_bytes
            with contextlib.suppress(OSError):
                files.write_peak(self._folder, self._spec.fence, self._peak_bytes)

    def _follow_requests(self, now_s: float) -> None:
        try:
            request = files.read_request(self._folder)
        except QueueError:
            request = None
        if request is None and self.is_terminated:
            request = RunnerRequest("stop", "the runner received SIGTERM; is the machine shutting down?")
        if request is None or request.kind == self._requested or self._requested == "kill":
            return
        if self._code is None:
            self._requested = request.kind
        if request.kind == "kill":
            self._deadline_s = now_s
        elif self._code is None:
            self._deadline_s = now_s + self._spec.grace_s
            with contextlib.suppress(OSError):
                request_stop(files.terms_of(self._folder, self._spec), request.reason)
            send_signal(self._program.pid, signal.SIGTERM, self._program.start_ticks)
            if self._terminal is not None:
                self._hang_up_s = now_s + min(_HANG_UP_AFTER_S, self._spec.grace_s / 2)

    def _kill(self) -> None:
        self._was_killed = self._was_killed or self._code is None
        processes.kill_cgroup(self._program.cgroup)
        self._signal_tree(signal.SIGKILL)

    def _signal_tree(self, number: int) -> None:
        stats = all_stats()
        signal_all(descendants([os.getpid()], stats), stats, number)

    def _sleep(self, most_s: float) -> None:
        if self._deadline_s is not None:
            most_s = min(most_s, max(_ENDING_EVERY_S, self._deadline_s - time.monotonic()))
        if self._hang_up_s is not None:
            most_s = min(most_s, max(0.0, self._hang_up_s - time.monotonic()))
        terminal = self._terminal
        if terminal.wait(self._wakeup, most_s) if terminal else select.select([self._wakeup], [], [], most_s)[0]:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._wakeup, 4096):
                    pass

    def _trim_log(self) -> None:
        """Drop the older part of a log that grew too large; the program goes on writing to the same file."""
        try:
            size = os.fstat(self._log).st_size
            self._note_growth(size)
            if size <= self._spec.log_bytes:
                return
            with Path(self._spec.log).open("rb") as file:
                file.seek(max(0, size - self._spec.log_bytes // 4))
                kept = file.read(self._spec.log_bytes // 4)
            os.ftruncate(self._log, 0)
            self._write_log(f"the log grew over {self._spec.log_bytes} bytes; everything before this line is dropped")
            os.write(self._log, kept[kept.find(b"\n") + 1 :])
        except OSError:
            return  # a full disk: the program notices it itself

    def _note_growth(self, size: int) -> None:
        """Estimate when the log will be too large, so that a program which writes fast is looked at more often."""
        now_s = time.monotonic()
        per_s = max(0, size - self._log_size) / max(1e-3, now_s - self._log_seen_s)
        self._log_size, self._log_seen_s = size, now_s
        left = max(0, self._spec.log_bytes - size)
        self._until_full_s = max(_ENDING_EVERY_S, left / per_s) if per_s > 0 else 2 * _CHECK_EVERY_S

    def _write_log(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._log, f"evenload: {text}\n".encode())
