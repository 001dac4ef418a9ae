"""One global batch: its plan, and this rank's samples of each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from evenload.balance.values import StepPlan
from evenload.errors import StepError
from evenload.foreign_names import STEP_ELSEWHERE
from evenload.training.data.batches import MicroBatch, move, open_container
from evenload.training.data.device_copies import StartedCopy, finish_copy, start_copy
from evenload.training.data.reading import PartialRead
from evenload.training.data.tuning import ReadSettings
from evenload.wrong_calls import unknown_attribute

_VERSION = attrgetter("_version")


@dataclass(frozen=True)
class CopiedAhead:
    """A part of a step that was read, and its copy started, in the step before."""

    span: tuple[int, int]
    data: Any
    copy: StartedCopy


class GlobalBatch:
    """A step's batch, for Evenload's own use: the user's code receives its parts in loss_fn."""

    def __init__(
        self,
        plan: StepPlan,
        *,
        ranks: Sequence[int],
        global_step: int,
        device: torch.device,
        read: Callable[[int, int], Any],
        on_replan: Callable[[], None],
        reading: ReadSettings,
        first: CopiedAhead | None = None,
        copy_next: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        ranks: this rank, or all replicas of this process.
        read: returns the collated samples ``[low, high)``.
        on_replan: called after `replan`.
        reading: the settings of the loader's workers.
        first: copied in the step before; dropped if this plan has no such part.
        copy_next: see `GlobalBatch.copy_next`.
        """
        self.plan = plan
        self.global_step = global_step
        self.reading = reading
        self._ranks = tuple(ranks)
        self._device = device
        self._read = read
        self._recut = on_replan
        self._held: dict[tuple[int, int], Any] = {}
        self._versions: dict[tuple[int, int], list[int]] = {}  # of tensors when the user's code received them
        self._first: CopiedAhead | None = None
        self.copy_next = copy_next
        """Starts to copy the first micro-batch of the next step to a GPU; called when the last one of this step computes."""
        if first is not None and first.span in self.spans():
            self._first = first
            self._held[first.span] = first.data

    def following(self, plan: StepPlan, global_step: int) -> GlobalBatch:
        """Return the batch of the next step, which is read as this one by the same ranks."""
        later = object.__new__(GlobalBatch)
        later.__dict__.update(vars(self), plan=plan, global_step=global_step, _held={}, _versions={}, _first=None)
        return later

    def __getattr__(self, name: str) -> Any:
        raise unknown_attribute(self, name, {name: STEP_ELSEWHERE["batch"]})

    def __iter__(self) -> Iterator[Any]:
        return self.__getattr__("__iter__")  # type: ignore[no-any-return]

    def __getitem__(self, key: object) -> Any:
        return self.__getattr__("__getitem__")

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise StepError(STEP_ELSEWHERE["batch"])

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def epoch_step(self) -> int:
        return self.plan.step

    @property
    def num_steps(self) -> int:
        """Steps that the job makes with this batch: 1, unless islands take several batches of their own."""
        return self.plan.progress.step - self.plan.step

    @property
    def num_samples(self) -> int:
        return self.plan.num_samples

    def micro(self, micro_index: int, rank: int | None = None, device: torch.device | None = None) -> MicroBatch:
        """Return a rank's part of micro-batch `micro_index`, on its device; by default this rank's.

        Samples are kept on the host until the step ends, so every call returns the same, in new containers. They are read again
        if the user's code has changed a tensor in place, other than through ``.data`` or numpy. A rank without samples gets one
        real sample of the slice, marked idle.
        """
        rank = self._ranks[0] if rank is None else rank
        span = read_span(self.plan, micro_index, rank)
        num_samples, device, held = self.plan.micro[micro_index][rank], device or self._device, self._held
        if span not in held or (span in self._versions and self._versions[span] != _versions(held[span])):
            held[span] = self._read(*span)
        if device.type == "cpu":  # nothing is copied: the user's code receives these tensors, and may change them
            self._versions[span] = _versions(held[span])
            data = move(held[span], device)
        elif self._first is not None and (self._first.span, self._device) == (span, device):
            copy, self._first = self._first.copy, None  # once: the user's code may change the tensors
            data = finish_copy(copy, device)
        else:
            data = finish_copy(start_copy(held[span], device), device)
        idle = num_samples == 0
        if type(data) is PartialRead:
            data, num_samples = data.data, 0 if idle else data.num_samples
        return MicroBatch(data, num_samples, idle=idle)

    def read_all(self) -> None:
        for low, high in self.unread_spans():
            self._held[low, high] = self._read(low, high)

    def replan(self, plan: StepPlan, rank: int | None = None) -> None:
        """Split the same samples in another way (else StepError); keep unchanged parts, read the rest again.

        `rank` is this rank in a new generation.
        """
        if (plan.start, plan.num_samples) != (self.plan.start, self.plan.num_samples):
            raise StepError(
                f"a step over samples {self.plan.start} to {self.plan.start + self.plan.num_samples} can't be replanned "
                f"for samples {plan.start} to {plan.start + plan.num_samples}"
            )
        self.plan = plan
        if rank is not None and len(self._ranks) == 1:
            self._ranks = (rank,)
        self._first = None
        spans = set(self.spans())
        self._held = {span: data for span, data in self._held.items() if span in spans}
        self._recut()

    def whole(self, micro_index: int) -> Any:
        """Return all ranks' samples of micro-batch `micro_index`, collated, on this rank's device."""
        return self.read(*self.plan.slice_of(micro_index))

    def read(self, low: int, high: int) -> Any:
        """Return any samples at global positions ``[low, high)``, collated, on this rank's device."""
        data = move(self._read(low, high), self._device)
        return data.data if type(data) is PartialRead else data

    def spans(self) -> list[tuple[int, int]]:
        return spans_of(self.plan, self._ranks)

    def unread_spans(self) -> list[tuple[int, int]]:
        return [span for span in self.spans() if span not in self._held]


def spans_of(plan: StepPlan, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the positions that a process reads; one with several replicas reads no idle samples."""
    if len(ranks) == 1:
        if ranks[0] in plan.out:
            return []
        return [read_span(plan, micro_index, ranks[0]) for micro_index in range(plan.num_micro)]
    return [plan.slice_of(m, rank) for m in range(plan.num_micro) for rank in ranks if plan.micro[m][rank]]


def read_span(plan: StepPlan, micro_index: int, rank: int) -> tuple[int, int]:
    """Return the positions that a rank reads for a micro-batch; one idle sample where its share is 0."""
    if micro_index == rank == 0:
        low, high = plan.start, plan.start + plan.micro[0][0]
    else:
        low, high = plan.slice_of(micro_index, rank)
    if low < high:
        return low, high
    first, end = plan.slice_of(micro_index)
    idle = first if first < end else plan.start  # more micro-batches than samples: this slice is empty
    return idle, idle + 1


def _versions(data: Any) -> list[int]:
    """Return the versions of a batch's tensors: a change in place raises them."""
    is_plain = type(data) in (list, tuple) and set(map(type, data)) == {torch.Tensor}
    try:
        return list(map(_VERSION, data if is_plain else _tensors_of(data)))
    except RuntimeError:  # those of an inference have none
        return []


def _tensors_of(data: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, also those that objects of the script's own hold as attributes."""
    if isinstance(data, torch.Tensor):
        yield data
    elif (opened := open_container(data)) is not None:
        for part in opened.parts:
            yield from _tensors_of(part)
    else:
        yield from filter(torch.is_tensor, getattr(data, "__dict__", {}).values())
