"""Command ``python -m evenload.scheduler.runner FOLDER``: the runner of one attempt, started by the daemon alone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from evenload.errors import EvenloadError, QueueError, StaleError
from evenload.job.processes import become_reaper
from evenload.scheduler import client
from evenload.scheduler.runner import files
from evenload.scheduler.runner.daemon_watch import DaemonWatch
from evenload.scheduler.runner.files import AttemptSpec, RunnerResult
from evenload.scheduler.runner.start import open_log, start
from evenload.scheduler.runner.terminal import ProgramTerminal
from evenload.scheduler.runner.watch import ProgramSupervisor

_WAIT_FOR_DAEMON_S = 120.0
_KILL_WAVE_S = 0.5
"""Whoever kills a program may kill its whole tree, this runner included, in any order. Only a runner that outlives by this long
a program that was killed calls it a failure; else the job is lost, and goes on from its last save."""
_SHELL_SIGNAL = 128
"""A shell whose child was killed by signal n exits with this + n."""
_RETRY_S = 0.5
"""Time between two attempts to write to a full disk."""


def main(arguments: list[str]) -> int:
    """Run the attempt whose spec lies in a folder, if the daemon admits it."""
    folder = Path(arguments[0])
    os.umask(0o022)
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, _wake)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    become_reaper()
    spec = files.read_spec(folder)
    watch = DaemonWatch(Path(spec.queue))
    try:
        if not _is_admitted(spec, watch):
            return 0
        result = _run(folder, spec, wakeup, watch)
    except QueueError as error:
        result = RunnerResult(spec.fence, None, requested="stop", problem=str(error), **files.ended_now())
    if is_killed(result) and not result.requested:
        time.sleep(_KILL_WAVE_S)
    _write_result(folder, result)
    watch.look(is_last=True)
    return 0


def is_killed(result: RunnerResult) -> bool:
    """Return True where a signal ended the program, or a child of the shell that was the program."""
    return result.code is not None and (result.code < 0 or result.code > _SHELL_SIGNAL)


def _write_result(folder: Path, result: RunnerResult) -> None:
    """Write the result however long that takes: a runner that ends without one has its job run again.

    Without the attempt's folder the queue itself was removed, and nobody waits for a result.
    """
    while True:
        try:
            files.write_result(folder, result)
            return
        except OSError as error:
            print(f"the result can't be written: {error}", file=sys.stderr, flush=True)
            try:
                folder.stat()
            except FileNotFoundError:
                return
            except OSError:  # a file system that is away may come back
                pass
            time.sleep(_RETRY_S)


def _wait_for_disk(folder: Path, error: OSError) -> None:
    """Wait a moment for room on the disk; raise a `QueueError` once the daemon asks the attempt to end."""
    request = files.read_request(folder)
    if request is not None:
        raise QueueError(f"the disk is full, so it has not begun ({error})")
    time.sleep(_RETRY_S)


def _is_admitted(spec: AttemptSpec, watch: DaemonWatch) -> bool:
    """Register with the daemon; wait until that is on disk and the devices are free. Raise if the daemon stays down."""
    deadline_s = time.monotonic() + _WAIT_FOR_DAEMON_S
    while True:
        try:
            with client.connect(Path(spec.queue), start=False) as line:
                answer = line.call("runner", job=spec.job, attempt=spec.attempt, fence=spec.fence)
                return bool(answer.get("go"))
        except StaleError:
            return False
        except EvenloadError as error:
            watch.look()
            if time.monotonic() > deadline_s:
                raise QueueError(f"no daemon ran for {_WAIT_FOR_DAEMON_S:g} s: {error}") from error
            time.sleep(0.1)


def _run(folder: Path, spec: AttemptSpec, wakeup: int, watch: DaemonWatch) -> RunnerResult:
    """Run the program to its end. It starts once the disk has room for its result; until then this waits."""
    log, terminal = -1, None
    while True:
        try:
            files.reserve_result(folder)
            log = open_log(spec) if log < 0 else log
            _note(log, spec.note)
            if spec.pty and terminal is None:
                terminal = ProgramTerminal(folder, spec.uid, log)
            started = start(folder, spec, log, terminal)
            break
        except (EvenloadError, OSError) as error:
            if isinstance(error, OSError) and files.is_full_disk(error):
                _wait_for_disk(folder, error)
                continue
            _note(log, str(error))
            return RunnerResult(spec.fence, None, problem=str(error), **files.ended_now())
    supervisor = ProgramSupervisor(folder, spec, started, log, wakeup, watch, terminal)

    def terminate(number: int, frame: FrameType | None) -> None:
        supervisor.is_terminated = True

    signal.signal(signal.SIGTERM, terminate)
    return supervisor.run()


def _note(log: int, text: str) -> None:
    """Write a line to the job's log, if there is one, it has room, and there is something to write."""
    if text and log >= 0:
        with contextlib.suppress(OSError):
            os.write(log, f"evenload: {text}\n".encode())


def _wake(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal's byte in the pipe wakes the loop."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
