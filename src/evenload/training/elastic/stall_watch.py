"""`StallWatch`: a thread that reports once a second what this rank does, and how long it waits for others."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import FrameType

from evenload.training.elastic import own_wait
from evenload.training.elastic.own_wait import OwnWait
from evenload.training.launch.failure import is_users_file
from evenload.training.launch.membership_messages import Activity, Message, Waits
from evenload.training.launch.stalls import WORKS
from evenload.training.step.context import TrainingContext
from evenload.training.step.step import Step, StepListener

_EVERY_S, _LONGEST_GAP_S = 0.5, 2.0
_LEAST_DEADLINE_S = 4.5
_FIRST_DEADLINE_S = 60.0
_NUM_KNOWN = 8
"""Steps after which the deadline is learned from them."""
_NUM_KEPT = 500
_STANDARD_LIBRARY = str(Path(os.__file__).parent)
_FIRST_ON_GPU_S = 300.0
"""A GPU that hangs keeps a core busy, as one that computes its first steps does; it is left out after so long."""
_WORKED_S = 5.0
"""A process that computes uses at least `WORKS` of a core within so many seconds."""
_COMPILES = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/compile_fx.py",
    "torch/utils/cpp_extension.py",
    "triton/compiler/compiler.py",
)
_SAVES = "evenload/training/checkpoint/"
_STREAM = "evenload/training/data/stream.py"


class StepDeadline:
    """The seconds after which a wait in a step is longer than the steps so far explain."""

    def __init__(self, timeout_s: float = math.inf) -> None:
        """`timeout_s`: limit of a wait, before which a stall is to be found if it is above 4.5 s."""
        self._steps_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num_steps = 0  # also those that are no longer kept
        self.seconds = min(_FIRST_DEADLINE_S, max(_LEAST_DEADLINE_S, timeout_s / 2))

    @property
    def is_known(self) -> bool:
        return self._num_steps >= _NUM_KNOWN

    def add(self, step_s: float) -> None:
        """Add a usual step of this rank, waiting included.

        The deadline is the largest of 4.5 s, 5 medians + 6 MAD (median absolute deviation), and twice the longest step.
        """
        self._steps_s.append(step_s)
        self._num_steps = count = self._num_steps + 1
        if count < _NUM_KNOWN or (count & (count - 1) and count % 50):  # sorting takes long: now and then suffices
            longest_s = 2 * step_s if count >= _NUM_KNOWN else 0.0
            self.seconds = max(self.seconds, longest_s)
            return
        middle_s = median(self._steps_s)
        mad_s = median(abs(one - middle_s) for one in self._steps_s)
        self.seconds = max(_LEAST_DEADLINE_S, 5 * middle_s + 6 * mad_s, 2 * max(self._steps_s))


class StallWatch(StepListener):
    def __init__(self, context: TrainingContext, send: Callable[[Message], None]) -> None:
        self._context = context
        self._send = send
        self._main = threading.main_thread().ident or 0
        self._own_wait = OwnWait(context)
        self._deadline = StepDeadline(context.groups.limits.timeout_s)
        self._used_s = self._looked_s = self._worked_s = 0.0
        self._starts = True
        """The first step of a loop runs, in which loaders start."""
        self._stops: deque[tuple[float, float]] = deque(maxlen=16)  # the last times without a look
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenload-stalls", daemon=True)

    @property
    def rests(self) -> bool:
        return self._thread.is_alive() and not self._starts

    def start(self) -> None:
        self._thread.start()

    def on_trained(self, step: Step) -> None:
        read_s = 0.0 if self._starts else self._context.clock.read_s
        self._starts = False
        if step.stats.is_usual:
            self._deadline.add(time.perf_counter() - step.stats.begun_s + read_s)

    def on_loop_end(self) -> None:
        self._starts = True

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        worker, clock, limits = self._context.spec.worker, self._context.clock, self._context.groups.limits
        is_second, before_s = False, time.monotonic()
        while not self._closed.wait(_EVERY_S):
            if (now_s := time.monotonic()) - before_s > _LONGEST_GAP_S:
                self._stops.append((before_s, now_s))
                self._own_wait = OwnWait(self._context)
            before_s, frame = now_s, sys._current_frames().get(self._main)
            idle_s, excuse, position = self._own_wait.seconds(frame), find_excuse(frame), find_position(frame)
            del frame  # it keeps what a function had that has returned, such as a loop that was left
            segment, seconds, works = clock.current, self._seconds_since(clock.since_s), self._works()
            limit_s = math.inf if self._context.device.type == "cpu" else _FIRST_ON_GPU_S
            if segment == "compute" and works and seconds < limit_s and not self._deadline.is_known:
                excuse = excuse or "it computes its first steps"
            if (since_s := self._context.control.waits_since_s) and segment not in ("wait", "comm"):
                segment, seconds = "wait", self._seconds_since(since_s)
            elif since_s := clock.evaluates_since_s:
                segment, seconds = "data", self._seconds_since(since_s)
            waits = self._context.loop.in_backward or clock.reads
            if waits and segment in ("wait", "comm") and seconds > self._deadline.seconds:
                self._send(Waits(worker, seconds, limit_s=limits.timeout_s))
            elif idle_s > _LEAST_DEADLINE_S:
                self._send(Waits(worker, idle_s, in_step=False, limit_s=limits.timeout_s))
            is_second = not is_second
            if is_second:
                excuse = "its loader starts" if self._starts and seconds < _FIRST_DEADLINE_S else excuse
                stuck_s = idle_s if limits.is_watched and idle_s >= own_wait.STUCK_S else 0.0
                self._send(Activity(worker, segment, seconds, position, excuse, stuck_s))

    def _seconds_since(self, since_s: float) -> float:
        """Return for how long something lasts, without the time in which this process was stopped."""
        stopped_s = sum(max(end_s - max(begin_s, since_s), 0.0) for begin_s, end_s in self._stops)
        return time.perf_counter() - since_s - stopped_s

    def _works(self) -> bool:
        """Return whether this process has computed lately."""
        used_s, now_s = time.process_time(), time.monotonic()
        if used_s - self._used_s >= WORKS * (now_s - self._looked_s):
            self._worked_s = now_s
        self._used_s, self._looked_s = used_s, now_s
        return now_s - self._worked_s < _WORKED_S


def find_position(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code, such as ``train.py:31 in __getitem__``; empty if there is none."""
    while frame is not None:
        code = frame.f_code
        if is_users_file(code.co_filename) and not code.co_filename.startswith(_STANDARD_LIBRARY):
            return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def find_excuse(frame: FrameType | None) -> str:
    """Return why a thread may take as long as it wants; empty if it may not."""
    while frame is not None:
        name = frame.f_code.co_filename.replace(os.sep, "/")
        if any(part in name for part in _COMPILES):
            return "it compiles"
        if _SAVES in name:
            return "it writes a checkpoint"
        if name.endswith(_STREAM) and frame.f_code.co_name == "begin":
            return "it reads its stream up to this step"
        frame = frame.f_back
    return ""
