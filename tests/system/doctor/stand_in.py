"""Checks that misbehave, for the doctor's parent to deal with; they run in its child processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from evenload.doctor.finding import Finding, Options, ok


def well(options: Options) -> Finding:
    print("what a library prints is no finding")
    return ok(f"port {options.port}")


def hang(options: Options) -> Finding:
    """Writes its own id and that of a grandchild, then never answers."""
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    partial = Path(options.root) / "partial"
    partial.write_text(f"{os.getpid()} {grandchild.pid}")
    partial.replace(Path(options.root) / "ids")
    time.sleep(600)
    raise AssertionError


def crash(options: Options) -> Finding:
    os.write(2, b"terribly sorry\n")
    os.abort()


def raises(options: Options) -> Finding:
    raise RuntimeError("no such thing here")


def time_left(options: Options) -> Finding:
    time.sleep(0.2)
    return ok(str(options.limit_s))
