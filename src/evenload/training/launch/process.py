"""A worker process of the supervisor: start, poll, stop and kill it."""

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
from evenload.training.launch.output import WorkerOutputs


class WorkerProcess:
    """A worker process in a session of its own; it waits for `go` before it does anything."""

    def __init__(self, spec: WorkerSpec, arguments: Sequence[str], outputs: WorkerOutputs) -> None:
        own_ends: list[int] = []
        worker_ends: list[int] = []
        try:
            lifeline, self._lifeline = os.pipe()
            worker_ends.append(lifeline)
            own_ends.append(self._lifeline)
            for _ in ("stdout", "stderr"):
                read, write = os.pipe()
                own_ends.append(read)
                worker_ends.append(write)
            self.spec = replace(spec, lifeline=lifeline)
            path = Path(spec.launch_dir) / f"worker-{spec.rank}.json"
            write_spec(self.spec, path)
            # -P: no file of the user's folder may shadow a module before the script runs.
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-m", "evenload.training.launch.worker", *arguments],
                env={**os.environ, WORKER_VARIABLE: str(path)},
                stdin=subprocess.DEVNULL,
                stdout=worker_ends[1],
                stderr=worker_ends[2],
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        except BaseException:
            for descriptor in own_ends:
                os.close(descriptor)
            raise
        finally:
            for descriptor in worker_ends:
                os.close(descriptor)
        outputs.add(spec.rank, "stdout", own_ends[1])
        outputs.add(spec.rank, "stderr", own_ends[2])
        self.code: int | None = None
        self.ended_s = 0.0

    @property
    def pid(self) -> int:
        """The process id, which is also that of its session and group."""
        return self._process.pid

    def go(self) -> None:
        """Let the worker begin."""
        # `poll` finds a worker that has already ended.
        with suppress(BrokenPipeError):
            os.write(self._lifeline, b"g")

    def poll(self) -> int | None:
        """Return the exit code (−N: signal N) once the process has ended, after killing what it left running."""
        if self.code is not None:
            return self.code
        # Without reaping: until then its id cannot be reused.
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            self.ended_s = time.time()
            self._signal_group(signal.SIGKILL)
            self.code = self._process.wait()
        return self.code

    def request_stop(self, number: int) -> None:
        """Forward a signal to the worker, which saves and ends by itself."""
        if self.poll() is None:
            self._process.send_signal(number)

    def terminate(self) -> None:
        """Send SIGTERM to the worker, which ends its own children."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the worker and everything it started."""
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)
            self.code = self._process.wait()

    def close(self) -> None:
        """Close the pipe by which the worker monitors this process."""
        os.close(self._lifeline)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
