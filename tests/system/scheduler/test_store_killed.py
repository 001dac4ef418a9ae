"""A store whose process is killed between any two writes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.paths import ROOT


def test_killed_between_any_two_writes_nothing_is_lost_and_nothing_is_half(tmp_path: Path) -> None:
    memory = Path("/dev/shm")  # what a killed process leaves is the same there, and a thousand waits for the disk less
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.system.scheduler.store_crash", folder, "25"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=110,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["random"]["kills"] == 25 and found["random"]["events"] > 100
    assert found["commit"]["statements"] > 10 and found["opening"]["statements"] > 10
