"""The files of one attempt: the daemon's order and requests, the runner's marks and result, the program's terms."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.errors import QueueError
from evenload.job.protocol import Terms
from evenload.scheduler.runner.processes import Marks

ORDER = "order.json"
MARKS = "marks.json"
RESULT = "result.json"
PEAK = "peak.json"
ASK = "ask.json"
TERMS = "terms.json"
TOLD = "told"
"""The program's own folder, which belongs to the job's owner; all else here is the daemon's."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a runner is to start."""

    queue: str
    """The queue's folder."""
    job: str
    attempt: int
    fence: int
    command: tuple[str, ...]
    folder: str
    """Where the program runs."""
    environment: Mapping[str, str]
    """All of its variables, that of its terms apart."""
    uid: int
    gid: int
    user: str
    """Its groups are taken; empty where the program runs as the runner's own user."""
    grace_s: float
    log: str
    log_bytes: int
    """The log is kept below this."""
    cores: tuple[int, ...] = ()
    """The program is bound to them; all that the runner may use if empty."""
    note: str = ""
    """A line for the log before the program's own."""
    measures: bool = False
    """How much of the machine's memory the program takes is measured."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What the daemon asks of a runner."""

    kind: str
    """``stop``: ask the program to save and end, kill it after its grace. ``kill``: at once."""
    reason: str


@dataclass(frozen=True, slots=True)
class Result:
    """What became of an attempt, as its runner leaves it."""

    fence: int
    code: int | None
    """The program's exit code, below 0 for a signal; None where it never began."""
    asked: str = ""
    """``stop`` or ``kill`` if the runner asked it to end before it did."""
    was_killed: bool = False
    """By the runner: its grace was over, or it was to end at once."""
    problem: str = ""
    """Why it never began."""
    time_s: float = 0.0
    peak_bytes: int = 0
    """What all of its processes took of the machine's memory at most; 0 where that wasn't measured."""


def terms_of(folder: Path, order: Order) -> Terms:
    """What the program of an attempt finds."""
    return terms_in(folder, order.job, order.attempt, order.grace_s)


def terms_in(folder: Path, job: str, attempt: int, grace_s: float) -> Terms:
    """The terms of an attempt whose files lie in `folder`."""
    return Terms(job, attempt, str(folder / TOLD / "report.json"), str(folder / "stop"), grace_s)


def write_order(folder: Path, order: Order) -> None:
    """Leaves the order for the runner; nobody else may read it, it holds the job's variables."""
    _write(folder / ORDER, dataclasses.asdict(order))


def read_order(folder: Path) -> Order:
    """What the daemon ordered.

    Raises:
        QueueError: it can't be read.
    """
    row = _read(folder / ORDER)
    if row is None:
        raise QueueError(f"there is no order of the daemon in {folder}")
    return Order(**{**row, "command": tuple(row["command"]), "cores": tuple(row.get("cores", ()))})


def write_ask(folder: Path, ask: Ask) -> None:
    """Leaves a request for the runner; a signal wakes it."""
    _write(folder / ASK, dataclasses.asdict(ask))


def read_ask(folder: Path) -> Ask | None:
    """What the daemon asks for; None for nothing."""
    row = _read(folder / ASK)
    return None if row is None else Ask(**row)


def write_marks(folder: Path, marks: Marks) -> None:
    """Records what the attempt's processes are known by, before the first of them begins."""
    _write(folder / MARKS, dataclasses.asdict(marks))


def read_marks(folder: Path) -> Marks:
    """What was recorded; the path of the terms alone where nothing began."""
    row = _read(folder / MARKS)
    return Marks(terms=str(folder / TERMS)) if row is None else Marks(**row)


def write_result(folder: Path, result: Result) -> None:
    """Leaves what became of the attempt, on disk when this returns."""
    _write(folder / RESULT, dataclasses.asdict(result))


def read_result(folder: Path, fence: int) -> Result | None:
    """What the runner of this fence left; None where it left nothing."""
    try:
        row = _read(folder / RESULT)
    except QueueError:
        return None
    return Result(**row) if row is not None and row.get("fence") == fence else None


def write_peak(folder: Path, fence: int, peak_bytes: int) -> None:
    """Leaves how much memory the program took so far."""
    _write(folder / PEAK, {"fence": fence, "peak_bytes": peak_bytes})


def read_peak(folder: Path, fence: int) -> int:
    """How much memory the program of this fence took so far; 0 where nothing is told."""
    try:
        row = _read(folder / PEAK)
    except QueueError:
        return 0
    peak_bytes = row.get("peak_bytes") if row is not None and row.get("fence") == fence else 0
    return peak_bytes if isinstance(peak_bytes, int) else 0


def _write(path: Path, row: Mapping[str, Any]) -> None:
    """Whole or not at all, and on disk. The folder is the daemon's own: nobody else can put a link in the way."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
        json.dump(row, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        row = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise QueueError(f"{path} can't be read: {error}") from error
    if not isinstance(row, dict):
        raise QueueError(f"{path} holds no object")
    return row
