"""The programs that the tests of backends run, and the job files for them: the same for each backend."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenload.scheduler.backends.interface import resolved
from evenload.scheduler.job_file import JobFile, job_from, read_table

COUNTING = '''\
"""Counts, saves when asked, and goes on: the result depends on each step having been done once, in order."""
import json, sys, time
from pathlib import Path
from evenload import job

folder, total, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
folder.mkdir(exist_ok=True)
state_file = folder / "state.json"
state = json.loads(state_file.read_text()) if state_file.exists() else {"step": 0, "value": 1}

def save(step):
    state["step"] = step
    temporary = folder / "state.tmp"
    temporary.write_text(json.dumps(state))
    temporary.replace(state_file)

print(f"begins at step {state['step']}", flush=True)
for step in job.steps(total, start=state["step"], save=save):
    state["value"] = (state["value"] * 1103515245 + step) % 2**31
    with (folder / "trace").open("a") as trace:
        trace.write(f"{step}\\n")
    time.sleep(step_s)
(folder / "result").write_text(str(state["value"]))
print("done", flush=True)
'''


def expected_result(total: int) -> str:
    value = 1
    for step in range(total):
        value = (value * 1103515245 + step) % 2**31
    return str(value)


def steps_done(folder: Path) -> list[int]:
    trace = folder / "trace"
    return [int(line) for line in trace.read_text().split()] if trace.exists() else []


def write_counting(folder: Path, total: int, step_s: float, **rest: str) -> Path:
    """The program and a job file for it; the file's path."""
    (folder / "count.py").write_text(COUNTING)
    return write_job(folder, [sys.executable, "count.py", "out", str(total), str(step_s)], **rest)


def write_job(folder: Path, command: list[str], **rest: str) -> Path:
    """A job file; `rest` are further lines, as they are written."""
    path = folder / "job.toml"
    words = ", ".join(json.dumps(word) for word in command)
    lines = [f"command = [{words}]", 'kind = "cpu"', 'folder = "."', *(f"{key} = {text}" for key, text in rest.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def read_job(path: Path, backend: str, **tables: Mapping[str, Any]) -> JobFile:
    """The job file as a backend takes it: what `evenload submit --backend NAME FILE` reads."""
    return resolved(job_from({**read_table(path), **tables, "backend": backend}), str(path.parent), {})


def run_undisturbed(folder: Path, command: list[str]) -> str:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True).stdout
