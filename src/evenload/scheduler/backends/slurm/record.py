"""What `slurm_job` writes down about a job beside its output, and what people's commands read of it.

Slurm forgets an ended job after minutes where it has no accounting, and never knows how far a program is. Each job has a
folder ``ROOT/ID``: the record, the terms, report and stop file of its attempt, and the mark that says "cancelled".
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evenload.errors import QueueError
from evenload.job.protocol import Report, Terms, read_report
from evenload.scheduler.core.states import JobState

RECORD, CANCELLED = "record.json", "cancelled"
NOW = "now"
"""In the mark: cancelled a second time."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as its own batch script left it."""

    state: JobState = JobState.RUNNING
    attempt: int = 1
    held_s: float = 0.0
    """How long earlier attempts ran."""
    num_failures: int = 0
    has_reported: bool = False
    """Its program speaks the protocol, so it can go on after a stop."""
    code: int = 0
    reason: str = ""


def element_id(variables: Mapping[str, str]) -> str:
    """What people call this job: ``12``, or ``12_3`` for an array's element.

    Raises:
        QueueError: this is no job of Slurm.
    """
    if "SLURM_ARRAY_JOB_ID" in variables and "SLURM_ARRAY_TASK_ID" in variables:
        return f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    if "SLURM_JOB_ID" not in variables:
        raise QueueError(
            "SLURM_JOB_ID is not set: this is started by a batch script that sbatch has sent; see --dry-run"
        )
    return variables["SLURM_JOB_ID"]


def write_record(folder: Path, record: JobRecord) -> None:
    """Replaces the record as a whole."""
    temporary = folder / f".{RECORD}.{os.getpid()}"
    temporary.write_text(json.dumps(dataclasses.asdict(record)))
    temporary.replace(folder / RECORD)


def read_record(folder: Path) -> JobRecord | None:
    """The record; None where there is none that can be read."""
    try:
        row = json.loads((folder / RECORD).read_text())
        return JobRecord(**{**row, "state": JobState(row["state"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def terms_of(folder: Path, job: str, attempt: int, grace_s: float) -> Terms:
    """The terms of an attempt; each has files of its own, so that nothing of an earlier one is believed."""
    return Terms(
        job=job,
        attempt=attempt,
        report_file=str(folder / f"report-{attempt}.json"),
        stop_file=str(folder / f"stop-{attempt}"),
        grace_s=grace_s,
    )


def last_report(folder: Path, job: str, attempt: int) -> Report | None:
    """How far the program is, or was in an earlier attempt."""
    for number in range(attempt, max(0, attempt - 3), -1):
        try:
            report = read_report(terms_of(folder, job, number, 0.0))
        except QueueError:
            continue
        if report is not None:
            return report
    return None
