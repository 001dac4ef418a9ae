"""`SlurmRecord`: what a batch script records about its job, and what `evenload show` reads of it.

Without accounting Slurm forgets an ended job after minutes, and it never knows a program's progress. Each job has a folder
`ROOT/ID` with the record, the contract, report and stop file of each attempt, and the mark of a cancelled job.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evenload.atomic_file import write_atomically
from evenload.errors import QueueError
from evenload.job.protocol import ProgressReport, RunnerContract, read_report
from evenload.scheduler.core.states import JobState

RECORD, CANCELLED = "record.json", "cancelled"
NOW = "now"
"""Content of the mark after a second cancellation: end the job at once."""


@dataclass(frozen=True, slots=True)
class SlurmRecord:
    """State of a job as its batch script last recorded it."""

    state: JobState = JobState.RUNNING
    attempt: int = 1
    held_s: float = 0.0
    """Duration of earlier attempts."""
    num_failures: int = 0
    has_reported: bool = False
    """The program uses the job protocol, so it can resume after a stop."""
    code: int = 0
    reason: str = ""


def element_id(variables: Mapping[str, str]) -> str:
    """Return the id of this job: `12`, or `12_3` for an array's element. Raise a `QueueError` outside of a job."""
    if "SLURM_ARRAY_JOB_ID" in variables and "SLURM_ARRAY_TASK_ID" in variables:
        return f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    if "SLURM_JOB_ID" not in variables:
        raise QueueError(
            "SLURM_JOB_ID is not set: this module is started by a batch script submitted with sbatch; see --dry-run"
        )
    return variables["SLURM_JOB_ID"]


def write_record(folder: Path, record: SlurmRecord) -> None:
    """Replace the record atomically."""
    write_atomically(folder / RECORD, json.dumps(dataclasses.asdict(record)))


def read_record(folder: Path) -> SlurmRecord | None:
    try:
        row = json.loads((folder / RECORD).read_text())
        return SlurmRecord(**{**row, "state": JobState(row["state"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def contract_of(folder: Path, job: str, attempt: int, grace_s: float) -> RunnerContract:
    """Return the contract of an attempt. Each attempt has its own files, so that stale ones are not read."""
    return RunnerContract(
        job=job,
        attempt=attempt,
        report_file=str(folder / f"report-{attempt}.json"),
        stop_file=str(folder / f"stop-{attempt}"),
        grace_s=grace_s,
    )


def last_report(folder: Path, job: str, attempt: int) -> ProgressReport | None:
    """Return the program's last report, from this attempt or one of the two before."""
    for number in range(attempt, max(0, attempt - 3), -1):
        try:
            report = read_report(contract_of(folder, job, number, 0.0))
        except QueueError:
            continue
        if report is not None:
            return report
    return None
