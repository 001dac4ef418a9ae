"""One worker process, seen from the supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from evenload.training.launch.environment import WORKER_VARIABLE, WorkerSpec, write_spec
from evenload.training.launch.output import Outputs


class WorkerProcess:
    """One worker process and all that it started; it waits for `go` before it does anything."""

    def __init__(self, spec: WorkerSpec, arguments: Sequence[str], outputs: Outputs) -> None:
        ours: list[int] = []
        theirs: list[int] = []
        try:
            told, self._lifeline = os.pipe()
            theirs.append(told)
            ours.append(self._lifeline)
            for _ in ("stdout", "stderr"):
                read, write = os.pipe()
                ours.append(read)
                theirs.append(write)
            self.spec = replace(spec, lifeline=told)
            path = Path(spec.launch_dir) / f"worker-{spec.rank}.json"
            write_spec(self.spec, path)
            # -P: nothing of the user's folder may stand in for a module of ours before the script runs.
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-m", "evenload.training.launch.worker", *arguments],
                env={**os.environ, WORKER_VARIABLE: str(path)},
                stdin=subprocess.DEVNULL,
                stdout=theirs[1],
                stderr=theirs[2],
                pass_fds=(told,),
                start_new_session=True,
            )
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        outputs.add(spec.rank, "stdout", ours[1])
        outputs.add(spec.rank, "stderr", ours[2])
        self.code: int | None = None
        self.ended_s = 0.0

    @property
    def pid(self) -> int:
        """The process, and the session and group that it leads."""
        return self._process.pid

    def go(self) -> None:
        """Lets the worker begin."""
        # One that has ended already is found by `poll`.
        with suppress(BrokenPipeError):
            os.write(self._lifeline, b"g")

    def poll(self) -> int | None:
        """The exit code (−N: signal N) once the process has ended; then what it left running is killed too."""
        if self.code is not None:
            return self.code
        # Looked at without reaping: until it is reaped, its number can't be another process's.
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            self.ended_s = time.time()
            self._signal_group(signal.SIGKILL)
            self.code = self._process.wait()
        return self.code

    def ask(self, number: int) -> None:
        """Passes a request to stop on to the worker, which saves and ends by itself."""
        if self.poll() is None:
            self._process.send_signal(number)

    def terminate(self) -> None:
        """Asks the worker to end; its own children it ends itself."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the worker and all that it started, at once."""
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)
            self.code = self._process.wait()

    def close(self) -> None:
        """Lets go of the pipe that told the worker that we live."""
        os.close(self._lifeline)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
