"""The two files between a program and its runner: what the program finds, and how far it tells it is.

A runner writes `Terms` and names the file in one variable; the program writes a `Report`, atomically and rarely. A stop
file asks it to save and stop. `evenload.job` is the program's side of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError, QueueError

VARIABLE = "EVENLOAD_JOB"
"""Names the file of `Terms`. A queue's runner sets it for its program; it is not for people."""

SCHEMA = 1
"""Of both files; raised when an older reader would misread them."""

_LARGEST_FILE_BYTES = 64 * 1024
_LARGEST_COUNT = 2**62


@dataclass(frozen=True, slots=True)
class Terms:
    """What a runner tells its program: where to report, where it asks for a stop, how long a save may take."""

    job: str
    attempt: int
    report_file: str
    """The program writes it (absolute path)."""
    stop_file: str
    """The program is to stop once this exists (absolute path); the text in it is the reason."""
    grace_s: float
    """From the request to stop until the program is killed."""
    report_every_s: float = 2.0
    """Reports are at least so far apart, the last one apart."""

    def __post_init__(self) -> None:
        for name in ("report_file", "stop_file"):
            path = getattr(self, name)
            if not isinstance(path, str) or not Path(path).is_absolute():
                raise ConfigError(f"{name}={path!r}: expected an absolute path")
        for name in ("grace_s", "report_every_s"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value!r}: expected a number of seconds, at least 0")
        if not isinstance(self.job, str) or not self.job:
            raise ConfigError(f"job={self.job!r}: expected the job's name")
        if not isinstance(self.attempt, int) or self.attempt < 1:
            raise ConfigError(f"attempt={self.attempt!r}: expected a number of at least 1")


@dataclass(frozen=True, slots=True)
class Report:
    """How far a program is, as it last told."""

    job: str
    attempt: int
    pid: int
    step: int
    """Steps done: where it would go on if it were saved now."""
    total: int | None
    """All steps; None where nobody knows."""
    steps_per_s: float
    """Over the last minute; 0 until two steps are done."""
    samples_per_s: float
    """0 where the program doesn't tell."""
    state: str
    """``running``, ``stopped`` (saved on request at `step`) or ``finished`` (the loop did its last step)."""
    time_s: float
    """When it was written, seconds since 1970."""

    def __post_init__(self) -> None:
        counts = (self.attempt, self.pid, self.step, 0 if self.total is None else self.total)
        speeds = (self.steps_per_s, self.samples_per_s, self.time_s)
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _LARGEST_COUNT for n in counts):
            raise QueueError("a report with counts that are none: expected whole numbers of at least 0")
        if not all(_is_number(speed) and 0 <= speed < math.inf for speed in speeds):
            raise QueueError("a report with numbers that can't be: expected finite ones of at least 0")
        if not isinstance(self.job, str) or self.state not in ("running", "stopped", "finished"):
            raise QueueError(f"a report in state {self.state!r:.50}: expected running, stopped or finished")


def write_terms(path: Path, terms: Terms) -> None:
    """Writes what a runner's program will find; the runner then sets `VARIABLE` to the path."""
    _write_whole(path, {"schema": SCHEMA, **dataclasses.asdict(terms)})


def read_terms(path: str) -> Terms:
    """What the runner of this program wrote.

    Raises:
        ConfigError: there is no such file, or no terms in it.
    """
    cure = f"A queue's runner sets {VARIABLE} for its program alone; outside of a queue, unset it"
    try:
        return Terms(**_read_whole(Path(path), Terms))
    except (OSError, ValueError, TypeError, QueueError) as error:
        raise ConfigError(f"{VARIABLE}={path}: {error}. {cure}") from error


def write_report(terms: Terms, report: Report) -> None:
    """Tells the runner how far the program is.

    Raises:
        OSError: it can't be written.
    """
    _write_whole(Path(terms.report_file), {"schema": SCHEMA, **dataclasses.asdict(report)})


def read_report(terms: Terms) -> Report | None:
    """What the program of these terms last told; None where it has told nothing yet.

    The file is the program's: it is not followed where it is a link, and not believed where it is of another attempt.

    Raises:
        QueueError: it is no report of this attempt.
    """
    try:
        told = Report(**_read_whole(Path(terms.report_file), Report))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, QueueError) as error:
        raise QueueError(f"the report of job {terms.job}, {terms.report_file}: {error}") from error
    if (told.job, told.attempt) != (terms.job, terms.attempt):
        raise QueueError(
            f"the report {terms.report_file} is of attempt {told.attempt} of job {told.job}, expected attempt "
            f"{terms.attempt} of job {terms.job}"
        )
    return told


def ask_to_stop(terms: Terms, reason: str) -> None:
    """Asks the program of these terms to save and stop; asking again changes nothing but the reason."""
    _replace(Path(terms.stop_file), reason.encode()[:1000])


def stop_text(path: str) -> str:
    """The reason in a stop file."""
    try:
        return _read_bytes(Path(path)).decode(errors="replace").strip() or "asked by the queue"
    except (OSError, QueueError):
        return "asked by the queue"


def _write_whole(path: Path, row: Mapping[str, Any]) -> None:
    _replace(path, json.dumps(row, allow_nan=False).encode() + b"\n")


def _replace(path: Path, content: bytes) -> None:
    """Readers see the old file or the new one, never a part. Not forced to disk: after a crash of the machine it is old."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _read_whole(path: Path, kind: type[Any]) -> dict[str, Any]:
    try:
        row = json.loads(_read_bytes(path))
    except RecursionError as error:
        raise QueueError("it is nested too deeply") from error
    if not isinstance(row, dict) or row.get("schema") != SCHEMA:
        found = row.get("schema") if isinstance(row, dict) else row
        raise QueueError(f"schema {found!r} of the line between program and queue; this version knows {SCHEMA}")
    return {field.name: row[field.name] for field in dataclasses.fields(kind) if field.name in row}


def _read_bytes(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise QueueError("it is not a plain file")
        content = file.read(_LARGEST_FILE_BYTES + 1)
    if len(content) > _LARGEST_FILE_BYTES:
        raise QueueError(f"it is larger than {_LARGEST_FILE_BYTES} bytes")
    return content


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
