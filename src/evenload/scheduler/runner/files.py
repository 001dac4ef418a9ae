"""Files of one attempt: the daemon's spec and requests, the runner's markers and result, the program's terms."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from evenload.errors import QueueError
from evenload.job.output import FULL_DISK_ERRORS
from evenload.job.processes import boot_id, boottime_s
from evenload.job.protocol import RunnerContract
from evenload.scheduler.paths import ATTEMPT_STARTED
from evenload.scheduler.runner.processes import ProcessMarkers
from evenload.stored_names import MARKERS_FILE, REPORT_FOLDER, REQUEST_FILE, RESULT_FIELDS, SPEC_FILE

__all__ = ["REPORT_FOLDER"]  # the program's own folder, which belongs to the job's owner; all else here is the daemon's

RESULT = "result.json"
RESERVE = ".result.reserve"
"""Bytes of the disk that become the result: allocated before the program starts, so that a full disk can't lose its end."""
_RESERVE_BYTES = 16 * 1024
PEAK = "peak.json"
NOTE = "note.json"
TERMS = "terms.json"
PROTOCOL = "protocol"
"""One byte: 1 where the program's files name Evenload, so that it can be expected to report although it hasn't yet. No more:
a daemon of an earlier version, which runs through an upgrade, compares the whole file."""


@dataclass(frozen=True, slots=True)
class AttemptSpec:
    queue: str
    job: str
    attempt: int
    fence: int
    command: tuple[str, ...]
    folder: str
    """Working directory of the program."""
    environment: Mapping[str, str]
    """All of its variables except the one with its terms."""
    uid: int
    gid: int
    user: str
    """Its groups are used; empty where the program runs as the runner's own user."""
    grace_s: float
    log: str
    log_bytes: int
    """The log is kept below this."""
    cores: tuple[int, ...] = ()
    """The program is bound to these; empty: all that the runner may use."""
    note: str = ""
    """A line written to the log before the program starts."""
    measures: bool = False
    """Measure the program's use of the machine's memory."""
    pty: bool = False
    """The program has a terminal."""
    image: str = ""
    """Container image in which the program runs; empty for none."""
    mounts: tuple[str, ...] = ()
    """Folders that the container shows under their own paths."""


@dataclass(frozen=True, slots=True)
class RunnerRequest:
    kind: str
    """``stop``: request a save and an end, kill after the grace. ``kill``: at once."""
    reason: str


@dataclass(frozen=True, slots=True)
class RunnerResult:
    """End of an attempt, as its runner writes it."""

    fence: int
    code: int | None
    """The program's exit code, below 0 for a signal; None where it never began."""
    requested: str = ""
    """``stop`` or ``kill`` if the program was requested to end before it did."""
    was_killed: bool = False
    """By the runner: its grace was over, or it was to end at once."""
    problem: str = ""
    """Reason why the program never began."""
    boot: str = ""
    """Id of the boot in which it ended, and the seconds since then: nobody can set that clock."""
    ended_since_boot_s: float = 0.0
    peak_bytes: int = 0
    """Peak of the machine's memory over all of its processes; 0 where that wasn't measured."""


class EndTime(TypedDict):
    """Fields of `RunnerResult` that say when an attempt ended."""

    boot: str
    ended_since_boot_s: float


def ended_now() -> EndTime:
    return {"boot": boot_id(), "ended_since_boot_s": boottime_s()}


def terms_of(folder: Path, spec: AttemptSpec) -> RunnerContract:
    return terms_in(folder, spec.job, spec.attempt, spec.grace_s)


def terms_in(folder: Path, job: str, attempt: int, grace_s: float) -> RunnerContract:
    reports = folder / REPORT_FOLDER
    return RunnerContract(
        job,
        attempt,
        str(reports / "report.json"),
        str(folder / "stop"),
        grace_s,
        devices_file=str(folder / "devices.json"),
        devices_reply_file=str(reports / "devices.json"),
    )


def write_spec(folder: Path, spec: AttemptSpec) -> None:
    """Write the spec for the runner; nobody else may read it, it holds the job's variables."""
    _write(folder / SPEC_FILE, dataclasses.asdict(spec))


def read_spec(folder: Path) -> AttemptSpec:
    """Read what the daemon wrote for the runner; raise a `QueueError` where it can't be read."""
    row = _read(folder / SPEC_FILE)
    if row is None:
        raise QueueError(f"{folder / SPEC_FILE} is missing: the daemon writes it before it starts a runner")
    return AttemptSpec(
        **{
            **row,
            "command": tuple(row["command"]),
            "cores": tuple(row.get("cores", ())),
            "mounts": tuple(row.get("mounts", ())),
        }
    )


def write_request(folder: Path, request: RunnerRequest) -> None:
    _write(folder / REQUEST_FILE, dataclasses.asdict(request))


def read_request(folder: Path) -> RunnerRequest | None:
    row = _read(folder / REQUEST_FILE)
    return None if row is None else RunnerRequest(**row)


def write_markers(folder: Path, markers: ProcessMarkers) -> None:
    """Write the markers of the attempt's processes, before the first of them begins."""
    _write(folder / MARKERS_FILE, dataclasses.asdict(markers))


def read_markers(folder: Path) -> ProcessMarkers:
    """Read the markers; only the path of the terms where nothing began."""
    row = _read(folder / MARKERS_FILE)
    return ProcessMarkers(terms=str(folder / TERMS)) if row is None else ProcessMarkers(**row)


def is_full_disk(error: BaseException) -> bool:
    """Return True for an error of a disk, or of a user's quota, that has no room left."""
    return isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS


def reserve_result(folder: Path) -> None:
    """Allocate the bytes of the attempt's result; OSError where the disk has no room for them."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / RESERVE, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _RESERVE_BYTES)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_result(folder: Path, result: RunnerResult) -> None:
    """Write how the attempt ended into the reserved bytes; it is on disk when this returns.

    Blanks fill the rest of the reserve: a file that shrinks and grows again could lose its place on the disk.
    """
    row = {RESULT_FIELDS.get(name, name): value for name, value in dataclasses.asdict(result).items()}
    text = json.dumps({**row, "problem": result.problem[:2000]}).encode().ljust(_RESERVE_BYTES)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / RESERVE, flags, 0o600)
    try:
        if os.pwrite(descriptor, text, 0) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / RESERVE))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    (folder / RESERVE).replace(folder / RESULT)


def read_result(folder: Path, fence: int) -> RunnerResult | None:
    try:
        row = _read(folder / RESULT)
    except QueueError:
        return None
    if row is None or row.get("fence") != fence:
        return None
    names = {stored: name for name, stored in RESULT_FIELDS.items()}
    known = {field.name for field in dataclasses.fields(RunnerResult)}
    named = {names.get(name, name): value for name, value in row.items()}
    return RunnerResult(**{name: value for name, value in named.items() if name in known})


def open_protocol(folder: Path) -> tuple[int, int]:
    """Return descriptors for `note_start`, which the program's user may then call."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    protocol, started = (os.open(folder / name, flags, 0o600) for name in (PROTOCOL, ATTEMPT_STARTED))
    os.write(protocol, b"0")
    return protocol, started


def note_start(descriptors: tuple[int, int], *, reports: bool) -> None:
    """Note that the program begins now; called right before its first instruction."""
    for descriptor, text in zip(descriptors, (f"{reports:d}", f"{boottime_s()!r}"), strict=True):
        os.pwrite(descriptor, text.encode(), 0)


def may_report(folder: Path) -> bool:
    """Return True where no program of the attempt has begun, or one that can be expected to report."""
    try:
        return (folder / PROTOCOL).read_bytes()[:1] == b"1"
    except OSError:
        return True


def began_since_boot_s(folder: Path) -> float | None:
    """Return when the attempt's program began; None if it hasn't, or an earlier version started it."""
    try:
        return float((folder / ATTEMPT_STARTED).read_bytes())
    except (OSError, ValueError):
        return None


def write_note(folder: Path, text: str) -> None:
    _write(folder / NOTE, {"text": text})


def read_note(folder: Path) -> str:
    """Read the daemon's last note for the job's log; empty without one."""
    try:
        row = _read(folder / NOTE)
    except QueueError:
        row = None
    return "" if row is None else str(row.get("text", ""))


def write_peak(folder: Path, fence: int, peak_bytes: int) -> None:
    _write(folder / PEAK, {"fence": fence, "peak_bytes": peak_bytes})


def read_peak(folder: Path, fence: int) -> int:
    """Read the peak of this fence's program; 0 without one."""
    try:
        row = _read(folder / PEAK)
    except QueueError:
        return 0
    peak_bytes = row.get("peak_bytes") if row is not None and row.get("fence") == fence else 0
    return peak_bytes if isinstance(peak_bytes, int) else 0


def _write(path: Path, row: Mapping[str, Any]) -> None:
    """Atomic, and forced to disk. The folder is the daemon's own: nobody else can place a link there."""
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
        raise QueueError(f"{path} is invalid: expected a JSON object")
    return row
