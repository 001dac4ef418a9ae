"""The commands of docs/queue.md and docs/job-file.md run as they stand, in this order, on a queue of their own."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.cli.queue_box import Box
from tests.system.docs.test_commands import ROOT, commands_of

QUEUE, JOB_FILE = ROOT / "docs" / "queue.md", ROOT / "docs" / "job-file.md"
MAY_FAIL = ("evenload change sweep", "evenload cancel sweep")
"""The array may have ended by then, which is an error that says so."""


@pytest.mark.timeout(180)
def test_the_pages_commands_run(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", QUEUE.read_text(), flags=re.DOTALL)
    (job_file,) = re.findall(r"```toml\n(.*?)```", JOB_FILE.read_text(), flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "job.toml").write_text(
        job_file.replace('memory = "20G"\n', "").replace('devices = "1:4"', 'devices = "1:2"')
    )
    state = tmp_path / "state"
    (state / "evenload").mkdir(parents=True)
    box = Box(state / "evenload")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_STATE_HOME": str(state),
    }
    try:
        for command in (*commands_of(QUEUE), *commands_of(JOB_FILE)):
            if command.endswith("--web"):
                _serve(command, tmp_path, environment)
                continue
            done = subprocess.run(
                shlex.split(command),
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
            )
            told = done.stdout + done.stderr
            is_late = command.startswith(MAY_FAIL) and "nothing to do: none of the 4 jobs" in told
            assert done.returncode == 0 or is_late, f"{command}\n{told}"
            if command.startswith("evenload logs -f"):
                assert "step 29" in done.stdout
            if command.startswith("evenload show"):
                assert "job 1 (first)" in done.stdout and "30/30 100 %" in done.stdout
    finally:
        box.close()


def _serve(command: str, folder: Path, environment: dict[str, str]) -> None:
    """Start a page's server, and end it by Ctrl-C once it has named its address."""
    server = subprocess.Popen(
        shlex.split(command), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert server.stdout is not None and "http://127.0.0.1:" in server.stdout.readline(), command
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0, command
    finally:
        server.kill()
        server.communicate()


def test_the_unit_is_the_packages() -> None:
    unit = (ROOT / "src" / "evenload" / "scheduler" / "daemon" / "evenload-queue.service").read_text()
    (told,) = re.findall(r"```ini\n(.*?)```", QUEUE.read_text(), flags=re.DOTALL)
    lines = [line for line in unit.splitlines() if line and not line.startswith("#")]
    assert [line for line in told.splitlines() if line] == lines


def test_tables_name_every_option() -> None:
    """Both pages together tell each option of `evenload submit`."""
    from evenload.cli.main import COMMANDS

    command = COMMANDS["submit"].load("submit")
    told = QUEUE.read_text() + JOB_FILE.read_text()
    keys = set(re.findall(r"^\| `([a-z_]+)` \|", JOB_FILE.read_text(), flags=re.MULTILINE))
    options = {opt for param in command.params for opt in param.opts if opt.startswith("--")}
    assert not {
        o for o in options if o not in told and o.removeprefix("--").replace("-", "_") not in keys | {"queue", "json"}
    }
