from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from evenload.doctor.checklist import FULL, GROUPS
from evenload.doctor.finding import Finding, Options, read_finding
from tests.paths import ROOT
from tests.system.doctor.nvml import StandInNvml

REPOSITORY = ROOT
SOURCE = REPOSITORY / "src"
FUNCTIONS = {check.name: check.function for groups in (GROUPS, FULL) for group in groups for check in group}


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter in which nothing is installed: no torch, rich, typer, psutil or nvidia-ml-py."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def environment(**extra: str) -> dict[str, str]:
    """This process's environment with the source of evenload in sight."""
    return {**os.environ, "PYTHONPATH": str(SOURCE), **extra}


class Machine:
    """A machine whose files, variables and GPUs a test chooses; its checks run in this process."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.monkeypatch = monkeypatch
        for name in list(os.environ):
            if name.startswith(("CUDA_", "NCCL_", "OMP_", "KMP_", "GOMP_", "TORCH", "PYTHONM", "PYTHOND", "MALLOC_")):
                monkeypatch.delenv(name)

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def link(self, name: str, target: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(self.root / target, path.parent))

    def gpus(self, *cards: dict[str, Any], **facts: Any) -> None:
        self.monkeypatch.setitem(sys.modules, "pynvml", StandInNvml(list(cards), **facts))

    def cores(self, *cores: int) -> None:
        self.monkeypatch.setattr("evenload.hardware.usable_cores", lambda: cores)

    def look(self, check: str, **options: Any) -> Finding:
        module, _, function = FUNCTIONS[check].partition(":")
        found = getattr(import_module(f"evenload.doctor.checks.{module}"), function)(
            Options(**{"root": str(self.root), **options})
        )
        assert isinstance(found, Finding)
        return replace(found, name=check)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(tmp_path / "root", monkeypatch)


def all_in_child(
    *checks: str,
    prefix: str = "",
    shell: tuple[str, ...] = ("sh",),
    python: Path | str = sys.executable,
    env: Any = None,
    **options: Any,
) -> tuple[Finding, ...]:
    """Runs checks as the doctor does, in a shell that ``prefix`` has changed."""
    request = json.dumps({"checks": [FUNCTIONS.get(check, check) for check in checks], "options": options})
    command = [*shell, "-c", f'{prefix} exec "$0" -P -m evenload.doctor.child "$1"', str(python), request]
    done = subprocess.run(command, env=env or environment(), capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert all("raised" not in row for row in rows), rows
    return tuple(replace(read_finding(row), name=name) for name, row in zip(checks, rows, strict=True))


def in_child(check: str, **how: Any) -> Finding:
    """Runs one check as the doctor does."""
    return all_in_child(check, **how)[0]
