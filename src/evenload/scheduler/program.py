"""`Program`: what a job runs, apart from what the core decides by. Kept beside the job's `Submitted` as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from evenload.errors import QueueError


@dataclass(frozen=True, slots=True)
class Program:
    """A command, and all that is needed to start it again as it was submitted."""

    command: tuple[str, ...]
    folder: str
    """Where it was submitted, and where it runs unless there is a snapshot."""
    uid: int
    """Its owner; as the socket told it, never as the client said."""
    snapshot: str = ""
    """A copy of the working tree, taken at the submit; it runs there. Empty for none."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of the runner's own."""
    grace_s: float = 60.0
    """From the request to stop to SIGKILL."""
    requeue: bool = False
    """It may be ended and started from the beginning although it can't save."""
    notify: tuple[str, ...] = ()
    """Whom to tell how it ended: ``command:…``, ``webhook:URL``, ``mail:ADDRESS``."""
    backend: str = "local"
    options: Mapping[str, str] = field(default_factory=dict)
    """Of the backend."""

    def to_row(self) -> dict[str, Any]:
        """Plain values, as `Store.record(..., extra=)` takes them."""
        row = asdict(self)
        return {**row, "command": list(self.command), "notify": list(self.notify)}


def program_from(row: Mapping[str, Any]) -> Program:
    """The program that a row holds.

    Raises:
        QueueError: it lacks a field; unknown fields of a later version are passed over.
    """
    known = {name.name: row[name.name] for name in fields(Program) if name.name in row}
    try:
        return Program(**{**known, "command": tuple(known["command"]), "notify": tuple(known.get("notify", ()))})
    except (KeyError, TypeError) as error:
        raise QueueError(f"a job's program can't be read: {error}; what is there: {', '.join(sorted(row))}") from error
