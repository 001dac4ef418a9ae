"""`HostWorkers`: the worker processes of this machine, started and killed for whoever decides on the members."""

from __future__ import annotations

import errno
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from evenload.errors import LaunchError
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.output import WorkerOutputs
from evenload.training.launch.process import WorkerProcess
from evenload.training.launch.replicas import throttle_of
from evenload.training.launch.request import LaunchRequest
from evenload.training.launch.target import resume_command
from evenload.training.launch.throttle import ThrottleController


@contextmanager
def open_files_named() -> Iterator[None]:
    """Raise LaunchError, with what to do, where the body meets the limit of open files."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise LaunchError(
            f"{error}: this process may open {most} files at once; raise the limit, such as by `ulimit -n 4096`, and start the "
            "same command again"
        ) from error


def make_launch_folder() -> Path:
    """Make the folder of a launch; LaunchError where no folder for temporary files can be written."""
    try:
        return Path(tempfile.mkdtemp(prefix="evenload-"))
    except OSError as error:
        raise LaunchError(f"{error}: files of workers go there; set TMPDIR to a folder that can be written") from error


def can_change(request: LaunchRequest, spec: WorkerSpec) -> bool:
    """Return whether ranks of this launch may be lost, join or leave; equal on all machines."""
    return request.mode == "train" and not request.call and not spec.replicas and not spec.has_server


class HostWorkers:
    def __init__(self, request: LaunchRequest, folder: Path, outputs: WorkerOutputs) -> None:
        self.request = request
        self.folder = folder
        self.outputs = outputs
        self.began_s = time.time()
        self.throttle: ThrottleController | None = None
        self._command = resume_command(request.arguments, is_call=bool(request.call))
        self._processes: dict[str, WorkerProcess] = {}
        self.by_worker: Mapping[str, WorkerProcess] = MappingProxyType(self._processes)

    def start(self, spec: WorkerSpec, with_channel: bool) -> WorkerProcess:
        """Start a worker; LaunchError if the system can't now."""
        throttled = not spec.joining or spec.local_rank < len(self.request.throttle)
        if self.throttle is not None and throttled:
            spec = replace(spec, throttle=throttle_of(self.throttle, spec))
        spec = replace(spec, launch_dir=str(self.folder), command=self._command)
        try:
            with open_files_named():
                process = WorkerProcess(spec, self.request.arguments, self.outputs, with_channel)
        except OSError as error:  # a full disk, too many processes
            where = f"files of workers are in {self.folder.parent}: if it is full, set TMPDIR to another folder"
            raise LaunchError(f"{error}; {where}") from error
        self._processes[spec.worker] = process
        if self.throttle is not None and throttled:
            self.throttle.admit(spec.local_rank, process.pid)
        process.go()
        return process

    def print_line(self, text: str) -> None:
        self.outputs.print_line(f"evenload: {text}")

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def forget(self) -> None:
        """Kill all workers, and begin as if there had been none."""
        self.kill()
        self.close()
        self._processes.clear()

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
