"""One attempt of a job's program inside somebody else's scheduler: started, watched, asked to stop, and how it ended.

Slurm's batch script, Ray's runner and a pod all need the same: the program gets its terms, a request to stop reaches it
once although the scheduler may have signalled it already, it has its grace, and nothing of it is left. The shell around it
calls `Attempt.look` now and then; nothing here waits.

A request goes through the stop file, because it can't come twice. Slurm signals every process of a job when it takes
nodes back, and a program that gets SIGTERM from both sides would take the second as "end at once". A program that has
never reported doesn't know of the file: it gets SIGTERM a little later.

``python -m evenload.scheduler.backends.attempt --terms FILE -- COMMAND`` is the same as a process of its own, for a
parent that must not fork (Ray's workers hold threads): it reads ``stop REASON`` lines, and ends the program where the
parent is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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
from evenload.job.protocol import VARIABLE, Report, Terms, ask_to_stop, read_report, read_terms
from evenload.scheduler.core.states import Verb

POLL_S = 0.2
_HINT_S = 2.0
"""What a program that may not know of the stop file gets, at most, before the signal."""
_ASKED_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended."""

    verb: Verb
    """SUCCEED, YIELD (it may go on later) or FAIL."""
    code: int
    """The program's exit code; negative for a signal."""
    reason: str = ""


def outcome_of(code: int, asked: str, can_go_on: bool) -> Outcome:
    """What an exit code means, given whether (and why) the program was asked to stop.

    A program that was asked and didn't exit by itself with `EXIT_CODE` (it took the signal's default, or the grace was
    over) goes on from its last save where it says it can: `can_go_on`.
    """
    if code == 0:
        return Outcome(Verb.SUCCEED, code)
    if code == EXIT_CODE:
        return Outcome(Verb.YIELD, code, f"saved and stopped{f': {asked}' if asked else ''}")
    by = next((s for s in _ASKED_SIGNALS if code in (-s, 128 + s)), None)
    if asked and by is not None and can_go_on:
        return Outcome(
            Verb.YIELD, code, f"ended by {by.name} after it was asked to stop: {asked}; it goes on from its last save"
        )
    if code < 0:
        with contextlib.suppress(ValueError):
            return Outcome(Verb.FAIL, code, f"ended by {signal.Signals(-code).name}")
    return Outcome(Verb.FAIL, code, f"exit code {code}")


class Attempt:
    """The program's process, and who has asked it to stop since when."""

    def __init__(
        self,
        terms: Terms,
        terms_file: Path,
        command: Sequence[str],
        *,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        goes_on: bool = False,
        send: Callable[[int], object] | None = None,
    ) -> None:
        """Starts the program. `folder` is where, `environment` comes on top of this process's.

        `goes_on`: it may be started again whatever ended it after a request; one that has reported may in any case.
        `send` brings a signal to the program where the process that is started here only stands for it (srun).

        Raises:
            QueueError: it can't be started.
        """
        self.terms = terms
        self.asked = ""
        """Why it is to stop; empty while nobody asked."""
        self._goes_on = goes_on
        self._asked_s = 0.0
        self._has_signalled = False
        self._killed_s: float | None = None
        self._send = send
        variables = {**os.environ, **(environment or {}), VARIABLE: str(terms_file)}
        libc = _libc()
        try:
            self._process = subprocess.Popen(
                list(command),
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=None if libc is None else lambda: _die_with_parent(libc),
            )
        except (OSError, ValueError) as error:
            raise QueueError(f"{command[0]} can't be started in {folder or Path.cwd()}: {error}") from error

    @property
    def pid(self) -> int:
        """Of the program; also its process group."""
        return self._process.pid

    def ask(self, reason: str) -> None:
        """Asks the program to save and stop; a second time it is ended at once."""
        if self.asked:
            self.kill()
            return
        self.asked, self._asked_s = reason, time.monotonic()
        try:
            ask_to_stop(self.terms, reason)
        except OSError as error:
            _say(f"the stop file {self.terms.stop_file} can't be written ({error}); the program gets SIGTERM")
            self._signal()

    def look(self) -> Outcome | None:
        """How it ended, None while it runs. What a request needs next is done here, so call it several times a second."""
        code = self._process.poll()
        if code is not None:
            self._end_group()  # what the program started and left
            return outcome_of(code, self.asked, self._goes_on or self.report() is not None)
        if self._killed_s is not None:
            if time.monotonic() - self._killed_s > _HINT_S:
                self._end_group()
        elif self.asked:
            waited_s = time.monotonic() - self._asked_s
            if waited_s > self.terms.grace_s:
                self.kill()
            elif not self._has_signalled and waited_s > min(_HINT_S, self.terms.grace_s / 4) and self.report() is None:
                self._signal()
        return None

    def report(self) -> Report | None:
        """What the program last told; None where it told nothing that can be believed."""
        try:
            return read_report(self.terms)
        except QueueError:
            return None

    def close(self) -> None:
        """Leaves nothing running."""
        if self._process.poll() is None:
            self.kill()
        self._end_group()
        self._process.wait()

    def _signal(self) -> None:
        self._has_signalled = True
        if self._send is not None:
            self._send(signal.SIGTERM)
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the program and what it started in its process group, at once."""
        if self._killed_s is not None:
            return
        self._killed_s = time.monotonic()
        if self._send is not None:
            self._send(signal.SIGKILL)  # what stands for it then ends by itself
        else:
            self._end_group()

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    return ctypes.CDLL(None)


def _die_with_parent(libc: ctypes.CDLL) -> None:
    """Runs in the child: a program without anybody who watches it would hold its devices for ever."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _say(text: str) -> None:
    print(f"evenload: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program to its end and returns its exit code, `EXIT_CODE` where it may go on later."""
    parser = argparse.ArgumentParser(prog="python -m evenload.scheduler.backends.attempt", description=__doc__)
    parser.add_argument("--terms", required=True, help="the file of terms, as evenload.job.protocol writes it")
    parser.add_argument("--folder", help="where the program runs")
    parser.add_argument("--goes-on", action="store_true", help="it may be started again whatever ended it")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    try:
        attempt = Attempt(
            read_terms(given.terms), Path(given.terms), given.command, folder=given.folder, goes_on=given.goes_on
        )
    except EvenloadError as error:
        _say(f"error: {error}")
        return 126
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    lines, is_open = b"", True
    try:
        while (outcome := attempt.look()) is None:
            while asked:
                attempt.ask(f"asked by {signal.Signals(asked.pop()).name}")
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
                    attempt.ask(reason or "asked by the queue")
            if not is_open:
                attempt.ask("the runner that started it is gone")
                attempt.kill()  # another runner may start it again at any moment
    finally:
        attempt.close()
    if outcome.reason:
        _say(outcome.reason)
    code = EXIT_CODE if outcome.verb is Verb.YIELD else outcome.code
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
