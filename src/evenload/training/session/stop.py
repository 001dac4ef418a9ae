"""Stop a training run on request: all ranks receive it in one step, save at its end and exit with code 75.

    request (a signal, the queue's stop file) -> the row of the next backward -> all ranks know -> the loop body ends
    -> checkpoint -> "stopped at step 412, ..." -> SystemExit(75) out of ``for step in loader``

The request travels in the row that each backward exchanges anyway (report.py). Signals are caught from `run.resume` on,
which registers the state to save; before that, and in scripts without it, they act as without Evenload. Progress is
reported to the queue at the same boundary.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from evenload.job import (
    EXIT_CODE,
    attempt,
    go_on_text,
    grace_left_s,
    listening,
    report,
    stop_reason,
    stop_requested,
    stopped_text,
)
from evenload.job.client import forget_speed
from evenload.training.comm.control import Operation
from evenload.training.launch import stop_status, worker
from evenload.training.launch.stop_status import StopStatus
from evenload.training.session.state import Saver
from evenload.training.session.step_costs import RecentSteps
from evenload.training.step.context import TrainingContext
from evenload.training.step.step import Step, StepListener

_LARGE_PART = 0.5
"""A save that takes a larger part of the grace than this is reported: the next one may not fit."""


_STRATEGIES_WITH_COSTS = ("ddp", "dp")
"""Under others a step is no global batch that all devices compute together and exchange once."""


class Stopper(StepListener):
    """Stops the run between two steps if that is requested, and reports progress to the queue."""

    def __init__(self, context: TrainingContext, saver: Saver) -> None:
        self._context = context
        self._saver = saver
        self._caught = contextlib.ExitStack()
        self._saves = False
        self._reported_why_not = False
        self._num_samples = 0
        self._membership = context.groups.membership.number
        # The other modes have no state to resume from.
        self._acts = context.spec.mode == "train" and not stop_status.is_interactive()
        self._reports = False
        """True if a queue wants to know of each step."""
        self._recent: RecentSteps | None = None
        if self._acts:
            stop_requested()  # a wrong variable of the queue is an error at init, not in the first step
            self._reports = attempt() is not None
            if self._reports and context.config.strategy in _STRATEGIES_WITH_COSTS:
                self._recent = RecentSteps()

    @property
    def _is_main(self) -> bool:
        return self._context.rank == 0 and not self._context.loop.left

    def listen(self) -> None:
        """Catch signals from now on; exit with code 75 if a stop was requested before the first step."""
        if not self._acts:
            return
        context = self._context
        numbers = _free_signals()
        if numbers:
            self._caught.enter_context(listening(numbers, stays=self._repeated(), is_end=self._end_if_ordered))
        self._saves = signal.SIGTERM in numbers
        if self._saves:
            stop_status.write(context.spec.launch_dir, context.spec.worker, StopStatus.CAN_SAVE)
        rows = context.control.exchange(Operation.RESUME, [float(stop_requested())])
        if any(row[0] for row in rows):
            self._leave(f"stopped before step {context.loop.steps_done + 1} ({_reason()}); {go_on_text(self._go_on())}")

    def begin(self) -> None:
        """Report at the first step of this session whether a stop saves anything."""
        if self._acts and not self._saves:
            stop_status.write(self._context.spec.launch_dir, self._context.spec.worker, StopStatus.CANNOT_SAVE)

    def close(self, well: bool) -> None:
        if self._acts and well and self._is_main and not self._context.loop.stopped:
            self._report("finished")
        is_leaving = worker.progress.exit_code == 0
        stop_status.write(
            self._context.spec.launch_dir,
            self._context.spec.worker,
            StopStatus.EXITING if is_leaving else StopStatus.CLOSED,
        )
        self._caught.close()
        if is_leaving and self._saves:  # the work is done: a request to stop comes too late
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    @property
    def rests(self) -> bool:
        return not self._context.loop.stop_requested

    def on_boundary(self, step: Step) -> None:
        """Report progress to the queue; save and end the script if a stop is requested."""
        if not self._acts:
            return
        loop = self._context.loop
        if (number := self._context.groups.membership.number) != self._membership:
            self._membership = number
            forget_speed()
        if self._reports and self._is_main:
            self._num_samples = step.num_samples
            if self._recent is not None:
                self._recent.add(step)
            self._report("running")
        if not loop.stop_requested:
            return
        if self._saver.resumed:
            self._stop()
        elif not self._reported_why_not:
            self._reported_why_not = True
            self._context.recorder.event(
                "not_stoppable",
                f"a stop was requested ({_reason()}), but there is no state to resume from: call run.resume(model=model, "
                "optimizer=optimizer, ...) before the loop to register it",
                step=loop.steps_done,
            )

    def poll(self) -> None:
        """End the script between two steps if a stop is requested: a rank of ``async`` may wait long for the next."""
        if self._acts and self._saver.resumed and stop_requested():
            self._context.loop.stop_requested = True
            self._stop()

    def _stop(self) -> None:
        left_s = grace_left_s()
        if left_s is not None and self._saver.took_s > left_s:
            self._record(
                f"the last checkpoint took {self._saver.took_s:.1f} s, and {left_s:.1f} s of the grace are left: this one may "
                "not finish before the queue kills the job, which would resume from the last one; give it a longer --grace"
            )
        took_s = self._saver.save()
        after_s = grace_left_s()
        if left_s is not None and after_s is not None and took_s > _LARGE_PART * left_s:
            self._record(
                f"the save took {took_s:.1f} s, with {after_s:.1f} s of the grace left: give the job a longer --grace"
            )
        self._leave(stopped_text(self._context.loop.steps_done, None, took_s, _reason(), self._go_on()))

    def _repeated(self) -> tuple[int, ...]:
        # These reach the rank from several sides; the launcher, not a second signal, ends it.
        if self._context.spec.launch_dir:
            return (signal.SIGTERM, signal.SIGINT)
        return (signal.SIGTERM,) if self._context.spec.origin in ("torchrun", "slurm") else ()

    def _end_if_ordered(self, number: int, frame: FrameType | None) -> None:
        if self._context.spec.launch_dir and stop_status.is_aborted(self._context.spec.launch_dir):
            worker.leave_on_signal(number, frame)

    def _leave(self, text: str) -> None:
        self._context.loop.stop()
        self._record(text, "stopped")
        if self._is_main:
            self._report("stopped")
        raise SystemExit(EXIT_CODE)

    def _record(self, text: str, kind: str = "stopping") -> None:
        self._context.recorder.event(kind, text, step=self._context.loop.steps_done)

    def _report(self, state: str) -> None:
        step, num_samples = self._context.loop.steps_done, self._num_samples
        growth = None if self._saver.adaptive_batch is None else self._saver.adaptive_batch.growth
        if growth is not None:
            # Steps of a grown batch are fewer and longer; counted as such the job would look slower.
            step, num_samples = growth.progress()
        recent = self._recent
        costs = None if recent is None else lambda: recent.costs(growth)
        report(step, None, samples_per_step=num_samples, state=state, costs=costs)

    def _go_on(self) -> str:
        spec = self._context.spec
        if spec.num_nodes > 1 and spec.origin == "evenload":
            return "start the same command again on all machines"
        if spec.origin in ("torchrun", "slurm", "group"):
            return "start it again as before"
        return f"start it again: {spec.command or shlex.join(sys.orig_argv)}"


def _reason() -> str:
    return stop_reason() or "requested on another rank"


def _free_signals() -> list[int]:
    """Return the signals that this thread may catch and the script does not handle itself."""
    if threading.current_thread() is not threading.main_thread():
        return []
    usual: tuple[Callable[..., Any] | signal.Handlers, ...] = (
        signal.SIG_DFL,
        signal.default_int_handler,
        worker.leave_on_signal,
    )
    return [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) in usual]
