"""What a batch script of ours becomes on its first node: runs the program, and puts the job back into Slurm's queue.

Slurm asks by SIGTERM: before the time limit (this process alone, by ``--signal=B:TERM@...``), at the beginning of a
partition's ``GraceTime`` (the steps that srun started alone), or when it takes the nodes back (all processes of the job).
So the program is always a step of srun, and a request that comes here reaches it as a file. It saves and exits with code
75. Then Slurm either has requeued the job itself, or the user has cancelled it, or the job still runs as Slurm sees it; in
the last case it is put back by ``scontrol requeue``, under the same id, its output appended. A job that was cancelled is
never put back.
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
from evenload.job.protocol import write_terms
from evenload.scheduler.backends.attempt import POLL_S, AttemptOutcome, BackendAttempt, outcome_of
from evenload.scheduler.backends.slurm.record import (
    CANCELLED,
    NOW,
    JobRecord,
    element_id,
    read_record,
    terms_of,
    write_record,
)
from evenload.scheduler.core.states import JobState, Verb

_REQUEUE_TRIES = 5
_GONE_S = 60.0
"""After a requeue Slurm ends this process; it waits so long for that."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one attempt; the exit code of the batch script."""
    parser = argparse.ArgumentParser(prog="python -m evenload.scheduler.backends.slurm.job", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the folder of output and state")
    parser.add_argument("--grace", type=float, required=True, help="seconds from the request to the end")
    parser.add_argument("--spread", action="store_true", help="tell the command with which other nodes it runs")
    parser.add_argument(
        "--goes-on", action="store_true", help="it may be started again whatever ended it after a request"
    )
    parser.add_argument("--retries", type=int, default=0)
    parser.add_argument("--limit", type=float, help="seconds over all attempts")
    parser.add_argument("command", nargs="+")
    try:
        return _Job(parser.parse_args(arguments)).run()
    except EvenloadError as error:
        _say(f"error: {error}")
        return 126


class _Job:
    """The job while this attempt of it runs."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._id = element_id(os.environ)
        self._folder = given.root / self._id
        attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
        if attempt == 1:
            shutil.rmtree(self._folder, ignore_errors=True)  # of a job of the same number, before Slurm was set up anew
        self._folder.mkdir(parents=True, exist_ok=True)
        before = read_record(self._folder) or JobRecord()
        self._is_interrupted = (
            before.attempt < attempt and before.state is JobState.RUNNING and not self._may_go_on(before)
        )
        """Slurm put it back by itself, and it can't go on."""
        self._record = replace(before, state=JobState.RUNNING, attempt=attempt, code=0, reason="")
        self._began_s = time.monotonic()
        self._asked: list[int] = []
        self._is_over_limit = False

    def run(self) -> int:
        """From the start of the program to what becomes of the job."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self._asked.append(number))
        write_record(self._folder, self._record)
        if self._is_interrupted:
            self._record = replace(
                self._record, reason="Slurm started it again from its beginning: requeue = true allows that"
            )
            return self._end(JobState.FAILED, EXIT_CODE)
        terms = terms_of(self._folder, self._id, self._record.attempt, self._given.grace)
        terms_file = self._folder / f"terms-{self._record.attempt}.json"
        write_terms(terms_file, terms)
        attempt = BackendAttempt(
            terms,
            terms_file,
            self._command(),
            goes_on=self._may_go_on(self._record),
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

    def _may_go_on(self, record: JobRecord) -> bool:
        return self._given.goes_on or record.has_reported

    def _command(self) -> list[str]:
        srun = ["srun", "--kill-on-bad-exit=0", "--export=ALL"]
        if cores := os.environ.get("SLURM_CPUS_PER_TASK"):
            srun.append(f"--cpus-per-task={cores}")  # a step doesn't take it over from its job
        if self._given.spread:
            srun += [sys.executable, "-m", "evenload.scheduler.backends.node_command", "--"]
        return [*srun, *self._given.command]

    def _wait(self, attempt: BackendAttempt) -> AttemptOutcome:
        limit_s = self._given.limit
        while (outcome := attempt.poll()) is None:
            if self._asked:
                number = self._asked.pop(0)
                if not attempt.stop_reason:
                    attempt.request_stop(f"Slurm sent {signal.Signals(number).name}")
                elif self._mark() == NOW:
                    attempt.kill()
            held_s = self._record.held_s + time.monotonic() - self._began_s
            if limit_s is not None and not attempt.stop_reason and held_s >= limit_s - self._given.grace:
                self._is_over_limit = True
                attempt.request_stop(f"its hard limit of {limit_s:g} s is used up")
            time.sleep(POLL_S)
        return outcome

    def _settle(self, outcome: AttemptOutcome) -> int:
        """What becomes of the job now that the program has ended."""
        if outcome.verb is Verb.SUCCEED:
            return self._end(JobState.SUCCEEDED, 0)
        code = 128 - outcome.code if outcome.code < 0 else outcome.code
        native, is_preempted = _native_state(self._id)
        if outcome.verb is Verb.FAIL and is_preempted and self._may_go_on(self._record):
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
                self._record = replace(self._record, reason=f"its hard limit of {limit_s:g} s is used up")
                return self._end(JobState.FAILED, code)
            return self._put_back(native, code)
        if self._record.num_failures < self._given.retries:
            self._record = replace(self._record, num_failures=self._record.num_failures + 1)
            return self._put_back(native, code)
        return self._end(JobState.FAILED, code)

    def _put_back(self, native: str, code: int) -> int:
        _say(f"{self._record.reason}; the job waits in line again")
        self._record = replace(self._record, state=JobState.PENDING)
        write_record(self._folder, self._record)
        if native not in ("", "RUNNING"):
            return code  # Slurm does it itself: the job was preempted or requeued
        error = ""
        for _ in range(_REQUEUE_TRIES):
            done = _tool("scontrol", "requeue", self._id)
            if done.returncode == 0:
                self._wait_for_the_end()
                return code
            if _native_state(self._id)[0] not in ("", "RUNNING"):
                return code  # Slurm was quicker
            error = done.stderr.strip()
            time.sleep(1.0)
        self._record = replace(
            self._record, reason=f"saved, but Slurm doesn't take it back: {error}; submit it again to go on"
        )
        return self._end(JobState.FAILED, code)

    def _end(self, state: JobState, code: int) -> int:
        self._record = replace(self._record, state=state)
        write_record(self._folder, self._record)
        if self._record.reason:
            _say(self._record.reason)
        return code

    def _wait_for_the_end(self) -> None:
        end_s = time.monotonic() + _GONE_S
        self._asked.clear()
        while not self._asked and time.monotonic() < end_s:
            time.sleep(POLL_S)

    def _mark(self) -> str:
        """What the mark of a cancelled job says; empty where there is none."""
        try:
            return (self._folder / CANCELLED).read_text() or "cancelled"
        except OSError:
            return ""

    def _send_to_steps(self, number: int) -> None:
        """To the program's processes on all nodes: srun itself would take SIGTERM as the end of the step."""
        steps = _tool("squeue", "--noheader", "--steps", f"--jobs={self._id}", "--format=%i").stdout.split()
        if own := [step for step in steps if step.rpartition(".")[2].isdecimal()]:
            _tool("scancel", f"--signal={signal.Signals(number).name}", *own)


def _native_state(job: str) -> tuple[str, bool]:
    """The job's state as Slurm says it, and whether it is being preempted; empty where Slurm doesn't answer."""
    words = dict(
        word.split("=", 1) for word in _tool("scontrol", "show", "job", "-o", job).stdout.split() if "=" in word
    )
    return words.get("JobState", ""), words.get("PreemptTime", "None") not in ("None", "N/A")


def _tool(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))


def _say(text: str) -> None:
    print(f"evenload: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
