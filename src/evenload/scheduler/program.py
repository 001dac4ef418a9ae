"""`JobProgram`: the command of a job and its environment, stored with the job's `Submitted` event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from evenload.errors import QueueError


@dataclass(frozen=True, slots=True)
class JobProgram:
    """A command, and everything needed to start it as it was submitted."""

    command: tuple[str, ...]
    folder: str
    """Folder in which it was submitted, and runs unless there is a snapshot."""
    uid: int
    """The owner, as the kernel reports it for the socket."""
    snapshot: str = ""
    """The copy of the working tree to run in; empty if there is none."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the runner's own."""
    grace_s: float = 60.0
    """Time from the stop request to SIGKILL."""
    requeue: bool = False
    """It may be ended and restarted from the beginning."""
    notify: tuple[str, ...] = ()
    """Targets to notify of its end: `command:…`, `webhook:URL`, `mail:ADDRESS`."""
    backend: str = "local"
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the backend."""

    def to_row(self) -> dict[str, Any]:
        """Return plain values for `QueueStore.record(..., extra=)`."""
        row = asdict(self)
        return {**row, "command": list(self.command), "notify": list(self.notify)}


def program_from(row: Mapping[str, Any]) -> JobProgram:
    """Read a program from plain values; ignore unknown fields of later versions.

    Raises:
        QueueError: a field is missing.
    """
    known = {name.name: row[name.name] for name in fields(JobProgram) if name.name in row}
    try:
        return JobProgram(**{**known, "command": tuple(known["command"]), "notify": tuple(known.get("notify", ()))})
    except (KeyError, TypeError) as error:
        raise QueueError(f"can't read a job's program: {error}; its fields are {', '.join(sorted(row))}") from error
