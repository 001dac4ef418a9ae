"""One global batch: its plan, and this rank's samples of each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from evenload.balance.values import StepPlan
from evenload.errors import StepError
from evenload.training.data.batches import MicroBatch, move
from evenload.training.data.tuning import Reading


class GlobalBatch:
    """One global batch: its plan, and this rank's samples of each micro-batch."""

    def __init__(
        self,
        plan: StepPlan,
        *,
        ranks: Sequence[int],
        global_step: int,
        device: torch.device,
        read: Callable[[int, int], Any],
        recut: Callable[[], None],
        reading: Reading,
    ) -> None:
        """Made by the loader.

        Args:
            plan: who computes which sample.
            ranks: this rank; or all replicas of this process (strategy ``dp``).
            global_step: steps committed before this one.
            device: where micro-batches are moved.
            read: gives the collated samples at global positions ``[low, high)``.
            recut: tells the loader that the plan is another one now.
            reading: how this rank reads now.
        """
        self.plan = plan
        self.global_step = global_step
        self.reading = reading
        self._ranks = tuple(ranks)
        self._device = device
        self._read = read
        self._recut = recut
        self._held: dict[tuple[int, int], Any] = {}

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0."""
        return self.plan.epoch

    @property
    def epoch_step(self) -> int:
        """The step within its epoch, counted from 0."""
        return self.plan.step

    @property
    def num_samples(self) -> int:
        """Samples of the global batch."""
        return self.plan.num_samples

    def micro(self, micro_index: int, rank: int | None = None, device: torch.device | None = None) -> MicroBatch:
        """A rank's part of micro-batch `micro_index`, on its device; this rank's where none is named.

        Read once and kept (on the host) until the step is over, so every call gives the same samples, in containers of
        their own. A rank without samples gets one real sample of the slice, marked idle.
        """
        rank = self._ranks[0] if rank is None else rank
        low, high = read_span(self.plan, micro_index, rank)
        num_samples = self.plan.micro[micro_index][rank]
        if (low, high) not in self._held:
            self._held[low, high] = self._read(low, high)
        return MicroBatch(move(self._held[low, high], device or self._device), num_samples, idle=num_samples == 0)

    def read_all(self) -> None:
        """Reads all parts of this process now, so that threads only move them."""
        for low, high in self.wanted():
            self._held[low, high] = self._read(low, high)

    def replan(self, plan: StepPlan) -> None:
        """Cuts the same samples otherwise; what didn't change is kept, the rest is read again.

        Raises:
            StepError: the plan is for other samples.
        """
        if (plan.start, plan.num_samples) != (self.plan.start, self.plan.num_samples):
            raise StepError(
                f"a step that covers samples {self.plan.start} to {self.plan.start + self.plan.num_samples} can't be "
                f"planned anew for {plan.start} to {plan.start + plan.num_samples}"
            )
        self.plan = plan
        spans = set(self.spans())
        self._held = {span: data for span, data in self._held.items() if span in spans}
        self._recut()

    def whole(self, micro_index: int) -> Any:
        """The whole slice of micro-batch `micro_index`, all ranks' samples, collated, on this rank's device."""
        return self.read(*self.plan.slice_of(micro_index))

    def read(self, low: int, high: int) -> Any:
        """The samples at global positions ``[low, high)``, whosever they are, collated, on this rank's device."""
        return move(self._read(low, high), self._device)

    def spans(self) -> list[tuple[int, int]]:
        """The global positions ``[low, high)`` that this process reads, micro-batch by micro-batch."""
        return spans_of(self.plan, self._ranks)

    def wanted(self) -> list[tuple[int, int]]:
        """Those not read yet."""
        return [span for span in self.spans() if span not in self._held]


def spans_of(plan: StepPlan, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The positions that a process reads for its ranks; one that has several has no samples that stand for none."""
    if len(ranks) == 1:
        return [read_span(plan, micro_index, ranks[0]) for micro_index in range(plan.num_micro)]
    return [plan.slice_of(m, rank) for m in range(plan.num_micro) for rank in ranks if plan.micro[m][rank]]


def read_span(plan: StepPlan, micro_index: int, rank: int) -> tuple[int, int]:
    """The positions a rank reads for a micro-batch; where its share is 0, one sample that stands for none."""
    low, high = plan.slice_of(micro_index, rank)
    if low < high:
        return low, high
    first, end = plan.slice_of(micro_index)
    idle = first if first < end else plan.start  # more micro-batches than samples: this slice is empty
    return idle, idle + 1
