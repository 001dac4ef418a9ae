"""Print errors that nobody catches where the script runs without our launcher."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, ParamSpec, TypeVar

from evenload.errors import EvenloadError, LaunchError
from evenload.training.launch import worker
from evenload.training.launch.environment import WORKER_VARIABLE, WorkerSpec, detect
from evenload.training.launch.failure import passes_through_package
from evenload.training.launch.hints import hint_for
from evenload.training.launch.print_once import is_printed_elsewhere

_exit = sys.exit
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def reports_uncaught(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make errors of a call that joins the job, such as a misspelled setting, be reported as later ones are."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except EvenloadError:
            report_uncaught_at_start()
            raise

    return call


def report_uncaught_at_start() -> None:
    """Do as `report_uncaught` where the script runs without our launcher and has not joined the job yet."""
    if WORKER_VARIABLE not in os.environ:
        spec = WorkerSpec()
        with suppress(LaunchError):
            spec = detect()
        report_uncaught(spec.world_size, spec.rank)


def report_uncaught(world_size: int, rank: int) -> None:
    """Print errors that nobody catches where the script runs without our launcher: those of Evenload with the message first.

    An error that all ranks raise alike is printed once, and so is a text with which they call `sys.exit`.
    """
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        failure = worker.describe_uncaught(error, rank, 1)
        # Frames of Evenload would hide the user's line, where an error of the script passed through them.
        is_ours = isinstance(error, EvenloadError) or bool(hint_for(error)) or passes_through_package(trace)
        is_elsewhere = None
        if world_size > 1 and isinstance(error, Exception):
            is_elsewhere = is_printed_elsewhere(f"{failure.kind}: {failure.message}")
        if is_elsewhere:
            return
        if not is_ours:
            before(kind, error, trace)
            return
        text = failure.sentence(f"rank {rank}" if world_size > 1 else "the script")
        # All ranks usually fail alike: the first of them, or rank 0, shows the traceback.
        whole = rank == 0 or (is_elsewhere is False and not failure.consequence)
        print(f"evenload: {text if whole else text.splitlines()[0]}", file=sys.stderr, flush=True)

    def leave(code: Any = None, /) -> NoReturn:
        is_text = code is not None and not isinstance(code, int)
        _exit(1 if is_text and is_printed_elsewhere(str(code)) else code)

    if before is sys.__excepthook__:
        sys.excepthook = report
        if world_size > 1:
            sys.exit = leave
