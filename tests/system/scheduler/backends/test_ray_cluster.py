"""`evenload queue --ray`: a cluster of two nodes on this host, started by the two commands, runs and lists a job."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evenload.cli.main import main
from evenload.errors import QueueError
from evenload.scheduler.backends.ray.backend import RayBackend

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),
]
LIMIT_S = 120.0


def _processes(mark: str) -> list[psutil.Process]:
    """All processes whose command line or variables name this test's folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            named = any(mark in word for word in process.cmdline()) or process.environ().get("RAY_TMPDIR") == mark
            if named and process.pid != os.getpid():
                found.append(process)
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    made = tempfile.mkdtemp(prefix="el-ray-")
    yield Path(made)
    deadline_s = time.monotonic() + LIMIT_S
    while (left := _processes(made)) and time.monotonic() < deadline_s:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)
    shutil.rmtree(made, ignore_errors=True)


def _evenload(folder: Path, *words: str) -> str:
    variables = {
        **os.environ, "RAY_TMPDIR": str(folder), "HOME": str(folder), "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "evenload.cli.main", *words],
        env=variables, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.slow
def test_two_commands_start_a_queue(folder: Path) -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    printed = _evenload(folder, "queue", "--ray", "--port", str(port))
    line = re.search(r"evenload (queue --ray (\S+:\d+))", printed)
    assert line is not None and line[2].endswith(f":{port}"), printed
    assert "this machine's devices are in the queue" in _evenload(folder, *line[1].split())
    (folder / "job.toml").write_text(
        f'command = ["sh", "-c", "echo up; exit 0"]\nname = "first"\n[ray]\naddress = "{line[2]}"\n'
    )
    os.environ.pop("RAY_ADDRESS", None)
    done = _evenload(folder, "submit", "--backend", "ray", "--no-snapshot", "--wait", "job.toml")
    assert "job 1 (first) submitted to ray" in done
    shown = _evenload(folder, "ps", "--backend", "ray")
    assert "queue on Ray" in shown and " free" in shown and "first" in shown and "succeeded" in shown
    assert _evenload(folder, "logs", "--backend", "ray", "first") == "up\n"
    script = "for i in 1 2 3 4; do echo line $i; sleep 0.5; done; exit 7"
    (folder / "job.toml").write_text(f'command = ["sh", "-c", "{script}"]\nname = "lines"\n')
    _evenload(folder, "submit", "--backend", "ray", "--no-snapshot", "job.toml")
    output = "line 1\nline 2\nline 3\nline 4\nevenload: exit code 7\n"
    assert _evenload(folder, "logs", "--backend", "ray", "-f", "lines") == output
    assert _evenload(folder, "logs", "--backend", "ray", "-n", "2", "2") == "line 4\nevenload: exit code 7\n"
    table = json.loads(_evenload(folder, "ps", "--backend", "ray", "--all", "--json"))
    assert {job["name"]: job["state"] for job in table["jobs"]} == {"first": "SUCCEEDED", "lines": "FAILED"}
    assert [device["job"] for device in table["devices"]] == [""] * len(table["devices"]) and table["devices"]
    summary = _evenload(folder, "show", "--backend", "ray", "lines")
    assert "failed" in summary and "exit code 7" in summary and "attempt" in summary
    assert "evenload logs --backend ray 2" in summary
    big = f'command = ["sleep", "1000"]\ndevices = {len(table["devices"])}\n'
    (folder / "job.toml").write_text(big)
    for _ in range(2):
        _evenload(folder, "submit", "--backend", "ray", "--no-snapshot", "job.toml")
    assert "held" in _evenload(folder, "change", "--backend", "ray", "--hold", "4")
    assert "ending now" in _evenload(folder, "cancel", "--backend", "ray", "--now", "3")
    _evenload(folder, "cancel", "--backend", "ray", "4")
    rows = json.loads(_evenload(folder, "ps", "--backend", "ray", "--all", "--json"))["jobs"]
    assert rows[-1]["state"] == "CANCELLED"


def test_a_cluster_that_is_not_there_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray sets it, and leaves it set
    importlib.import_module("ray")  # that alone takes seconds
    began_s = time.monotonic()
    with pytest.raises(QueueError, match=f"no Ray cluster at {address}: .*refused.*RAY_ADDRESS"):
        RayBackend().describe(["1"])
    assert time.monotonic() - began_s < 15.0


@pytest.mark.parametrize("words", [("--ray", "here"), ("--ray", "--web"), ("--ray", "a:1", "b:2")])
def test_what_is_no_address_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["queue", *words])
    assert ended.value.code == 2 and "--ray" in capsys.readouterr().err
