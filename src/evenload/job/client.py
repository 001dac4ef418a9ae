"""A program's part of the protocol with a queue: report progress, receive a stop request, exit with code 75.

Any program, on any number of devices, with or without torch::

    from evenload import job

    for step in job.steps(total, start=done, save=save):
        train(step)

Between two steps the loop checks for a stop request (SIGTERM, SIGINT, or the queue's stop file). It then calls ``save``, prints
how to continue, and ends the program with exit code 75. A second signal ends it at once. Under a queue the loop also reports
progress; the runner names the file of its `RunnerContract` in one variable. Without a queue nothing is written.

`stop_requested`, `grace_left_s` and `report` do the same for loops of another form. Several ranks must agree on the step at
which they stop: pass `steps` a function that shares one rank's flag with all ranks (``agree=run.any``).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from evenload.balance.scaling import StepCosts
from evenload.errors import ConfigError
from evenload.job.output import print_error
from evenload.job.processes import boottime_s
from evenload.job.protocol import (
    VARIABLE,
    ProgressReport,
    RunnerContract,
    read_contract,
    read_stop_reason,
    write_report,
)
from evenload.job.step_rate import StepRate

EXIT_CODE = 75
"""Exit code of a program that saved and stopped on request (EX_TEMPFAIL of sysexits.h); start it again to continue."""

_SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
_STOP_FILE_POLL_S = 0.01
"""Minimum time between two checks for the stop file, so that short steps do not become slower."""


def steps(
    total: int | None,
    *,
    save: Callable[..., object],
    start: int = 0,
    samples_per_step: float | None = None,
    agree: Callable[[bool], bool] | None = None,
    is_main: bool = True,
    go_on: str = "",
) -> Iterator[int]:
    """Yield the steps from `start` to `total`, until a stop is requested.

    Signals are caught while the loop runs, but only in the main thread: Python allows no handlers in another. A loop in another
    thread prints so and obeys only the queue's stop file; the main thread has to end the program with `EXIT_CODE`.

    Args:
        total: number of all steps; None for an endless loop.
        save: called between two steps on a stop request. If it requires an argument, it receives the number of steps done,
            which is the `start` to continue with. An exception ends the program as an error.
        start: number of steps done in earlier sessions.
        samples_per_step: for the reported speed in samples.
        agree: shares one rank's flag with all ranks; called once before each step on all ranks.
        is_main: this rank reports and prints; exactly one of several ranks does.
        go_on: instruction to continue, for people; the program's own command line if not given.

    Yields:
        The index of each step.

    Raises:
        SystemExit: with code 75, after `save`.
        ConfigError: an argument is wrong, or the queue's variable names no contract.
    """
    _check_steps(total, save, start, samples_per_step)
    save_at = _saver(save)

    def loop() -> Iterator[int]:
        connection = _connection()
        connection.rate = StepRate()
        if connection.resumed_at is None:
            connection.resumed_at = start

        def report_main(num_done: int, state: str) -> None:
            if is_main:
                connection.report(num_done, total, samples_per_step=samples_per_step, state=state)

        with listening():
            for step in itertools.count(start):
                if total is not None and step >= total:
                    report_main(step, "finished")
                    return
                requested = stop_requested()
                if requested if agree is None else agree(requested):
                    took_s = _timed(save_at, step)
                    if is_main:
                        reason = connection.reason or "another rank was asked to stop"
                        _print_stop(stopped_text(step, total, took_s, reason, go_on))
                    report_main(step, "stopped")
                    raise SystemExit(EXIT_CODE)
                yield step
                report_main(step + 1, "running")

    return loop()


def _timed(save: Callable[[int], object], step: int) -> float:
    began_s = time.monotonic()
    save(step)
    return time.monotonic() - began_s


def _print_stop(text: str) -> None:
    print_error(text)
    if threading.current_thread() is not threading.main_thread():
        print_error(
            f"the loop ran in another thread: the main thread has to end the program with exit code {EXIT_CODE}"
        )


def stopped_text(step: int, total: int | None, took_s: float, reason: str, go_on: str = "") -> str:
    """Return the message of a stop: step, duration of the save, reason, and how to continue."""
    of = "" if total is None else f" of {total}"
    return f"stopped at step {step}{of}, saved in {took_s:.1f} s ({reason}); {go_on_text(go_on)}"


def go_on_text(go_on: str = "") -> str:
    """Return how to continue: `go_on`, or the program's own command line."""
    how = go_on or f"start it again: {shlex.join(sys.orig_argv)}"
    contract = _connection().contract
    return (
        how
        if contract is None
        else f"the queue continues job {contract.job} automatically unless it was cancelled; to continue by hand, {how}"
    )


def stop_requested() -> bool:
    """Return True after a stop request: a signal while `listening`, or the queue's stop file."""
    return (_connections[0] if _connections else _connection()).is_stop_requested()


def stop_reason() -> str:
    """Return the source of the stop request and its reason; empty without a request."""
    connection = _connection()
    return connection.reason if connection.is_stop_requested() else ""


def grace_left_s() -> float | None:
    """Return the seconds until the queue kills this program after a stop request; None without a queue.

    Before a request it is the whole grace. It is counted from when this process noticed the request, at most one step later.
    """
    connection = _connection()
    if connection.contract is None:
        return None
    waited_s = (
        time.monotonic() - connection.requested_s
        if connection.is_stop_requested() and connection.requested_s is not None
        else 0.0
    )
    return max(0.0, connection.contract.grace_s - waited_s)


def attempt() -> tuple[str, int] | None:
    """Return the queue's job and the number of this attempt, from 1; None without a queue."""
    contract = _connection().contract
    return None if contract is None else (contract.job, contract.attempt)


def contract() -> RunnerContract | None:
    """Return the contract of this program's runner; None without a queue."""
    return _connection().contract


def forget_speed() -> None:
    """Measure the steps per second anew: the program runs on other devices from now on."""
    _connection().rate = StepRate()


def report(
    step: int,
    total: int | None,
    samples_per_s: float = 0.0,
    *,
    samples_per_step: float | None = None,
    state: str = "running",
    costs: Callable[[], StepCosts | None] | None = None,
) -> None:
    """Report to the queue that `step` steps are done; call it after each step. It does nothing without a queue.

    It rarely writes. Steps per second are measured between the calls. A failing write is printed once; the program continues.

    Args:
        step: number of steps done.
        total: number of all steps; None if unknown.
        samples_per_s: speed in samples, if known.
        samples_per_step: number of samples per step, in place of the speed.
        state: ``running``; ``stopped`` (saved on request) and ``finished`` are written at once.
        costs: returns what a step costs on these devices; called once a report. Speeds on others are predicted from it.
    """
    _connection().report(step, total, samples_per_s, samples_per_step=samples_per_step, state=state, costs=costs)


@contextmanager
def listening(
    signals: Sequence[int] = _SIGNALS,
    *,
    stays: Sequence[int] = (),
    is_end: Callable[[int, FrameType | None], object] | None = None,
) -> Iterator[None]:
    """Treat SIGTERM and SIGINT as stop requests within this context; a second signal ends the process at once.

    Outside the main thread no signals can be caught, which is printed once. A signal that the process ignores (``nohup``, ``&``
    in a script) stays ignored. The previous handlers are restored afterwards.

    Args:
        signals: the signals to catch; others keep their handlers.
        stays: signals that may be repeated without effect, because their sender ends this process by SIGKILL.
        is_end: called first with each signal; raises if the signal is not a request but ends the process.
    """
    connection = _connection()
    if threading.current_thread() is not threading.main_thread():
        if connection.num_listening == 0:
            connection.print_once(
                "thread",
                "this loop runs in a thread other than the main one, and Python catches signals only in that one: SIGTERM and "
                "SIGINT don't save here"
                + ("" if connection.contract is None else "; the queue's stop file does")
                + ". Enter job.listening() in the main thread to catch them",
            )
        yield
        return
    before: dict[int, Any] = {}
    connection.num_listening += 1
    before_this, (connection.stays, connection.is_end) = (connection.stays, connection.is_end), (tuple(stays), is_end)
    try:
        for number in signals:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, connection.on_signal)
        yield
    finally:
        connection.num_listening -= 1
        connection.stays, connection.is_end = before_this
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _RunnerConnection:
    """The contract, a stop request, the last report."""

    def __init__(self, contract: RunnerContract | None) -> None:
        self.contract = contract
        self.rate = StepRate()
        self.requested_s: float | None = None
        self.resumed_at: int | None = None
        """Steps that were done when this program began; its first report follows one more."""
        self.reason = ""
        self.num_listening = 0
        self.stays: tuple[int, ...] = ()
        self.is_end: Callable[[int, FrameType | None], object] | None = None
        self._checked_s = self._reported_s = -math.inf
        self._printed: set[str] = set()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the request; the kernel handles the next signal, so a second request ends the process at once."""
        if self.is_end is not None:
            self.is_end(number, frame)
        for other in _SIGNALS:
            if signal.getsignal(other) == self.on_signal and other not in self.stays:
                signal.signal(other, signal.SIG_DFL)
        if self.requested_s is None:
            self.requested_s = time.monotonic()
            self.reason = f"asked by {signal.Signals(number).name}"
        if os.isatty(2):  # confirm a Ctrl-C; never where a pipe could be full
            with contextlib.suppress(OSError):
                os.write(2, b"\nevenload: stopping after this step; once more ends it at once\n")

    def is_stop_requested(self) -> bool:
        if self.requested_s is None and self.contract is not None:
            now_s = time.monotonic()
            if now_s - self._checked_s >= _STOP_FILE_POLL_S:
                self._checked_s = now_s
                if Path(self.contract.stop_file).exists():
                    self.requested_s = now_s
                    self.reason = read_stop_reason(self.contract.stop_file)
        return self.requested_s is not None

    def report(
        self,
        step: int,
        total: int | None,
        samples_per_s: float = 0.0,
        *,
        samples_per_step: float | None = None,
        state: str = "running",
        costs: Callable[[], StepCosts | None] | None = None,
    ) -> None:
        contract = self.contract
        if contract is None:
            return
        now_s = time.monotonic()
        if self.resumed_at is None:
            self.resumed_at = max(0, step - 1) if state == "running" else step
        if state == "running":
            self.rate.count(step, now_s)
            if now_s - self._reported_s < contract.report_every_s:
                return
        self._reported_s = now_s
        steps_per_s = self.rate.steps_per_s()
        if samples_per_step is not None:
            samples_per_s = steps_per_s * samples_per_step
        times = (time.time(), boottime_s(), self.resumed_at)
        counts = (contract.job, contract.attempt, os.getpid(), step, total)
        progress = ProgressReport(*counts, steps_per_s, samples_per_s, state, *times, costs() if costs else None)
        try:
            write_report(contract, progress)
        except OSError as error:
            self.print_once("report", f"progress can't be reported to the queue: {contract.report_file}: {error}")

    def print_once(self, topic: str, text: str) -> None:
        if topic not in self._printed:
            self._printed.add(topic)
            print_error(text)


_connections: list[_RunnerConnection] = []


def _connection() -> _RunnerConnection:
    """Return this process's connection, opened at first use; a forked child has its own, without a request."""
    if not _connections:
        named = os.environ.get(VARIABLE)
        _connections.append(_RunnerConnection(None if named is None else read_contract(named)))
    return _connections[0]


def _in_forked_child() -> None:
    """Have a worker forked by the loop (a loader's) end by SIGTERM and ignore the terminal's Ctrl-C.

    With its parent's handler it would only record the request.
    """
    if not _connections:
        return
    connection = _connections.pop()
    if connection.num_listening == 0 or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Its parent needs it to finish the step. A function, since programs that it starts would inherit SIG_IGN.
        signal.signal(signal.SIGINT, _ignore)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


os.register_at_fork(after_in_child=_in_forked_child)


def _check_steps(total: Any, save: Any, start: Any, samples_per_step: Any) -> None:
    if total is not None and (not isinstance(total, int) or isinstance(total, bool) or total < 0):
        raise ConfigError(f"total={total!r}: expected a number of steps, or None for an endless loop")
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise ConfigError(f"start={start!r}: expected the number of steps done so far")
    if total is not None and start > total:
        raise ConfigError(
            f"start={start}, total={total}: more steps are done than the total; is this the state of another run?"
        )
    if not callable(save):
        raise ConfigError(f"save={save!r}: expected a function that saves the program's state")
    if samples_per_step is not None and not (
        isinstance(samples_per_step, int | float) and 0 < samples_per_step < math.inf
    ):
        raise ConfigError(f"samples_per_step={samples_per_step!r}: expected a number above 0")


def _saver(save: Callable[..., object]) -> Callable[[int], object]:
    """Return `save` as a function of the steps done; checked when the loop begins, not only at the stop."""
    try:
        parameters = inspect.signature(save).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return lambda step: save()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        names = ", ".join(p.name for p in required)
        raise ConfigError(f"save requires the arguments {names}: expected none, or one for the number of steps done")
    return save if required else lambda step: save()
