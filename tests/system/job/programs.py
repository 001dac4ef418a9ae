"""Programs that speak to a queue, started as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evenload.job.protocol import VARIABLE, RunnerContract, write_contract

COUNTING = """
import json, os, sys, time
from pathlib import Path
from evenload import job
state = Path("state.json")
done = json.loads(state.read_text()) if state.exists() else 0
def save(step):
    state.write_text(json.dumps(step))
    print("saved", step, flush=True)
for step in job.steps(int(sys.argv[1]), start=done, save=save):
    print("step", step, flush=True)
    time.sleep(float(sys.argv[2]))
print("all done", flush=True)
"""
"""Arguments: steps, seconds a step. Goes on where it stopped."""


class Program:
    """A running program, its lines read as they come."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self._errors = errors
        self.lines: list[str] = []

    def read_until(self, line: str) -> None:
        assert self.process.stdout is not None
        for read in self.process.stdout:
            self.lines.append(read.strip())
            if self.lines[-1] == line:
                return
        raise AssertionError(f"{line!r} was never printed: {self.lines}, {self.errors}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        assert self.process.stdout is not None
        self.lines += [line.strip() for line in self.process.stdout]
        return self.process.wait(timeout=30)

    @property
    def errors(self) -> str:
        return self._errors.read_text()


@contextmanager
def program(folder: Path, code: str, *arguments: Any, terms: RunnerContract | None = None) -> Iterator[Program]:
    """The code as a process in `folder`; killed if it is still there at the end."""
    environment: Mapping[str, str] = os.environ
    if terms is not None:
        write_contract(folder / "job.json", terms)
        environment = {**os.environ, VARIABLE: str(folder / "job.json")}
    script = folder / "program.py"
    script.write_text(code)
    errors = folder / "stderr.txt"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        try:
            yield Program(process, errors)
        finally:
            process.kill()


def terms(folder: Path, **rest: Any) -> RunnerContract:
    facts: dict[str, Any] = {"job": "17", "attempt": 2, "grace_s": 30.0, "report_every_s": 0.0, **rest}
    return RunnerContract(report_file=str(folder / "report.json"), stop_file=str(folder / "stop"), **facts)


def wait_for(what: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + 20
    while not (found := what()):
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.01)
    return found
