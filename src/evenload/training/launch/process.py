"""A worker process of the supervisor."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from evenload.job.processes import SessionProcess, stat_of
from evenload.training.launch import stop_status
from evenload.training.launch.environment import WORKER_VARIABLE, WorkerSpec, write_spec
from evenload.training.launch.failure import FailureReport, describe_end, prepare_failure, read_failure
from evenload.training.launch.membership_messages import MessageChannel
from evenload.training.launch.output import WorkerOutputs

_KILL_S = 3.0


def worker_variables(spec: WorkerSpec, path: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker, from that of its launcher and its file."""
    own = {WORKER_VARIABLE: str(path), "PYTHONHASHSEED": variables.get("PYTHONHASHSEED", "0")}  # sets have one order
    if spec.visible_devices:
        own["CUDA_VISIBLE_DEVICES"] = spec.visible_devices
    return {**variables, **own}


class WorkerProcess(SessionProcess):
    """A worker process in a session of its own; it waits for `go` before it does anything."""

    def __init__(
        self, spec: WorkerSpec, arguments: Sequence[str], outputs: WorkerOutputs, with_channel: bool = False
    ) -> None:
        """Start the process; `with_channel`: with a socket for messages about the membership (`channel`)."""
        self._held_since_s = 0.0
        own_ends: list[int] = []
        worker_ends: list[int] = []
        own_socket = None
        try:
            lifeline, self._lifeline = os.pipe()
            worker_ends.append(lifeline)
            own_ends.append(self._lifeline)
            for _ in ("stdout", "stderr"):
                read, write = os.pipe()
                own_ends.append(read)
                worker_ends.append(write)
            channel = -1
            if with_channel:
                own_socket, its_socket = socket.socketpair()
                worker_ends.append(channel := its_socket.detach())
            self.spec = replace(spec, lifeline=lifeline, channel=channel)
            path = Path(spec.launch_dir) / f"{spec.worker}.json"
            write_spec(self.spec, path)
            stop_status.prepare(path.parent, spec.worker)
            prepare_failure(path.parent, spec.worker)
            super().__init__(
                # -P: no file of the user's folder may shadow a module before the script runs.
                [sys.executable, "-u", "-P", "-m", "evenload.training.launch.worker", *arguments],
                env=worker_variables(self.spec, path, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=worker_ends[1],
                stderr=worker_ends[2],
                pass_fds=(lifeline, channel) if with_channel else (lifeline,),
            )
        except BaseException:
            for descriptor in own_ends:
                os.close(descriptor)
            if own_socket is not None:
                own_socket.close()
            raise
        finally:
            for descriptor in worker_ends:
                os.close(descriptor)
        outputs.add(spec.worker, spec.rank, "stdout", own_ends[1])
        outputs.add(spec.worker, spec.rank, "stderr", own_ends[2])
        self.channel = MessageChannel(own_socket, blocking=False) if own_socket is not None else None

    def read_failure(self) -> FailureReport | None:
        """Return the error that the worker has reported, or that it ended with exit code 0 too early; None: none yet."""
        folder, worker = Path(self.spec.launch_dir), self.spec.worker
        report = read_failure(folder, worker)
        if report is None and self.poll() == 0 and stop_status.ended_early(folder, worker):
            return describe_end(self.spec.rank, 0, self.ended_s)
        return report

    def is_stopped(self) -> bool:
        """Return True for a process that SIGSTOP or a debugger holds."""
        stat = stat_of(self.pid)
        return stat is not None and stat.state in "Tt"

    def stopped_s(self) -> float:
        """Return for how long each call has found the process held, this one too."""
        now_s = time.monotonic()
        self._held_since_s = (self._held_since_s or now_s) if self.is_stopped() else 0.0
        return now_s - self._held_since_s if self._held_since_s else 0.0

    def kill(self) -> None:  # the system can't end one that waits for a device or a file server that hangs
        if self.poll() is None:
            self.kill_group()
            with suppress(subprocess.TimeoutExpired):
                self.code = self._process.wait(_KILL_S)

    def go(self) -> None:
        # `poll` finds a worker that has already ended.
        with suppress(BrokenPipeError):
            os.write(self._lifeline, b"g")

    def close(self) -> None:
        """Close the pipe by which the worker monitors this process, and the channel; a second call does nothing."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self.channel is not None:
            self.channel.close()
