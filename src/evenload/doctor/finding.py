"""What the doctor's parent and its children say to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """The outcome of one check."""

    name: str
    status: Status
    """``fail`` would stop a run, ``warn`` would slow it, ``skip`` could not be looked at and says why."""
    found: str
    expected: str = ""
    mend: str = ""
    """The command that mends; empty where nothing is to be mended."""
    figures: tuple[Figure, ...] = ()
    """What was measured; empty for most checks."""


@dataclass(frozen=True)
class Options:
    """What a user asks of the doctor, handed to every check."""

    port: int = 0
    """The TCP port a run will use; 0: any free one."""
    backend: str = "auto"
    """Of the all-reduce: ``nccl``, ``gloo``, or ``auto`` (nccl where there are GPUs)."""
    folder: str = "runs"
    """Where runs will write."""
    host: str = ""
    """The other machine, ``HOST[:PORT]``; empty: this machine alone is looked at."""
    script: str = ""
    """A script that both should have."""
    data: str = ""
    """A data path that both should have."""
    temporary: str = ""
    """The folder for temporary files; `examine` sets it, because children have one of their own."""
    private: bool = False
    """Leave out what other people's programs are called (``--issue``)."""
    limit_s: float = 8.0
    """Time left to a check before the parent loses patience; `examine` and the child set it."""
    root: str = "/"
    """Where the files of the machine are read; another folder in tests."""

    @property
    def root_path(self) -> Path:
        """The root as a path."""
        return Path(self.root)


def read_finding(row: Mapping[str, Any]) -> Finding:
    """A finding from what a child wrote of it."""
    return Finding(**{**row, "figures": tuple(Figure(**figure) for figure in row.get("figures", ()))})


def exit_code(findings: Iterable[Finding]) -> int:
    """0: fit; 1: something would stop a run; 2: something would slow it."""
    statuses = {finding.status for finding in findings}
    return 1 if "fail" in statuses else 2 if "warn" in statuses else 0
