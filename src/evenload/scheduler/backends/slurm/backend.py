"""The backend `slurm`: submit a job file to Slurm with `sbatch`, and read the status of its jobs.

The status comes from `squeue`. Slurm forgets ended jobs after minutes; then it comes from `sacct` if the cluster keeps
accounting, else from the record that the job's batch script left in its folder.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from evenload.errors import QueueError
from evenload.scheduler.backends.interface import BackendRequest, JobStatus, SchedulerBackend, is_element_of
from evenload.scheduler.backends.slurm.record import CANCELLED, NOW, SlurmRecord, last_report, read_record
from evenload.scheduler.backends.slurm.script import root_of, script
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.job_file import JobFile

_TIMEOUT_S = 60.0
_ID = re.compile(r"\d+(_\d+)?")

STATES = {
    word: state
    for state, words in {
        JobState.PENDING: "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT PREEMPTED",
        JobState.STARTING: "CONFIGURING",
        JobState.RUNNING: "RUNNING COMPLETING STAGE_OUT STOPPED SUSPENDED",
        JobState.RESIZING: "RESIZING",
        JobState.PREEMPTING: "SIGNALING",
        JobState.SUCCEEDED: "COMPLETED",
        JobState.CANCELLED: "CANCELLED REVOKED",
        JobState.FAILED: "BOOT_FAIL DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY RECONFIG_FAIL TIMEOUT",
    }.items()
    for word in words.split()
}
"""Slurm's state → ours. A SUSPENDED job keeps its nodes, so it is not waiting; a COMPLETING one is still running."""


class SlurmBackend(SchedulerBackend):
    """Slurm; `root` is the shared folder for output and state of jobs that do not name one."""

    name = "slurm"

    def __init__(self, root: Path | None = None) -> None:
        self._root = root

    @property
    def root(self) -> Path:
        """The default folder for output and state: `~/.local/state/evenload/slurm`, as clusters share home folders."""
        return self._root or Path.home() / ".local" / "state" / "evenload" / "slurm"

    def build_request(self, job: JobFile, snapshot: str = "") -> BackendRequest:
        """Build the batch script."""
        text = script(replace(job, folder=snapshot or job.folder), self.root, sys.executable)
        return BackendRequest("slurm", job.name, text, ("sbatch", "--parsable"), str(root_of(job, self.root)))

    def submit(self, request: BackendRequest) -> tuple[str, ...]:
        folder = Path(request.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise QueueError(
                f"can't create the folder for output and state: {error}; set one that all nodes share: [slurm] root = ..."
            ) from error
        done = _tool(*request.send, stdin=request.text, folder=folder)
        job = done.stdout.strip().partition(";")[0]  # with several clusters: ID;CLUSTER
        if done.returncode != 0 or not job.isdecimal():
            raise QueueError(f"Slurm rejected {request.name or 'the job'}: {_output_of(done)}")
        if folder != self.root:
            (self.root / f"{job}.root").write_text(json.dumps(str(folder)))
        return (job,)

    def describe(self, ids: Sequence[str]) -> tuple[JobStatus, ...]:
        ids = [_checked(job) for job in ids]
        found = {native.id: native for native in _in_queue(ids)}
        records = {element: record for job in ids for element, record in self._records(job).items()}
        lost = [job for job in ids if not any(is_element_of(element, job) for element in found)]
        lost += [e for e, r in records.items() if e not in found and r.state not in ENDED and e not in lost]
        if lost:
            found = {native.id: native for native in _in_accounts(lost)} | found
        for element, record in records.items():
            if element not in found:
                found[element] = _as_left(element, record)
        wanted = {element: native for job in ids for element, native in found.items() if is_element_of(element, job)}
        in_order = sorted(wanted.items(), key=lambda pair: [int(part) for part in pair[0].split("_")])
        return tuple(self._with_record(native, records.get(element)) for element, native in in_order)

    def cancel(self, job: str, *, now: bool = False) -> None:
        """Cancel a job: a waiting one at once, a running one after it has saved, or at once on a second call or with `now`."""
        _checked(job)
        known = _in_queue([job])
        live = [native for native in known if not native.has_ended]
        if not live:
            raise QueueError(f"can't cancel job {job}: {'it has ended' if known else 'Slurm has no such job'}")
        running = [native.id for native in live if native.state is JobState.RUNNING]
        for name in running if now else ():
            self._mark(name)  # marked twice, it ends at once
        graceful = [name for name in running if self._mark(name)]
        if graceful:
            _cancel("--batch", "--signal=TERM", *graceful)
        marked = [native.id for native in live if native.state is not JobState.PENDING and native.id not in graceful]
        if any(native.state is JobState.PENDING for native in live):
            _cancel("--state=PENDING", job)
        if marked:
            _cancel(*marked)

    def logs(self, job: str) -> Path:
        """Return the file to which Slurm appends the output of all attempts."""
        return self._root_of(_checked(job)) / f"{job}.log"

    def _mark(self, job: str) -> bool:
        """Mark the job as cancelled, or on a second call to be ended at once; False if it was so marked before."""
        folder = self._root_of(job) / job
        mark = folder / CANCELLED
        try:
            if mark.exists() and mark.read_text() == NOW:
                return False
            mark.write_text(NOW if mark.exists() else "cancelled")
        except OSError:
            return False
        return True

    def _root_of(self, job: str) -> Path:
        try:
            return Path(json.loads((self.root / f"{job.partition('_')[0]}.root").read_text()))
        except (OSError, ValueError):
            return self.root

    def _records(self, job: str) -> dict[str, SlurmRecord]:
        root = self._root_of(job)
        folders = [root / job, *root.glob(f"{job}_*")] if "_" not in job else [root / job]
        read = {folder.name: read_record(folder) for folder in folders}
        return {element: record for element, record in read.items() if record is not None}

    def _with_record(self, native: JobStatus, record: SlurmRecord | None) -> JobStatus:
        if record is None:
            return native
        reason = record.reason if native.has_ended and record.reason else native.reason
        report = last_report(self._root_of(native.id) / native.id, native.id, record.attempt)
        if report is None:
            return replace(native, attempt=record.attempt, reason=reason)
        return replace(native, attempt=record.attempt, reason=reason, step=report.step, total=report.total)


BACKEND = SlurmBackend()


def _cancel(*words: str) -> None:
    done = _tool("scancel", *words)
    if done.returncode != 0:
        raise QueueError(f"scancel failed: {_output_of(done)}")


def _in_queue(ids: Sequence[str]) -> list[JobStatus]:
    done = _tool("squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(ids)}", "--format=%i|%T|%N|%r")
    if done.returncode != 0:
        if "Invalid job id" in done.stderr:
            return []
        raise QueueError(f"squeue failed: {_output_of(done)}")
    return [
        _status_of(job, native, hosts, reason)
        for job, native, hosts, reason in (
            line.split("|", 3) for line in done.stdout.splitlines() if line.count("|") > 2
        )
        if _ID.fullmatch(job)
    ]


def _in_accounts(ids: Iterable[str]) -> list[JobStatus]:
    """Status of jobs that have left Slurm's queue from its accounting; empty if there is none."""
    try:
        columns = "--format=JobID,State,NodeList"
        done = _tool("sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={','.join(ids)}", columns)
    except QueueError:
        return []
    rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 2]
    found = [_status_of(job, native, hosts, "") for job, native, hosts in rows if _ID.fullmatch(job)]
    reason = "Slurm preempted it, and did not queue it again"
    return [replace(one, state=JobState.FAILED, reason=reason) if one.native == "PREEMPTED" else one for one in found]


def _status_of(job: str, native: str, hosts: str, reason: str) -> JobStatus:
    word = native.split()[0].rstrip("+") if native.split() else ""  # sacct: "CANCELLED by 1000"
    state = STATES.get(word, JobState.PENDING)
    text = "" if reason in ("", "None") else f"Slurm: {reason}"
    return JobStatus(job, state, word, text, tuple(part for part in (hosts,) if part and part != "None assigned"))


def _as_left(job: str, record: SlurmRecord) -> JobStatus:
    """Status of a job that Slurm has forgotten, from the record of its batch script."""
    if record.state in ENDED:
        return JobStatus(job, record.state, "", record.reason)
    reason = f"Slurm no longer knows the job and keeps no accounting; its last recorded state is {record.state}"
    return JobStatus(job, JobState.FAILED, "", reason)


def _checked(job: str) -> str:
    if not _ID.fullmatch(job):
        raise QueueError(f"job {job!r}: expected the id of a Slurm job, such as 1234 or 1234_5")
    return job


def _tool(*words: str, stdin: str = "", folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("EVENLOAD_")}
    try:
        return subprocess.run(
            words,
            input=stdin,
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise QueueError(
            f"{words[0]} not found: run this on a machine with Slurm's commands, such as the login node, after "
            f"`module load slurm` if the cluster needs it"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise QueueError(
            f"{words[0]} did not answer within {_TIMEOUT_S:g} s; check Slurm's controller with `scontrol ping`"
        ) from error


def _output_of(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return "; ".join(lines[-3:]) or f"exit code {done.returncode}"
