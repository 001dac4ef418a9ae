"""The page on ways to start, taken apart: its scripts become files, its commands are run as they stand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from evenload.hardware import free_port
from tests.paths import ROOT
from tests.warm import Command

PAGE = ROOT / "docs" / "ways-to-start.md"
LIMIT_S = 100.0
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SCRIPT = re.compile(r"\A# (\w+\.py)\n")
_OF_LAUNCHERS = ("EVENLOAD_", "SLURM_", "TORCHELASTIC_")
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str


def scripts() -> dict[str, str]:
    """The page's scripts, by the name in their first line."""
    found = {}
    for language, body in _BLOCK.findall(PAGE.read_text()):
        name = _SCRIPT.match(body)
        if language == "python" and name is not None:
            found[name[1]] = body
    return found


def commands() -> list[str]:
    """The page's commands: one block, one way to start."""
    return [body.strip() for language, body in _BLOCK.findall(PAGE.read_text()) if language == "bash"]


def write_scripts(folder: Path) -> None:
    for name, body in scripts().items():
        (folder / name).write_text(body)


def environment(**variables: str) -> dict[str, str]:
    """This one, without what launchers set, and with the commands of this installation first."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or not (name.startswith(_OF_LAUNCHERS) or name in _TORCH)
    }
    return {**kept, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), **variables}


def shell(folder: Path, command: str, **variables: str) -> Ended:
    """Runs a command as a person would type it; the port of the page becomes a free one."""
    return run(folder, ["bash", "-c", command.replace("29500", str(free_port("127.0.0.1")))], **variables)


def run(folder: Path, command: list[str], **variables: str) -> Ended:
    """Runs a program to its end; what it started ends with it, also where it takes too long."""
    process = start(folder, command, **variables)
    return end(process)


def start(folder: Path, command: list[str], **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str] | Command) -> Ended:
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"it did not end in {LIMIT_S:g} s\n{stdout}\n{stderr}") from None
    return Ended(process.returncode, stdout, stderr)
