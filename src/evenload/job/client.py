"""How a program talks to a queue: how far it is, a request to stop, the exit code that says "saved, go on later".

Any program, on any number of devices, with or without torch::

    from evenload import job

    for step in job.steps(total, start=done, save=save):
        train(step)

Between two steps the loop looks whether it is asked to stop (SIGTERM, SIGINT, or the queue's stop file). It then calls
``save``, says how to go on, and ends the program with exit code 75. A second signal ends it at once. Under a queue the
loop also reports how far it is; the runner names a file of `Terms` in one variable. Without a queue nothing is written.

`stop_requested`, `grace_left_s` and `report` are the same parts for loops of another form. Several ranks must agree on
the step they stop at: give `steps` the function that makes one rank's flag everybody's (``agree=run.any``).
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from evenload.errors import ConfigError
from evenload.job.protocol import VARIABLE, Report, Terms, read_terms, stop_text, write_report

EXIT_CODE = 75
"""Saved and stopped on request; start it again to go on (EX_TEMPFAIL of sysexits.h)."""

_SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
_SPEED_OVER_S = 60.0
_LOOK_EVERY_S = 0.01
"""The stop file is looked for at most so often: short steps shall not pay for it."""


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
    """The steps from `start` to `total`, until the program is asked to stop.

    Signals are caught while the loop runs, in the main thread alone: Python allows no handler in another thread. A loop
    in another thread says so, and follows the queue's stop file only; SIGTERM then does what it does without Evenload.
    There the end is that of the thread: the main thread has to end the program with `EXIT_CODE`.

    Args:
        total: number of all steps; None for a loop without end.
        save: called between two steps when the program is to stop, before it ends. If it requires an argument it gets
            the number of steps done, which is the `start` to go on with. What it raises ends the program as an error.
        start: steps done in earlier sittings.
        samples_per_step: for the reported speed in samples.
        agree: makes one rank's flag that of all ranks; called once before each step, on all ranks alike.
        is_main: whether this rank reports and prints. One of several ranks does.
        go_on: how to go on, for people; the program's own command line if not given.

    Yields:
        The index of each step.

    Raises:
        SystemExit: with code 75, after `save`.
        ConfigError: an argument can't be, or the variable of the queue names no terms.
    """
    _check_steps(total, save, start, samples_per_step)
    return _steps(total, _saver(save), start, samples_per_step, agree, is_main, go_on)


def _steps(
    total: int | None,
    save: Callable[[int], object],
    start: int,
    samples_per_step: float | None,
    agree: Callable[[bool], bool] | None,
    is_main: bool,
    go_on: str,
) -> Iterator[int]:
    link = _link()
    link.speed = _Speed()
    with listening():
        for step in itertools.count(start):
            if total is not None and step >= total:
                if is_main:
                    link.report(step, total, samples_per_step=samples_per_step, state="finished")
                return
            asked = stop_requested()
            if asked if agree is None else agree(asked):
                _save(link, save, step, total, is_main, go_on)
                if is_main:
                    link.report(step, total, samples_per_step=samples_per_step, state="stopped")
                raise SystemExit(EXIT_CODE)
            yield step
            if is_main:
                link.report(step + 1, total, samples_per_step=samples_per_step)


def _save(link: _Link, save: Callable[[int], object], step: int, total: int | None, is_main: bool, go_on: str) -> None:
    reason = link.reason or "another rank was asked to stop"
    began_s = time.monotonic()
    save(step)
    took_s = time.monotonic() - began_s
    if is_main:
        _say(stopped_text(step, total, took_s, reason, go_on))
        if threading.current_thread() is not threading.main_thread():
            _say(f"the loop ran in another thread: the main thread has to end the program with exit code {EXIT_CODE}")


def stopped_text(step: int, total: int | None, took_s: float, reason: str, go_on: str = "") -> str:
    """What people are told of a stop: where, how long the save took, who asked, how to go on."""
    of = "" if total is None else f" of {total}"
    return f"stopped at step {step}{of}, saved in {took_s:.1f} s ({reason}); {go_on_text(go_on)}"


def go_on_text(go_on: str = "") -> str:
    """How to go on; `go_on` where the program's own command line is not how."""
    how = go_on or f"start it again: {shlex.join(sys.orig_argv)}"
    terms = _link().terms
    return (
        how
        if terms is None
        else f"the queue goes on with job {terms.job} by itself, unless it was cancelled; by hand, {how}"
    )


def stop_requested() -> bool:
    """Whether this process is asked to stop: by a signal while `listening`, or by the queue's stop file."""
    return _link().is_asked()


def stop_reason() -> str:
    """Who asked for a stop, and why; empty while nobody did."""
    link = _link()
    return link.reason if link.is_asked() else ""


def grace_left_s() -> float | None:
    """Seconds until the queue kills a program that was asked to stop; all of the grace before that, None without a queue.

    Counted from when the request was first seen here, which is at most one step after it was made.
    """
    link = _link()
    if link.terms is None:
        return None
    waited_s = time.monotonic() - link.asked_s if link.is_asked() and link.asked_s is not None else 0.0
    return max(0.0, link.terms.grace_s - waited_s)


def attempt() -> tuple[str, int] | None:
    """The queue's job, and which attempt of it this is, counted from 1; None without a queue."""
    terms = _link().terms
    return None if terms is None else (terms.job, terms.attempt)


def report(
    step: int,
    total: int | None,
    samples_per_s: float = 0.0,
    *,
    samples_per_step: float | None = None,
    state: str = "running",
) -> None:
    """Tells the queue that `step` steps are done; call it after each, it seldom writes. Nothing without a queue.

    Steps a second are measured between the calls. A report that can't be written is told once; the program goes on.

    Args:
        step: steps done.
        total: all steps; None where nobody knows.
        samples_per_s: the speed in samples, where the program knows it.
        samples_per_step: in its place, samples of a step.
        state: ``running``; ``stopped`` (saved on request) and ``finished`` are written at once.
    """
    _link().report(step, total, samples_per_s, samples_per_step=samples_per_step, state=state)


@contextmanager
def listening(
    signals: Sequence[int] = _SIGNALS,
    *,
    stays: Sequence[int] = (),
    is_end: Callable[[int, FrameType | None], object] | None = None,
) -> Iterator[None]:
    """SIGTERM and SIGINT are requests to stop while this is entered; the second signal ends the process at once.

    In a thread other than the main one it can't catch signals, and says so once. A signal that the process ignored
    before (``nohup``, ``&`` in a script) stays ignored. Handlers of before are put back.

    Args:
        signals: those to catch; the others keep their handlers.
        stays: those that may come again and change nothing, because whoever sends them ends this process by SIGKILL.
        is_end: called first with each signal; it raises where the signal is no request but the end.
    """
    link = _link()
    if threading.current_thread() is not threading.main_thread():
        if link.num_listening == 0:
            link.tell_once(
                "thread",
                "this loop runs in a thread other than the main one, where Python can't catch signals: SIGTERM and SIGINT "
                "don't save here"
                + ("" if link.terms is None else "; the queue's stop file does")
                + ". Enter job.listening() in the main thread to catch them",
            )
        yield
        return
    before: dict[int, Any] = {}
    link.num_listening += 1
    kept, (link.stays, link.is_end) = (link.stays, link.is_end), (tuple(stays), is_end)
    try:
        for number in signals:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, link.on_signal)
        yield
    finally:
        link.num_listening -= 1
        link.stays, link.is_end = kept
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Link:
    """This process's end of the line to the queue: the terms, whether a stop was asked for, when it last reported."""

    def __init__(self, terms: Terms | None) -> None:
        self.terms = terms
        self.speed = _Speed()
        self.asked_s: float | None = None
        self.reason = ""
        self.num_listening = 0
        self.stays: tuple[int, ...] = ()
        self.is_end: Callable[[int, FrameType | None], object] | None = None
        self._looked_s = self._reported_s = -math.inf
        self._told: set[str] = set()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Notes the request, and leaves the next signal to the kernel: a second request ends the process at once."""
        if self.is_end is not None:
            self.is_end(number, frame)
        for other in _SIGNALS:
            if signal.getsignal(other) == self.on_signal and other not in self.stays:
                signal.signal(other, signal.SIG_DFL)
        if self.asked_s is None:
            self.asked_s = time.monotonic()
            self.reason = f"asked by {signal.Signals(number).name}"
        if os.isatty(2):  # whoever pressed Ctrl-C should know that it was heard; never where a pipe could be full
            with contextlib.suppress(OSError):
                os.write(2, b"\nevenload: stopping after this step; once more ends it at once\n")

    def is_asked(self) -> bool:
        if self.asked_s is None and self.terms is not None:
            now_s = time.monotonic()
            if now_s - self._looked_s >= _LOOK_EVERY_S:
                self._looked_s = now_s
                if Path(self.terms.stop_file).exists():
                    self.asked_s = now_s
                    self.reason = stop_text(self.terms.stop_file)
        return self.asked_s is not None

    def report(
        self,
        step: int,
        total: int | None,
        samples_per_s: float = 0.0,
        *,
        samples_per_step: float | None = None,
        state: str = "running",
    ) -> None:
        terms = self.terms
        if terms is None:
            return
        now_s = time.monotonic()
        if state == "running":
            self.speed.count(step, now_s)
            if now_s - self._reported_s < terms.report_every_s:
                return
        self._reported_s = now_s
        steps_per_s = self.speed.steps_per_s()
        if samples_per_step is not None:
            samples_per_s = steps_per_s * samples_per_step
        told = Report(
            terms.job, terms.attempt, os.getpid(), step, total, steps_per_s, samples_per_s, state, time_s=time.time()
        )
        try:
            write_report(terms, told)
        except OSError as error:
            self.tell_once("report", f"the queue can't be told how far this is: {terms.report_file}: {error}")

    def tell_once(self, topic: str, text: str) -> None:
        if topic not in self._told:
            self._told.add(topic)
            _say(text)


class _Speed:
    """Steps a second over the last minute, the first step of a sitting (compilation, caches) left out."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def count(self, step: int, now_s: float) -> None:
        if self._marks and step < self._marks[-1][1]:  # another loop
            self._marks.clear()
        if len(self._marks) < 2 or now_s - self._marks[-2][0] >= 1.0:
            self._marks.append((now_s, step))
        else:  # a mark a second is enough, and bounds their number
            self._marks[-1] = (now_s, step)
        while len(self._marks) > 2 and now_s - self._marks[1][0] > _SPEED_OVER_S:
            self._marks.popleft()

    def steps_per_s(self) -> float:
        if len(self._marks) < 2 or self._marks[-1][0] <= self._marks[0][0]:
            return 0.0
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        return (last - first) / (last_s - first_s)


_links: list[_Link] = []


def _link() -> _Link:
    """This process's link, opened when first asked for; a forked child has its own, with nothing asked of it."""
    if not _links:
        named = os.environ.get(VARIABLE)
        _links.append(_Link(None if named is None else read_terms(named)))
    return _links[0]


def _in_forked_child() -> None:
    """A worker forked by the loop (a loader's) dies of SIGTERM as workers do, and outlives the terminal's Ctrl-C.

    With the handler of its parent it would only note the request that is to end it.
    """
    if not _links:
        return
    link = _links.pop()
    if link.num_listening == 0 or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Its parent needs it to finish the step. A function, as SIG_IGN would be passed on to programs it starts.
        signal.signal(signal.SIGINT, _pass_over)


def _pass_over(number: int, frame: FrameType | None) -> None:
    """Does nothing."""


os.register_at_fork(after_in_child=_in_forked_child)


def _check_steps(total: Any, save: Any, start: Any, samples_per_step: Any) -> None:
    if total is not None and (not isinstance(total, int) or isinstance(total, bool) or total < 0):
        raise ConfigError(f"total={total!r}: expected a number of steps, or None for a loop without end")
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise ConfigError(f"start={start!r}: expected the number of steps done so far")
    if total is not None and start > total:
        raise ConfigError(f"start={start}, total={total}: more steps are done than there are; a state of another run?")
    if not callable(save):
        raise ConfigError(f"save={save!r}: expected a function that saves all that the program needs to go on")
    if samples_per_step is not None and not (
        isinstance(samples_per_step, int | float) and 0 < samples_per_step < math.inf
    ):
        raise ConfigError(f"samples_per_step={samples_per_step!r}: expected a number above 0")


def _saver(save: Callable[..., object]) -> Callable[[int], object]:
    """`save` as a function of the steps done. Looked at when the loop begins: at the stop it would be too late."""
    try:
        parameters = inspect.signature(save).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return lambda step: save()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        names = ", ".join(p.name for p in required)
        raise ConfigError(f"save requires the arguments {names}: expected none, or one for the number of steps done")
    return save if required else lambda step: save()


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody listens any more: no reason to end with another code
        print(f"evenload: {text}", file=sys.stderr, flush=True)
