"""Loggers beside another process, and on a full disk."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evenload.records.recorder import Recorder
from tests.paths import ROOT
from tests.unit.records.make import make_step
from tests.unit.records.test_loggers import read_back


def test_only_one_process_brings_a_runs_steps(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, loggers=("tensorboard",))
    recorder.step(make_step(0))
    done = subprocess.run(
        [sys.executable, "-m", "evenload.cli.main", "show", str(tmp_path), "--to", "tensorboard"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    recorder.close()
    assert done.returncode == 2
    assert "another process sends the steps of this run to it" in done.stderr
    assert read_back(tmp_path)["loss"] == {0: 4.0}


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("unshare"), reason="needs unshare to mount a small disk"
)
def test_a_full_disk_stops_nothing_and_tears_no_event(tmp_path: Path) -> None:
    """The event files lie on a disk of 64 KiB; then there is room."""
    (tmp_path / "run/tensorboard").mkdir(parents=True)
    mount = f"mount -t tmpfs -o size=64k tmpfs {tmp_path}/run/tensorboard"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("this user may not mount in a namespace of their own")
    code = (
        "import os, sys; from pathlib import Path; from tests.unit.records import test_loggers as t\n"
        "run = Path(sys.argv[1])\n"
        "recorder = t.Recorder(run, loggers=('tensorboard',))\n"
        "for index in range(300): recorder.step(t.make_step(index, metrics={'m%d' % i: float(i) for i in range(20)}))\n"
        "t.until(lambda: t.told(run))\n"
        "os.system(f'mount -o remount,size=16m {run}/tensorboard')\n"
        "t.until(lambda: len(t.told(run)) == 2)\n"
        "recorder.close()\n"
        "back = t.read_back(run)\n"
        "print(t.told(run), list(back['loss']) == list(back['m3']) == list(range(300)))\n"
    )
    done = subprocess.run(
        [
            "unshare",
            "-rm",
            "sh",
            "-c",
            f'{mount} && exec "$@"',
            "sh",
            sys.executable,
            "-c",
            code,
            str(tmp_path / "run"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "tensorboard fails: OSError: [Errno 28] No space left on device" in done.stdout
    assert done.stdout.strip().endswith("True")
