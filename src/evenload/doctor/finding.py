"""Findings and options: the values that the doctor's parent and its children exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Figure:
    """One measured number (``--full``)."""

    what: str
    """Such as ``cuda:0 matmul bfloat16``."""
    value: float
    unit: str
    """``TFLOP/s`` or ``GB/s``."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

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
    """The user's options, passed to every check."""

    port: int = 0
    """The TCP port of the run; 0 for any free port."""
    backend: str = "auto"
    """Of the all-reduce: ``nccl``, ``gloo``, or ``auto`` (nccl if there are GPUs)."""
    folder: str = "runs"
    """The folder that runs will write to."""
    host: str = ""
    """The other machine, ``HOST[:PORT]``; empty to check this machine only."""
    script: str = ""
    """A script to compare between the two machines."""
    data: str = ""
    """A data path to compare between the two machines."""
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
        """The root as a path."""
        return Path(self.root)


def ok(found: str, expected: str = "", figures: Sequence[Figure] = ()) -> Finding:
    """Return a finding without a problem."""
    return Finding("", "ok", found, expected, figures=tuple(figures))


def warn(found: str, expected: str, fix: str, figures: Sequence[Figure] = ()) -> Finding:
    """Return a finding that would slow a run."""
    return Finding("", "warn", found, expected, fix, tuple(figures))


def fail(found: str, expected: str, fix: str = "") -> Finding:
    """Return a finding that would stop a run or make its result wrong."""
    return Finding("", "fail", found, expected, fix)


def skip(found: str) -> Finding:
    """Return a finding for a check that does not apply or cannot be made."""
    return Finding("", "skip", found)


def read_finding(row: Mapping[str, Any]) -> Finding:
    """Parse a finding from the output of a child."""
    return Finding(**{**row, "figures": tuple(Figure(**figure) for figure in row.get("figures", ()))})


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if the machine is fit, 1 if something would stop a run, 2 if something would slow it."""
    statuses = {finding.status for finding in findings}
    return 1 if "fail" in statuses else 2 if "warn" in statuses else 0
