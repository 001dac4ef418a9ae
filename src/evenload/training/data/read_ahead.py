"""`ReadAhead`: reads samples of later steps while one computes, and copies the first of them to the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from evenload.balance.values import StepPlan
from evenload.training.comm.clock import StepClock
from evenload.training.data.device_copies import start_copy
from evenload.training.data.global_batch import CopiedAhead, GlobalBatch, spans_of
from evenload.training.data.map_reader import MapReader
from evenload.training.data.places import BatchPlace
from evenload.training.data.prefetch import Span

Place = int | BatchPlace
"""Of a step: its index in the epoch, or under strategy local with steps by speed its place among the islands' rounds."""


class ReadAhead:
    """Of one epoch. `ranks` returns the ranks whose parts are read; `following` the places after one; `plan_of` a plan."""

    def __init__(
        self,
        reader: MapReader,
        clock: StepClock,
        device: torch.device,
        ranks: Callable[[], Sequence[int]],
        following: Callable[[Place], Iterator[Place]],
        plan_of: Callable[[Place, GlobalBatch], StepPlan],
    ) -> None:
        self._reader, self._clock, self._device = reader, clock, device
        self._get, self._switch = reader.span_reader, clock.switch
        self._ranks, self._following, self._plan_of = ranks, following, plan_of
        self.batch: GlobalBatch
        """The step in progress."""
        self.place: Place
        self.copied: CopiedAhead | None = None
        """The first samples of the next step, on the device."""

    def read(self, low: int, high: int) -> Any:
        before = self._switch("data")
        try:
            return self._get((low, high))
        finally:
            self._switch(before)

    def replan(self) -> None:
        """Have the reader's workers read what is left of the step in progress, and the next ones, by the present plans."""
        self.copied = None
        with self._clock.segment("data"):
            self._reader.read_ahead(functools.partial(self._wanted, self.batch, self.place))

    def copy_next(self) -> None:
        """Start to copy the first samples of the next step."""
        later = next(iter(self._following(self.place)), None)
        # Without workers the samples of a step are read in it, as the script expects: it may change the dataset before.
        if self.copied is not None or later is None or not self._reader.reading.num_workers:
            return
        for span in spans_of(self._plan_of(later, self.batch), self._ranks())[:1]:  # none where this rank is left out
            with contextlib.suppress(Exception):  # the next step reads again, and raises there
                data = self.read(*span)
                self.copied = CopiedAhead(span, data, start_copy(data, self._device))

    def _wanted(self, now: GlobalBatch, place: Place) -> Iterator[Span]:
        yield from now.unread_spans()
        for later in self._following(place):
            yield from spans_of(self._plan_of(later, now), self._ranks())
