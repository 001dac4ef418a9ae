"""`NodeRunner`: the actor on one node of a job, which starts the program, forwards stop requests and reports its state.

The actor's process runs threads of Ray, so it must not run Python code in a forked child: `backends.attempt` runs as a
process in between, and ends the program when this actor is gone.
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
from evenload.job.protocol import ProgressReport, RunnerContract, read_report, write_contract


@dataclass(frozen=True, slots=True)
class NodeTask:
    contract: RunnerContract
    command: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    log: str
    """File to which the program's output is appended."""
    goes_on: bool
    """It may be restarted whatever ended it after a stop request."""


class NodeRunner:
    """Runs one node's program of an attempt."""

    def __init__(self) -> None:
        self._task: NodeTask | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def find_address(self) -> tuple[str, int]:
        """Return this node's address and a free port."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        return str(ray.util.get_node_ip_address()), port

    def start(self, task: NodeTask) -> None:
        self._task = task
        folder = Path(task.contract.report_file).parent
        folder.mkdir(parents=True, exist_ok=True)
        contract_file = folder / "terms.json"
        write_contract(contract_file, task.contract)
        words = [sys.executable, "-m", "evenload.scheduler.backends.attempt", f"--terms={contract_file}"]
        words += [f"--folder={task.folder}", *(["--goes-on"] if task.goes_on else []), "--", *task.command]
        Path(task.log).parent.mkdir(parents=True, exist_ok=True)
        with Path(task.log).open("ab") as log:
            self._process = subprocess.Popen(
                words,
                env=_program_environment(task.environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def poll(self) -> tuple[int | None, ProgressReport | None]:
        """Return the exit code, None while the program runs, and its last report."""
        if self._process is None or self._task is None:
            return None, None
        report = None
        with contextlib.suppress(QueueError):
            report = read_report(self._task.contract)
        return self._process.poll(), report

    def stop(self, reason: str) -> None:
        """Ask the program to save and stop; a second call ends it at once."""
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"stop {' '.join(reason.split())}\n".encode())
            self._process.stdin.flush()


def _program_environment(further: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment without Ray's own variables; CUDA_VISIBLE_DEVICES stays."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, **further}
