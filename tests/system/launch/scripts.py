"""Runs `evenload run` on small scripts, in processes of their own.

Scripts that import torch are forked from a server (tests/warm.py); the small ones, which only use the worker, start interpreters.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.warm import Command

INITIALISED = """
import os, signal, sys, time
from pathlib import Path
from evenload.training.launch import worker
from evenload.training.launch.environment import detect
worker.progress.initialised = True
spec = detect()
def wait_for(*names):
    while not all(Path(name).exists() for name in names):
        time.sleep(0.01)
def ready():
    Path(f"ready.partial{spec.rank}").write_text(str(os.getpid()))
    os.replace(f"ready.partial{spec.rank}", f"ready-{spec.rank}")
"""


class Started:
    """A running `evenload run`."""

    def __init__(self, folder, body, *options, arguments=(), initialised=True):
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text((INITIALISED if initialised else "") + body)
        words = ["-m", "evenload.cli.main", "run", *options, "train.py", *arguments]
        environment = {**os.environ, "TMPDIR": str(folder)}
        if not initialised:
            self.process = Command(words, folder, environment)
            return
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def wait_ready(self, num_ranks=2, timeout_s=40):
        """Waits for `ready()` in all ranks; their pids."""
        deadline = time.monotonic() + timeout_s
        while not all((self.folder / f"ready-{rank}").exists() for rank in range(num_ranks)):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return [int((self.folder / f"ready-{rank}").read_text()) for rank in range(num_ranks)]

    def end(self, timeout_s=40):
        """Waits for the end: exit code, stdout, stderr. Nothing of the launch may be left."""
        stdout, stderr = self.process.communicate(timeout=timeout_s)
        assert not list(self.folder.glob("evenload-*")), "the launch folder is left"
        return self.process.returncode, stdout, stderr


def run(folder, body, *options, arguments=(), initialised=True, timeout_s=40):
    """Runs a script to its end."""
    with Started(folder, body, *options, arguments=arguments, initialised=initialised) as started:
        return started.end(timeout_s)


def assert_gone(pids, timeout_s=5.0):
    pids = list(pids)
    deadline = time.monotonic() + timeout_s
    while living := [pid for pid in pids if _lives(pid)]:
        assert time.monotonic() < deadline, f"{living} live on"
        time.sleep(0.02)


def _lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def cpu_groups():
    """The control groups that launches have made and not taken away."""
    return sorted(str(path) for path in Path("/sys/fs/cgroup").glob("*/evenload-*"))
