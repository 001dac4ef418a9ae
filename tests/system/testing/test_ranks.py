"""`run_ranks` leaves no process behind, also when its caller is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.system.launch.scripts import assert_gone
from tests.warm import Command

SCRIPT = """
import os, time
from pathlib import Path
from evenload.testing import run_ranks

def sleep():
    Path(f"pid-{os.getpid()}").touch()
    time.sleep(1000)

if __name__ == "__main__":
    run_ranks(sleep, 2, timeout_s=1000)
"""


def test_ranks_end_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SCRIPT)
    process = Command(["sleeps.py"], tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        while len(started := list(tmp_path.glob("pid-*"))) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
    assert_gone([int(path.name[4:]) for path in started])
    process.communicate()
