"""`StepClock`: the times of a rank by what it spends them on.

A rank that waits inside a collective looks busy from outside, so waiting is measured separately.
On a CUDA device the boundaries are events on the current stream, read once per step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Segment = Literal["data", "compute", "wait", "comm", "optimizer", "compile", "other"]
SEGMENTS: tuple[Segment, ...] = ("data", "compute", "wait", "comm", "optimizer", "compile", "other")


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
        self.since_s: float = time.perf_counter()
        """Time at which the host began the running segment, or last called `take` in it."""
        self._event: torch.cuda.Event | None = self._record() if self._cuda else None

    @property
    def current(self) -> Segment:
        """The running segment; any thread may read it."""
        return self._current

    def switch(self, name: Segment) -> Segment:
        """End the running segment, begin ``name``, and return the one that ran."""
        before = self._current
        if self._cuda:
            event = self._record()
            if self._event is not None:
                self._spans.append((before, self._event, event))
            self._event = event
            self.since_s = time.perf_counter()
        else:
            now = time.perf_counter()
            self._seconds[before] += now - self.since_s
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

    def take(self) -> dict[Segment, float]:
        """Return the seconds of each segment since the last call; the running segment continues."""
        self.switch(self._current)
        if self._spans:
            self._spans[-1][2].synchronize()
            for name, start, end in self._spans:
                self._seconds[name] += start.elapsed_time(end) / 1e3
            self._spans.clear()
        taken = self._seconds
        self._seconds = dict.fromkeys(SEGMENTS, 0.0)
        return taken

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
