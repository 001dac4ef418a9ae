"""A run whose processes were killed: its report and its page say so, and how to go on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from evenload.cli.show import show
from evenload.job.processes import identity_of
from evenload.records.folder_lock import LOCK_FILE
from evenload.records.recorder import Recorder
from evenload.training.launch.run_control import LAUNCH_FILE
from evenload.views.run import summary
from evenload.views.run.page import RunPage
from tests.unit.views.make_run import write_run

app = typer.Typer()
app.command()(show)
_HOLD = (
    "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"
)


def test_a_run_whose_processes_were_killed_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, 5, faults=(), closed=False)
    lock = tmp_path / LOCK_FILE
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)

    def shown() -> tuple[bool, bool]:
        text = "its processes are gone (killed, or their machine went down): start the same command again; it resumes at step 4"
        report, is_in_page = CliRunner().invoke(app, [str(tmp_path)]).stdout, text in RunPage(tmp_path).html()
        values = json.loads(CliRunner().invoke(app, [str(tmp_path), "--json"]).stdout)
        assert values["lost_end"] == (text if is_in_page else "")
        return text in report, is_in_page

    lock.write_text("process 1 on another-host")
    assert shown() == (False, False), "its processes can't be seen from here"
    lock.write_text(f"process 1 on {socket.gethostname()}")
    assert shown() == (True, True)
    process = identity_of(os.getpid())
    assert process is not None
    launcher = {"process": [process.pid, process.start_ticks, process.boot_id], "members": ["rank 0: cpu"]}
    (tmp_path / LAUNCH_FILE).write_text(json.dumps(launcher))
    assert shown() == (False, False), "its launcher is there, and may start all ranks again"
    (tmp_path / LAUNCH_FILE).unlink()
    damaged = tmp_path / "checkpoints" / "step-00000005"
    damaged.mkdir()
    (damaged / "info.json").write_text("{")
    assert shown() == (True, True), "a resume takes the newest that is not damaged"
    command = [sys.executable, "-c", _HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        assert shown() == (False, False)
        holder.communicate("\n", timeout=20)
    Recorder(tmp_path).close()
    assert shown() == (False, False)


def test_live_ends_where_the_processes_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, 5, faults=(), closed=False)
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    (tmp_path / LOCK_FILE).write_text(f"process 1 on {socket.gethostname()} since 2026-11-01 00:00:00")
    monkeypatch.setattr(summary, "GONE_S", 2.0)
    began_s = time.monotonic()
    shown = CliRunner().invoke(app, ["--live", str(tmp_path)])
    assert shown.exit_code == 1, shown.stderr
    assert "its processes are gone" in shown.stdout and "it resumes at step 4" in shown.stdout.splitlines()[-1]
    assert time.monotonic() - began_s >= 2, "the same command may just have been started again, and import torch"
