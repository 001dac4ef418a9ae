"""Findings and options: the values that the doctor's parent and its children exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Figure:
    what: str
    """Such as ``cuda:0 matmul bfloat16``."""
    value: float
    unit: str
    """``TFLOP/s`` or ``GB/s``."""


@dataclass(frozen=True)
class Finding:
    name: str
    """The name of the check, set by `runner` from the checklist."""
    status: Status
    """``fail`` would stop a run, ``warn`` would slow it, ``skip`` does not apply or could not be checked."""
    found: str
    expected: str = ""
    fix: str = ""
    """The command that fixes it; empty if nothing is wrong."""
    figures: tuple[Figure, ...] = ()
    """Measured numbers; empty for most checks."""


@dataclass(frozen=True)
class Options:
    port: int = 0
    """The TCP port of the run; 0 for any free port."""
    backend: str = "auto"
    """Of the all-reduce: ``nccl``, ``gloo``, or ``auto`` (nccl if there are GPUs)."""
    folder: str = "runs"
    host: str = ""
    script: str = ""
    data: str = ""
    temporary: str = ""
    """The user's folder for temporary files, set by `runner` (children have separate ones)."""
    private: bool = False
    """Leave out the command lines of other users' processes (``--issue``)."""
    limit_s: float = 8.0
    """Seconds left for the check, set by `runner` and the child."""
    root: str = "/"
    """Root of the system files to read; another folder in tests."""

    @property
    def root_path(self) -> Path:
        return Path(self.root)


def ok(found: str, expected: str = "", figures: Sequence[Figure] = ()) -> Finding:
    return Finding("", "ok", found, expected, figures=tuple(figures))


def warn(found: str, expected: str, fix: str, figures: Sequence[Figure] = ()) -> Finding:
    return Finding("", "warn", found, expected, fix, tuple(figures))


def fail(found: str, expected: str, fix: str = "") -> Finding:
    """Return a finding that would stop a run or make its result wrong."""
    return Finding("", "fail", found, expected, fix)


def skip(found: str) -> Finding:
    """Return a finding for a check that does not apply or cannot be made."""
    return Finding("", "skip", found)


def read_finding(row: Mapping[str, Any]) -> Finding:
    return Finding(**{**row, "figures": tuple(Figure(**figure) for figure in row.get("figures", ()))})


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if the machine is fit, 1 if something would stop a run, 2 if something would slow it."""
    statuses = {finding.status for finding in findings}
    return 1 if "fail" in statuses else 2 if "warn" in statuses else 0
