"""One attempt of a job's program inside another scheduler: started, polled, requested to stop, and its outcome.

The caller runs `BackendAttempt.poll` several times a second; nothing here waits. A stop request goes through the stop file,
because it can't come twice: Slurm signals every process of a job when it takes nodes back, and a program that gets SIGTERM
from both sides would take the second as "end at once". A program that has never reported doesn't know the file: it gets
SIGTERM a little later.

``python -m evenload.scheduler.backends.attempt --terms FILE -- COMMAND`` runs the same in a process of its own, for a parent
that must not fork (Ray's workers hold threads): it reads ``stop REASON`` lines, and ends the program when the parent is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenload.errors import EvenloadError, QueueError
from evenload.job import EXIT_CODE
from evenload.job.processes import SessionProcess
from evenload.job.protocol import VARIABLE, ProgressReport, RunnerContract, read_contract, read_report, request_stop
from evenload.scheduler.core.states import Verb

POLL_S = 0.2
_HINT_S = 2.0
"""Longest time before a program that may not know the stop file gets the signal."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    verb: Verb
    """SUCCEED, YIELD (it may go on later) or FAIL."""
    code: int
    """The program's exit code; negative for a signal."""
    reason: str = ""


def outcome_of(code: int, stop_reason: str, can_go_on: bool, has_finished: bool = False) -> AttemptOutcome:
    """Interpret an exit code, below 0 for a signal.

    `can_go_on`: the program goes on from its last save even if it ended after the request without exiting with `EXIT_CODE`
    (it took the signal's default, or the grace was over). `has_finished`: it reported so; after a request, exit code 0 alone
    is no success, because many a handler of SIGTERM exits with 0.
    """
    if code == 0 and (has_finished or not stop_reason):
        return AttemptOutcome(Verb.SUCCEED, code)
    if code == 0:
        reason = f"ended with exit code 0 after the stop request ({stop_reason}), without a report that it had finished"
        return AttemptOutcome(Verb.YIELD if can_go_on else Verb.FAIL, code, reason)
    if code == EXIT_CODE:
        return AttemptOutcome(Verb.YIELD, code, f"saved and stopped{f': {stop_reason}' if stop_reason else ''}")
    by = next((s for s in _STOP_SIGNALS if code in (-s, 128 + s)), None)
    if stop_reason and by is not None and can_go_on:
        reason = f"ended by {by.name} after the stop request ({stop_reason}); it goes on from its last save"
        return AttemptOutcome(Verb.YIELD, code, reason)
    if code < 0:
        with contextlib.suppress(ValueError):
            return AttemptOutcome(Verb.FAIL, code, f"ended by {signal.Signals(-code).name}")
    return AttemptOutcome(Verb.FAIL, code, f"exit code {code}")


class BackendAttempt:
    """The program's process, and the request to stop it."""

    def __init__(
        self,
        terms: RunnerContract,
        terms_file: Path,
        command: Sequence[str],
        *,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        goes_on: bool = False,
        send: Callable[[int], object] | None = None,
    ) -> None:
        """Start the program; raise a `QueueError` where it can't be.

        `goes_on`: it may be started again whatever ended it after a request; a program that has reported always may.
        `send` sends a signal to the program where the process started here only stands for it (srun).
        """
        self.terms = terms
        self.stop_reason = ""
        """Reason of the stop request; empty without one."""
        self._goes_on = goes_on
        self._requested_s = 0.0
        self._has_signalled = self._is_killed = False
        self._send = send
        variables = {**os.environ, **(environment or {}), VARIABLE: str(terms_file)}
        try:
            self._process = SessionProcess(
                command, ends_with_parent=True, cwd=folder, env=variables, stdin=subprocess.DEVNULL
            )
        except (OSError, ValueError) as error:
            raise QueueError(f"{command[0]} can't be started in {folder or Path.cwd()}: {error}") from error

    @property
    def pid(self) -> int:
        """Process id of the program, and its process group."""
        return self._process.pid

    def request_stop(self, reason: str) -> None:
        """Request a save and a stop; a second request ends the program at once."""
        if self.stop_reason:
            self.kill()
            return
        self.stop_reason, self._requested_s = reason, time.monotonic()
        try:
            request_stop(self.terms, reason)
        except OSError as error:
            _print(f"the stop file {self.terms.stop_file} can't be written ({error}); the program gets SIGTERM")
            self._signal()

    def poll(self) -> AttemptOutcome | None:
        """Return the outcome, None while the program runs; also signals and kills it when that is due after a request."""
        code = self._process.poll()
        if code is not None:
            report = self.report()
            has_finished = report is not None and report.state == "finished"
            return outcome_of(code, self.stop_reason, self._goes_on or report is not None, has_finished)
        if self.stop_reason and not self._is_killed:
            waited_s, grace_s = time.monotonic() - self._requested_s, self.terms.grace_s
            if waited_s > grace_s:
                self.kill()
            elif not self._has_signalled and waited_s > min(_HINT_S, grace_s / 4) and self.report() is None:
                self._signal()
        return None

    def report(self) -> ProgressReport | None:
        try:
            return read_report(self.terms)
        except QueueError:
            return None

    def close(self) -> None:
        """Leave nothing running."""
        if self._process.poll() is None:
            self.kill()
        self._process.kill()

    def _signal(self) -> None:
        self._has_signalled = True
        (self._send or self._process.send_signal)(signal.SIGTERM)

    def kill(self) -> None:
        """End the program and what it started in its process group, without waiting for the end."""
        if self._is_killed:
            return
        self._is_killed = True
        if self._send is None:
            self._process.kill_group()
        else:
            self._send(signal.SIGKILL)  # the process that stands for the program then ends by itself
            self._process.stop(_HINT_S, None)


def _print(text: str) -> None:
    print(f"evenload: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program to its end and return its exit code, `EXIT_CODE` where it may go on later."""
    parser = argparse.ArgumentParser(prog="python -m evenload.scheduler.backends.attempt", description=__doc__)
    parser.add_argument("--terms", required=True, help="the file of terms, as evenload.job.protocol writes it")
    parser.add_argument("--folder", help="where the program runs")
    parser.add_argument("--goes-on", action="store_true", help="it may be started again whatever ended it")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    try:
        attempt = BackendAttempt(
            read_contract(given.terms), Path(given.terms), given.command, folder=given.folder, goes_on=given.goes_on
        )
    except EvenloadError as error:
        _print(f"error: {error}")
        return 126
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    lines, is_open = b"", True
    try:
        while (outcome := attempt.poll()) is None:
            while signals:
                attempt.request_stop(f"received {signal.Signals(signals.pop()).name}")
            if not is_open:
                time.sleep(POLL_S)
                continue
            if not select.select([0], [], [], POLL_S)[0]:
                continue
            lines += (read := os.read(0, 4096))
            is_open = bool(read)
            *whole, lines = lines.split(b"\n")
            for line in whole:
                verb, _, reason = line.decode(errors="replace").partition(" ")
                if verb == "stop":
                    attempt.request_stop(reason or "requested by the queue")
            if not is_open:
                attempt.request_stop("the runner that started it is gone")
                attempt.kill()  # another runner may start it again at any moment
    finally:
        attempt.close()
    if outcome.reason:
        _print(outcome.reason)
    return exit_code_of(outcome)


def exit_code_of(outcome: AttemptOutcome) -> int:
    """Return the code with which a process that stands for the program ends: never 0 where it did not succeed."""
    if outcome.verb is Verb.YIELD:
        return EXIT_CODE
    code = 128 - outcome.code if outcome.code < 0 else outcome.code
    return code if outcome.verb is Verb.SUCCEED else code or 1


if __name__ == "__main__":
    sys.exit(main())
