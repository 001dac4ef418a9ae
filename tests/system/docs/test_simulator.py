"""Every command of docs/simulator.md, as it stands, on a queue that lies where a user's own does."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from evenload.scheduler.core import events
from evenload.scheduler.core.values import Settings
from evenload.scheduler.simulator.simulate import Conditions, simulate
from evenload.scheduler.simulator.workloads import read_workload
from evenload.scheduler.store.writer import QueueStore
from tests.system.docs.test_commands import ROOT, commands_of
from tests.unit.scheduler.queue import box
from tests.unit.scheduler.test_cli_simulate import JOBS


def test_the_commands_run(tmp_path: Path) -> None:
    table = tmp_path / "first.csv"
    table.write_text(JOBS)
    log: list[events.QueueEvent] = []
    simulate(read_workload(table), Conditions(tuple(box(4)), Settings(policy="fifo")), log)
    with QueueStore(tmp_path / ".local/state/evenload/queue", holder="a test") as store:
        for event in log:
            store.record(event)
        store.commit()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(tmp_path), "XDG_STATE_HOME": ""}
    commands = commands_of(ROOT / "docs" / "simulator.md")
    assert len(commands) >= 7
    for command in commands:
        words = [word.replace("~", str(tmp_path)) for word in shlex.split(command)]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert "mean JCT" in done.stdout or '"mean_jct_s"' in done.stdout, command
    assert (tmp_path / "picture.svg").stat().st_size > 1000
