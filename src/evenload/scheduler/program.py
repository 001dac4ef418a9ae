"""`JobProgram`: what a job runs, apart from what the core decides by. Stored beside the job's `Submitted` as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler import validation


def _check_text(text: str) -> None:
    if "\0" in text:
        raise ValueError("a text without zero bytes")


def _check_path(path: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise ValueError("an absolute path")


def _check_snapshot(path: str) -> None:
    if path:
        _check_path(path)


@dataclass(frozen=True, slots=True)
class JobProgram:
    """A command, and everything needed to start it as it was submitted."""

    command: tuple[str, ...] = field(metadata={"check": _check_text})
    folder: str = field(metadata={"check": _check_path})
    """Where it was submitted, and where it runs unless there is a snapshot."""
    uid: int
    """Its owner, from the socket's peer credentials; never from the client's message."""
    snapshot: str = field(default="", metadata={"check": _check_snapshot})
    """A copy of the working tree, taken at the submit; it runs there. Empty for none."""
    image: str = field(default="", metadata={"check": _check_text})
    """Container image in which it runs; empty for none."""
    environment: Mapping[str, str] = field(default_factory=dict, metadata={"check": _check_text})
    """Variables on top of the runner's own."""
    grace_s: float = field(default=60.0, metadata={"min": 0})
    """From the request to stop to SIGKILL."""
    idle_end_s: float | None = field(default=None, metadata={"min": 0})
    """It is ended once all of its devices have been idle for so long; None for never."""
    requeue: bool = False
    """It may be ended and started from the beginning although it can't save."""
    pty: bool = False
    """It has a terminal, to which its owner's client connects (`runner.terminal`)."""
    notify: tuple[str, ...] = field(default=(), metadata={"check": _check_text})
    """Where to report how it ended: ``command:…``, ``webhook:URL``, ``mail:ADDRESS``."""
    backend: str = "local"
    options: Mapping[str, str] = field(default_factory=dict, metadata={"check": _check_text})

    def to_row(self) -> dict[str, Any]:
        """Return plain values for `QueueStore.record(..., extra=)`."""
        row = asdict(self)
        return {**row, "command": list(self.command), "notify": list(self.notify)}


def program_from(row: Mapping[str, Any]) -> JobProgram:
    """Return the program of a row; `QueueError` if it lacks a field. Unknown fields of a later version are ignored."""
    known = {field.name: row[field.name] for field in fields(JobProgram) if field.name in row}
    try:
        return validation.build(JobProgram, known, "")
    except ConfigError as error:
        raise QueueError(f"a job's program can't be read: {error}; its fields are {', '.join(sorted(row))}") from error
