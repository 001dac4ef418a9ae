"""`StepClock`: the times of a rank by what it spends them on.

A rank that waits inside a collective looks busy from outside, so waiting is measured separately.
On a CUDA device the boundaries are events on the current stream, which nobody waits for: see `step/late_times.py`.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

Segment = Literal["data", "compute", "wait", "comm", "optimizer", "compile", "other"]
SEGMENTS: tuple[Segment, ...] = ("data", "compute", "wait", "comm", "optimizer", "compile", "other")


class ProcessorDelay:
    """Seconds in which the thread that made it was ready to run while others had the CPU; 0 where the kernel counts none."""

    def __init__(self) -> None:
        try:
            # Kept open: a step of a millisecond has no 10 us for opening it.
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1
        else:
            weakref.finalize(self, os.close, self._file)
        self._last_ns = 0
        self.take_s()

    def take_s(self) -> float:
        """Return the seconds since the last call."""
        before_ns = self._last_ns
        self._last_ns = int(os.pread(self._file, 64, 0).split()[1]) if self._file >= 0 else 0
        return (self._last_ns - before_ns) / 1e9


class UnreadTimes:
    """Seconds of each segment, which a GPU may still be taking."""

    def __init__(
        self,
        seconds: dict[Segment, float],
        spans: Sequence[tuple[Segment, torch.cuda.Event, torch.cuda.Event]],
        other_s: float,
    ) -> None:
        self._seconds = seconds
        self._spans = list(spans)
        self.other_s = other_s
        """Seconds in ``other`` on the clock of the host, where nothing is unread."""

    def add(self, later: UnreadTimes) -> None:
        for name, seconds in later._seconds.items():
            self._seconds[name] += seconds
        self._spans += later._spans

    def read(self) -> dict[Segment, float]:
        """Return the seconds; wait for the last of them, if the GPU is not there yet."""
        seconds = dict(self._seconds)
        if self._spans:
            self._spans[-1][2].synchronize()
        for name, start, end in self._spans:
            seconds[name] += start.elapsed_time(end) / 1e3
        return seconds


class StepClock:
    """Sums the seconds of each segment; segments nest, and an inner one pauses the outer one.

    ``data`` waits for samples, ``compute`` is forward and backward, ``comm`` is collectives inside them (BatchNorm), ``wait``
    is the rest of the reduction after the own backward, ``optimizer`` is the user's frame between two steps (clipping,
    optimizer, scheduler), ``compile`` is a first step that compiles, ``other`` is everything outside a step (evaluation,
    checkpoints).
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._current: Segment = "other"
        self._seconds: dict[Segment, float] = dict.fromkeys(SEGMENTS, 0.0)
        self._spans: list[tuple[Segment, torch.cuda.Event, torch.cuda.Event]] = []
        self._other_s = 0.0
        self.since_s: float = time.perf_counter()
        """Time at which the host began the running segment, or last called `cut` or `take` in it."""
        self._event: torch.cuda.Event | None = self._record() if self._cuda else None
        self.reads, self.read_s, self.evaluates_since_s = False, 0.0, 0.0
        """True while ranks read a batch of an iterable dataset in turn; seconds of the last; since when `run.batches` reads."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note that the body reads a batch of an iterable dataset."""
        self.reads, began_s = True, time.perf_counter()
        try:
            yield
        finally:
            self.reads, self.read_s = False, time.perf_counter() - began_s

    def evaluating(self, batches: Generator[Any, None, None]) -> Iterator[Any]:
        """Yield the batches of an evaluation; note since when it waits for one."""
        self.evaluates_since_s = time.perf_counter()
        try:
            for batch in batches:
                self.evaluates_since_s = 0.0
                yield batch
                self.evaluates_since_s = time.perf_counter()
        finally:
            self.evaluates_since_s = 0.0
            batches.close()

    @property
    def current(self) -> Segment:
        """The running segment; any thread may read it."""
        return self._current

    def switch(self, name: Segment) -> Segment:
        """End the running segment, begin ``name``, and return the one that ran."""
        before, now = self._current, time.perf_counter()
        if self._cuda:
            event = self._record()
            if self._event is not None:
                self._spans.append((before, self._event, event))
            self._event = event
        else:
            self._seconds[before] += now - self.since_s
        if before == "other":
            self._other_s += now - self.since_s
        self.since_s = now
        self._current = name
        return before

    @contextmanager
    def segment(self, name: Segment) -> Iterator[None]:
        """Count the body as ``name``, then return to the segment before."""
        before = self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def cut(self) -> UnreadTimes:
        """Return the times since the last call, without waiting for any; the running segment continues."""
        self.switch(self._current)
        unread = UnreadTimes(self._seconds, self._spans, self._other_s)
        self._seconds, self._spans, self._other_s = dict.fromkeys(SEGMENTS, 0.0), [], 0.0
        return unread

    def take(self) -> dict[Segment, float]:
        """Return the seconds of each segment since the last call, and wait for them; the running segment continues."""
        if self._cuda:
            return self.cut().read()
        self.switch(self._current)
        taken, self._seconds, self._other_s = self._seconds, dict.fromkeys(SEGMENTS, 0.0), 0.0
        return taken

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
