"""The files between a program and its runner: the runner's contract, the program's progress report, the stop file.

A runner writes a `RunnerContract` and names its file in one variable. The program writes a `ProgressReport`, atomically and
rarely. The stop file requests it to save and stop. `evenload.job.client` is the program's part.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.atomic_file import write_atomically
from evenload.balance.scaling import StepCosts
from evenload.errors import ConfigError, QueueError

VARIABLE = "EVENLOAD_JOB"
"""Variable with the path of the `RunnerContract`; set by a queue's runner for its program, not by users."""

SCHEMA = 1
"""Schema of both files; increased when an older reader would misread them."""

_LARGEST_FILE_BYTES = 64 * 1024
_LARGEST_COUNT = 2**62


@dataclass(frozen=True, slots=True)
class RunnerContract:
    """A runner's contract with its program: report file, stop file and time to save."""

    job: str
    attempt: int
    report_file: str
    """Absolute path of the file that the program writes."""
    stop_file: str
    """Absolute path of the file whose existence requests a stop; its text is the reason."""
    grace_s: float
    """Time from a stop request until the program is killed."""
    report_every_s: float = 2.0
    """Minimum time between two reports, except the last."""
    devices_file: str = ""
    """Absolute path of the file with the program's devices (`evenload.job.devices`); empty if they can't change."""
    devices_reply_file: str = ""
    """Absolute path of the file in which the program replies to changes of its devices."""

    def __post_init__(self) -> None:
        for name in ("report_file", "stop_file", "devices_file", "devices_reply_file"):
            path = getattr(self, name)
            if path == "" and name.startswith("devices"):
                continue
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
class ProgressReport:
    job: str
    attempt: int
    pid: int
    step: int
    """Number of steps done, with which it would continue if it were saved now."""
    total: int | None
    """Number of all steps; None if unknown."""
    steps_per_s: float
    """Average over the last minute; 0 until two steps are done."""
    samples_per_s: float
    """0 if unknown."""
    state: str
    """``running``, ``stopped`` (saved on request at `step`) or ``finished`` (the last step is done)."""
    time_s: float
    """Time of writing, seconds since the epoch."""
    since_boot_s: float = 0.0
    """The same in seconds since the machine was booted, which nobody can set; 0 if unknown."""
    resumed_at: int | None = None
    """Number of steps that were done when this attempt began; None if unknown."""
    costs: StepCosts | None = None
    """Costs of a step on the present devices; None if the program does not measure them."""

    def __post_init__(self) -> None:
        counts = (self.attempt, self.pid, self.step, self.total or 0, self.resumed_at or 0)
        speeds = (self.steps_per_s, self.samples_per_s, self.time_s, self.since_boot_s)
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _LARGEST_COUNT for n in counts):
            raise QueueError("invalid report: counts must be integers >= 0")
        if not all(_is_number(speed) and 0 <= speed < math.inf for speed in speeds):
            raise QueueError("invalid report: speeds and times must be finite and >= 0")
        if not isinstance(self.job, str) or self.state not in ("running", "stopped", "finished"):
            raise QueueError(f"invalid report: state {self.state!r:.50}; expected running, stopped or finished")
        if not isinstance(self.costs, StepCosts | None):
            raise QueueError("invalid report: costs must be those of a step")


def write_contract(path: Path, contract: RunnerContract) -> None:
    """Write the contract for a program; the runner then sets `VARIABLE` to the path."""
    write_whole(path, {"schema": SCHEMA, **dataclasses.asdict(contract)})


def read_contract(path: str) -> RunnerContract:
    """Read the contract of this program's runner; ConfigError if the file does not exist or holds none."""
    fix = f"A queue's runner sets {VARIABLE} only for its program; outside of a queue, unset it"
    try:
        return RunnerContract(**read_whole(Path(path), RunnerContract))
    except (OSError, ValueError, TypeError, QueueError) as error:
        raise ConfigError(f"{VARIABLE}={path}: {error}. {fix}") from error


def write_report(contract: RunnerContract, report: ProgressReport) -> None:
    """Write the program's progress for the runner; OSError if it can't be written."""
    write_whole(Path(contract.report_file), {"schema": SCHEMA, **dataclasses.asdict(report)})


def read_report(contract: RunnerContract) -> ProgressReport | None:
    """Return the program's last report, or None; QueueError if the file holds no report of this attempt.

    The program owns the file, so links are not followed, and a report of another attempt is refused.
    """
    try:
        row = read_whole(Path(contract.report_file), ProgressReport)
        if isinstance(costs := row.get("costs"), dict):
            row["costs"] = StepCosts(**_known(costs, StepCosts))
        report = ProgressReport(**row)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, QueueError) as error:
        raise QueueError(f"the report of job {contract.job}, {contract.report_file}: {error}") from error
    if (report.job, report.attempt) != (contract.job, contract.attempt):
        raise QueueError(
            f"the report {contract.report_file} is of attempt {report.attempt} of job {report.job}, expected attempt "
            f"{contract.attempt} of job {contract.job}"
        )
    return report


def request_stop(contract: RunnerContract, reason: str) -> None:
    """Request the program to save and stop; a second request only changes the reason."""
    write_atomically(Path(contract.stop_file), reason.encode()[:1000])


def read_stop_reason(path: str) -> str:
    try:
        return _read_bytes(Path(path)).decode(errors="replace").strip() or "asked by the queue"
    except (OSError, QueueError):
        return "asked by the queue"


def write_whole(path: Path, row: Mapping[str, Any]) -> None:
    """Replace a file of the protocol by this row of plain values; OSError if it can't be written."""
    write_atomically(path, json.dumps(row, allow_nan=False) + "\n")


def read_whole(path: Path, kind: type[Any]) -> dict[str, Any]:
    """Return the row of a file, with the fields of `kind`; OSError, ValueError or QueueError if it can't be read."""
    try:
        row = json.loads(_read_bytes(path))
    except RecursionError as error:
        raise QueueError("it is nested too deeply") from error
    if not isinstance(row, dict) or row.get("schema") != SCHEMA:
        found = row.get("schema") if isinstance(row, dict) else row
        raise QueueError(f"the file has schema {found!r}; this version reads schema {SCHEMA}")
    return _known(row, kind)


def _known(row: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Return the fields of a row that this version knows."""
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
