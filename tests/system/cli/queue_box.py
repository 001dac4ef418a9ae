"""A queue of its own for tests of the commands: a real daemon, real jobs, all ended at the end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from evenload.cli.main import main
from evenload.errors import QueueError
from evenload.scheduler.client import connect

PATIENCE_S = 60.0
SLOTS = 2

COUNTING = """
import json, pathlib, sys, time
from evenload import job
state = pathlib.Path(sys.argv[1])
done = json.loads(state.read_text()) if state.exists() else 0
def save(step):
    state.write_text(json.dumps(step))
for step in job.steps(int(sys.argv[2]), start=done, save=save):
    print("step", step, flush=True)
    time.sleep(0.05)
"""
"""Arguments: the file of its state, steps."""


@dataclass(frozen=True)
class CommandResult:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str


class Box:
    """A queue of two slots of CPU cores, and the commands on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.queue = folder / "queue"
        self.queue.mkdir(mode=0o700)
        (self.queue / "queue.toml").write_text(f"[cpu]\nslots = {SLOTS}\n[[device]]\nmatch = 'gpu'\nuse = false\n")

    def run(self, command: str, *arguments: str) -> CommandResult:
        """Runs a command in this process, which costs no start of Python."""
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        code: Any = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main([command, "--queue", str(self.queue), *arguments])
            except SystemExit as ended:
                code = ended.code
        out.flush()
        text = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
        return CommandResult(code if isinstance(code, int) else 0 if code is None else 1, text, err.getvalue())

    def start(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        """Starts a command as a process."""
        words = [sys.executable, "-m", "evenload.cli.main", command, "--queue", str(self.queue), *arguments]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def submit(self, *arguments: str) -> str:
        """Submits; the job's number, or the first one's."""
        result = self.run("submit", "--json", *arguments)
        assert result.code == 0, result
        return str(json.loads(result.out)["jobs"][0])

    def job(self, number: str) -> dict[str, Any]:
        """How a job is."""
        with connect(self.queue, start=False) as line:
            found: dict[str, Any] = line.call("job", job=number)["job"]
            return found

    def can_be_preempted(self, number: str) -> bool:
        """Whether the queue knows by now that the job saves and stops when asked."""
        with connect(self.queue, start=False) as line:
            return bool(line.call("job", job=number)["spec"].get("preemptible", True))

    def wait(self, number: str, *states: str) -> dict[str, Any]:
        """Until the job is in one of these states."""
        found: dict[str, Any] = {}

        def is_there() -> bool:
            found.update(self.job(number))
            return found["state"] in states

        until(is_there, lambda: f"job {number} to become {states}: {found}; {self.log(number)}")
        return found

    def log(self, number: str) -> str:
        """A job's output."""
        path = self.queue / "logs" / f"{number}.log"
        return path.read_text() if path.exists() else ""

    def num_jobs(self) -> int:
        """Jobs there ever were."""
        with connect(self.queue, start=False) as line:
            return int(sum(line.call("status")["counts"].values()))

    def close(self) -> None:
        """Ends all jobs, then the daemon."""
        try:
            line = connect(self.queue, start=False)
        except QueueError:
            return
        with line:
            active = [row["id"] for row in line.call("list")["jobs"]]
            for number in active:
                with contextlib.suppress(QueueError):
                    line.call("cancel", jobs=[number], now=True)
            deadline_s = time.monotonic() + PATIENCE_S
            while line.call("list")["jobs"] and time.monotonic() < deadline_s:
                time.sleep(0.05)
            daemon = psutil.Process(line.call("stop")["pid"])
        daemon.wait(timeout=PATIENCE_S)


def until(is_so: Callable[[], bool], what: Callable[[], str]) -> None:
    """Waits for a condition; fails where it doesn't come."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {PATIENCE_S:g} s for {what()}")
        time.sleep(0.05)


@contextmanager
def box_in(folder: Path) -> Iterator[Box]:
    """A box that is closed, whatever happens."""
    box = Box(folder)
    try:
        yield box
    finally:
        box.close()


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """This process in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
