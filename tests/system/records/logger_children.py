"""Runs of a recorder in processes of their own: W&B and MLflow start processes and threads that outlive a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
from evenload.errors import ConfigError
from evenload.records import reader
from evenload.records.loggers import logger_thread
from evenload.records.recorder import Recorder
from tests.unit.records.make import make_step

RUN = Path("run")

def record(recorder, steps, **changes):
    for step in steps:
        recorder.log({"acc": step / 100}, step)
        recorder.step(make_step(step, **changes))

def told():
    return [event.message for event in reader.read_events(RUN) if event.kind == "logger"]

def until(condition, timeout_s=30.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)

def delivered(name):
    path = RUN / "loggers" / f"{name}.json"
    return json.loads(path.read_text())["newest"] if path.exists() else -1
"""
REPOSITORY = ROOT


def run_child(folder: Path, body: str, timeout_s: float = 100.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, after the prelude; variables that are empty are unset."""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}", **variables}
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + body],
        cwd=folder,
        env={name: value for name, value in environment.items() if value},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
