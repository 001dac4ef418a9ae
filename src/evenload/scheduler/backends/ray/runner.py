"""The actor on one node of a job: starts the program there as a process, passes a stop on, tells how it is.

An actor's process holds threads of Ray's, so it must not fork with code of ours in the child: `attempt` runs as a process
between, and ends the program when this actor is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evenload.errors import QueueError
from evenload.job.protocol import Report, Terms, read_report, write_terms


@dataclass(frozen=True, slots=True)
class Task:
    """What one node of a job is to run."""

    terms: Terms
    command: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    log: str
    """The program's output is appended to it."""
    goes_on: bool
    """It may be started again whatever ended it after a request."""


class Runner:
    """One node's part of an attempt."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def meet(self) -> tuple[str, int]:
        """This node's address, and a port that is free now."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        return str(ray.util.get_node_ip_address()), port

    def start(self, task: Task) -> None:
        """Starts the program."""
        self._task = task
        folder = Path(task.terms.report_file).parent
        folder.mkdir(parents=True, exist_ok=True)
        terms_file = folder / "terms.json"
        write_terms(terms_file, task.terms)
        words = [sys.executable, "-m", "evenload.scheduler.backends.attempt", f"--terms={terms_file}"]
        words += [f"--folder={task.folder}", *(["--goes-on"] if task.goes_on else []), "--", *task.command]
        Path(task.log).parent.mkdir(parents=True, exist_ok=True)
        with Path(task.log).open("ab") as log:
            self._process = subprocess.Popen(
                words,
                env=_own_environment(task.environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def look(self) -> tuple[int | None, Report | None]:
        """The exit code once there is one, and what the program last told."""
        if self._process is None or self._task is None:
            return None, None
        report = None
        with contextlib.suppress(QueueError):
            report = read_report(self._task.terms)
        return self._process.poll(), report

    def stop(self, reason: str) -> None:
        """Asks the program to save and stop; a second time ends it at once."""
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"stop {' '.join(reason.split())}\n".encode())
            self._process.stdin.flush()


def _own_environment(further: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment without what Ray put there for its own processes; CUDA_VISIBLE_DEVICES stays."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, **further}
