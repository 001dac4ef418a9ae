"""The block for a bug report: complete, and without names."""

from __future__ import annotations

import getpass
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from evenload.doctor.finding import Finding
from evenload.doctor.issue import anonymous, as_issue, own_names
from tests.system.doctor.conftest import Machine, environment


def test_names_and_addresses_go_and_everything_else_stays() -> None:
    names = {"/home/ada": "~", "ada": "USER", "box-9": "HOST"}
    text = (
        "box-9 is 192.168.1.17 (eth0), fe80::1ff:fe23:4567:890a, 02:42:ac:11:00:02; box-90, adagrad, /home/ada/runs, user ada, "
        "127.0.0.1, ::1, 0.0.0.0, 0000:01:00.0, 12:30:01, NCCL 2.27.5, cuDNN 9.10.2, 2.13.0+cpu"
    )
    assert anonymous(text, names) == (
        "HOST is ADDRESS (eth0), ADDRESS, ADDRESS; box-90, adagrad, ~/runs, user USER, "
        "127.0.0.1, ::1, 0.0.0.0, 0000:01:00.0, 12:30:01, NCCL 2.27.5, cuDNN 9.10.2, 2.13.0+cpu"
    )


def test_own_names_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.lab.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "grace")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/grace"))
    assert own_names() == {
        "node17.lab.example": "HOST",
        "/home/grace": "~",
        "node17": "HOST",
        "grace": "USER",
    }
    monkeypatch.setattr(getpass, "getuser", lambda: "root")  # a word like others; it tells nobody anything
    assert "root" not in own_names()


def test_the_block_holds_versions_devices_and_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    findings = (Finding("host name", "warn", "node17 is 10.1.2.3", "otherwise", "echo '10.1.2.3 node17'"),)
    devices = Finding("devices", "ok", "CPU       Some CPU, 2 of 2 cores\ncuda:0    RTX 3090")
    block = as_issue(findings, devices)
    assert block.startswith("<details>") and block.endswith("</details>")
    for part in (
        "evenload  0.",
        "Python    3.",
        "system    ",
        "packages  torch 2.",
        "cuda:0    RTX 3090",
        "warn  host name",
    ):
        assert part in block
    assert "node17" not in block and "10.1.2.3" not in block
    assert "node17 is 10.1.2.3" in as_issue(findings, devices, with_names=True)


def test_what_others_run_is_left_out(machine: Machine) -> None:
    machine.gpus({"used": 20 << 30, "pids": [41]})
    machine.write({"proc/41/cmdline": "python\0train.py\0--api-key=secret\0"})
    assert "secret" in machine.look("GPU memory").found
    found = machine.look("GPU memory", private=True)
    assert "secret" not in found.found + found.fix and "process 41" in found.found


def test_the_command_prints_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "evenload.doctor", "--issue", "--only", "host name", "--only", "packages"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (0, 2) and done.stderr == ""
    assert "evenload doctor on this machine" in done.stdout and "CPU       " in done.stdout
    name = socket.gethostname()
    assert name in ("localhost", "root") or name not in done.stdout
