"""The process that a batch script execs on its first node: run the program, and requeue the job in Slurm.

Slurm sends SIGTERM before the time limit (only to this process, by `--signal=B:TERM@...`), at the beginning of a partition's
`GraceTime` (only to the steps of srun), or when it takes the nodes back (to all processes of the job). Therefore the program
is always a step of srun, and a signal received here is forwarded as a stop file. The program saves and exits with code 75.
Then either Slurm has requeued the job itself, or the user has cancelled it, or Slurm still considers it running; in the last
case `scontrol requeue` requeues it, under the same id and with its output appended. A cancelled job is never requeued.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evenload.errors import EvenloadError
from evenload.job import EXIT_CODE
from evenload.job.protocol import write_contract
from evenload.scheduler.backends.attempt import POLL_S, AttemptOutcome, BackendAttempt, outcome_of
from evenload.scheduler.backends.slurm.record import (
    CANCELLED,
    NOW,
    SlurmRecord,
    contract_of,
    element_id,
    read_record,
    write_record,
)
from evenload.scheduler.core.states import JobState, Verb

_REQUEUE_TRIES = 5
_END_TIMEOUT_S = 60.0
"""Longest wait for Slurm to end this process after a requeue."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one attempt; return the exit code of the batch script."""
    parser = argparse.ArgumentParser(prog="python -m evenload.scheduler.backends.slurm.job", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder for output and state")
    parser.add_argument("--grace", type=float, required=True, help="seconds from the stop request to the forced end")
    parser.add_argument("--spread", action="store_true", help="pass the addresses of the job's nodes to the command")
    parser.add_argument(
        "--goes-on", action="store_true", help="restart the program whatever ended it after a stop request"
    )
    parser.add_argument("--retries", type=int, default=0)
    parser.add_argument("--limit", type=float, help="hard limit in seconds, over all attempts")
    parser.add_argument("command", nargs="+")
    try:
        return SlurmJob(parser.parse_args(arguments)).run()
    except EvenloadError as error:
        _print(f"error: {error}")
        return 126


class SlurmJob:
    """One attempt of a job of Slurm."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._id = element_id(os.environ)
        self._folder = given.root / self._id
        attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
        if attempt == 1:
            shutil.rmtree(
                self._folder, ignore_errors=True
            )  # of an earlier job of this number, from before a reinstallation of Slurm
        self._folder.mkdir(parents=True, exist_ok=True)
        before = read_record(self._folder) or SlurmRecord()
        self._is_interrupted = (
            before.attempt < attempt and before.state is JobState.RUNNING and not self._can_resume(before)
        )
        """Slurm has restarted the job, which can't resume."""
        self._record = replace(before, state=JobState.RUNNING, attempt=attempt, code=0, reason="")
        self._began_s = time.monotonic()
        self._signals: list[int] = []
        self._is_over_limit = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self._signals.append(number))
        write_record(self._folder, self._record)
        if self._is_interrupted:
            self._record = replace(
                self._record, reason="Slurm restarted the job from the beginning, which requires requeue = true"
            )
            return self._end(JobState.FAILED, EXIT_CODE)
        contract = contract_of(self._folder, self._id, self._record.attempt, self._given.grace)
        contract_file = self._folder / f"terms-{self._record.attempt}.json"
        write_contract(contract_file, contract)
        attempt = BackendAttempt(
            contract,
            contract_file,
            self._command(),
            goes_on=self._can_resume(self._record),
            send=self._send_to_steps,
        )
        try:
            outcome = self._wait(attempt)
        finally:
            attempt.close()
        has_reported = self._record.has_reported or attempt.report() is not None
        held_s = self._record.held_s + time.monotonic() - self._began_s
        self._record = replace(
            self._record, held_s=held_s, has_reported=has_reported, code=outcome.code, reason=outcome.reason
        )
        return self._settle(outcome)

    def _can_resume(self, record: SlurmRecord) -> bool:
        return bool(self._given.goes_on) or record.has_reported

    def _command(self) -> list[str]:
        srun = ["srun", "--kill-on-bad-exit=0", "--export=ALL"]
        if cores := os.environ.get("SLURM_CPUS_PER_TASK"):
            srun.append(f"--cpus-per-task={cores}")  # a step does not inherit it from its job
        if self._given.spread:
            srun += [sys.executable, "-m", "evenload.scheduler.backends.node_command", "--"]
        return [*srun, *self._given.command]

    def _wait(self, attempt: BackendAttempt) -> AttemptOutcome:
        limit_s = self._given.limit
        while (outcome := attempt.poll()) is None:
            if self._signals:
                number = self._signals.pop(0)
                if not attempt.stop_reason:
                    attempt.request_stop(f"Slurm sent {signal.Signals(number).name}")
                elif self._mark() == NOW:
                    attempt.kill()
            held_s = self._record.held_s + time.monotonic() - self._began_s
            if limit_s is not None and not attempt.stop_reason and held_s >= limit_s - self._given.grace:
                self._is_over_limit = True
                attempt.request_stop(f"the hard limit of {limit_s:g} s is used up")
            time.sleep(POLL_S)
        return outcome

    def _settle(self, outcome: AttemptOutcome) -> int:
        """End or requeue the job after the program has ended."""
        if outcome.verb is Verb.SUCCEED:
            return self._end(JobState.SUCCEEDED, 0)
        code = (128 - outcome.code if outcome.code < 0 else outcome.code) or 1
        native, is_preempted = _native_state(self._id)
        if outcome.verb is Verb.FAIL and is_preempted and self._can_resume(self._record):
            outcome = outcome_of(outcome.code, "Slurm needs its nodes", can_go_on=True)
        if native == "CANCELLED":
            return self._end(JobState.CANCELLED, code)
        if outcome.verb is Verb.FAIL and native not in ("", "RUNNING"):
            write_record(self._folder, self._record)  # still RUNNING there: Slurm has interrupted it
            return code
        if self._mark():
            self._end(JobState.CANCELLED, code)
            if _tool("scancel", self._id).returncode == 0:
                self._wait_for_the_end()
            return code
        if outcome.verb is Verb.YIELD:
            limit_s = self._given.limit
            if self._is_over_limit or (limit_s is not None and self._record.held_s >= limit_s - self._given.grace):
                self._record = replace(self._record, reason=f"the hard limit of {limit_s:g} s is used up")
                return self._end(JobState.FAILED, code)
            return self._requeue(native, code)
        if self._record.num_failures < self._given.retries:
            self._record = replace(self._record, num_failures=self._record.num_failures + 1)
            return self._requeue(native, code)
        return self._end(JobState.FAILED, code)

    def _requeue(self, native: str, code: int) -> int:
        _print(f"{self._record.reason}; the job is requeued")
        self._record = replace(self._record, state=JobState.PENDING)
        write_record(self._folder, self._record)
        if native not in ("", "RUNNING"):
            return code  # Slurm requeues it itself
        error = ""
        for _ in range(_REQUEUE_TRIES):
            done = _tool("scontrol", "requeue", self._id)
            if done.returncode == 0:
                self._wait_for_the_end()
                return code
            if _native_state(self._id)[0] not in ("", "RUNNING"):
                return code  # Slurm did it meanwhile
            error = done.stderr.strip()
            time.sleep(1.0)
        self._record = replace(
            self._record, reason=f"saved, but Slurm rejected the requeue: {error}; submit the job again to continue"
        )
        return self._end(JobState.FAILED, code)

    def _end(self, state: JobState, code: int) -> int:
        self._record = replace(self._record, state=state)
        write_record(self._folder, self._record)
        if self._record.reason:
            _print(self._record.reason)
        return code

    def _wait_for_the_end(self) -> None:
        end_s = time.monotonic() + _END_TIMEOUT_S
        self._signals.clear()
        while not self._signals and time.monotonic() < end_s:
            time.sleep(POLL_S)

    def _mark(self) -> str:
        """The content of the mark of a cancelled job; empty if there is none."""
        try:
            return (self._folder / CANCELLED).read_text() or "cancelled"
        except OSError:
            return ""

    def _send_to_steps(self, number: int) -> None:
        """Send a signal to the program on all nodes; srun itself would end the step on SIGTERM."""
        steps = _tool("squeue", "--noheader", "--steps", f"--jobs={self._id}", "--format=%i").stdout.split()
        if own := [step for step in steps if step.rpartition(".")[2].isdecimal()]:
            _tool("scancel", f"--signal={signal.Signals(number).name}", *own)


def _native_state(job: str) -> tuple[str, bool]:
    """(Slurm's state of the job, is it being preempted?); empty if Slurm does not answer."""
    words = dict(
        word.split("=", 1) for word in _tool("scontrol", "show", "job", "-o", job).stdout.split() if "=" in word
    )
    return words.get("JobState", ""), words.get("PreemptTime", "None") not in ("None", "N/A")


def _tool(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))


def _print(text: str) -> None:
    print(f"evenload: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
