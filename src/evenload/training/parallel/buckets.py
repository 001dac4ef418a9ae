"""Buckets of gradients: neighbouring parameters whose gradients lie in one tensor, and are reduced together.

Layout of a bucket: small slots, large slots, one value for the norm; every slot begins at a multiple of `ALIGNMENT_BYTES`,
so that kernels can load 16 bytes at once. The small slots are side by side, because their gradients accumulate in place and
one call sets them to zero.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from evenload.balance.exchange_times import BucketSizes
from evenload.training.compute.model_parameters import sum_scalars
from evenload.training.parallel.model_split.buckets import BucketSegments

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
ALIGNMENT_BYTES = 64
SMALL_BYTES = 16 << 10
"""Gradients up to this size accumulate in place: a call from Python for each would cost more than the addition to zero."""


class PendingSum(Protocol):
    """A sum in progress."""

    def wait(self) -> None:
        """Return when subsequent computation sees the sum."""


class BucketSummer(Protocol):
    """Sums a bucket: over the process groups of ranks (`Groups`), or over the replicas of one process (bucket_sums.py)."""

    def sum_async(self, tensor: torch.Tensor, /) -> PendingSum:
        """Begin a sum, in place."""


class Slot:
    """A trainable parameter; `index` counts them in order of registration, whatever the order of buckets."""

    __slots__ = ("index", "is_small", "model_index", "name", "param")

    def __init__(self, index: int, model_index: int, name: str, param: nn.Parameter) -> None:
        self.index = index
        self.model_index = model_index
        self.name = name
        self.param = param
        self.is_small = param.numel() * param.element_size() <= SMALL_BYTES


class BucketMemory:
    """The tensor behind a bucket, and a view of it for each slot."""

    def __init__(self, slots: Sequence[Slot], *, pins: bool) -> None:
        first = slots[0].param
        step = max(1, ALIGNMENT_BYTES // first.element_size())
        sizes = [math.ceil(slot.param.numel() / step) * step for slot in slots]
        offsets = list(itertools.accumulate(sizes, initial=0))
        num_small = sum(size for size, slot in zip(sizes, slots, strict=True) if slot.is_small)
        self.flat = torch.zeros(offsets[-1] + 1, dtype=first.dtype, device=first.device, pin_memory=pins)
        self.gradients = real(self.flat[:-1])
        self.norm = real(self.flat[-1:])[0]
        self.small = self.flat[:num_small]
        self.views = [_view(self.flat, slot.param, offset) for slot, offset in zip(slots, offsets[:-1], strict=True)]
        self._storage = self.flat.untyped_storage()
        self._own_references = self._count_references()

    @property
    def is_referenced(self) -> bool:
        """True if somebody else holds a gradient: the tensor, or another view of its memory. No `.grad` may be set."""
        return self._count_references() != self._own_references

    def is_free(self, numbers: Sequence[int]) -> bool:
        """Return whether nobody else holds these views (by number), of which no `.grad` is set, or any other of its memory."""
        own, num_tensors = self._own_references
        found = sum(map(sys.getrefcount, map(self.views.__getitem__, numbers)))
        return self._count_references()[1] == num_tensors and found * len(self.views) == own * len(numbers)

    def _count_references(self) -> tuple[int, int]:
        # The first number counts variables of Python, the second all tensors on this memory, such as `p.grad.detach()`.
        return sum(map(sys.getrefcount, self.views)), torch._C._storage_Use_Count(self._storage._cdata)


class Bucket:
    """Neighbouring parameters of one model, dtype and device (on all ranks), reduced together."""

    def __init__(self, slots: Sequence[Slot], *, pins: bool = False) -> None:
        self.slots = list(slots)
        """In the order in which their gradients arrive."""
        self.laid_out = sorted(slots, key=lambda slot: not slot.is_small)
        """In the order of `memory.views`."""
        self.ids = frozenset(id(slot.param) for slot in slots)
        self.params = [slot.param for slot in self.laid_out]
        self.small = [slot.param for slot in self.laid_out if slot.is_small]
        self.small_ids = frozenset(map(id, self.small))
        self.memory = BucketMemory(self.laid_out, pins=pins)
        self._pins = pins
        self._spare: BucketMemory | None = None
        self._zero_version = -1
        # What follows belongs to one call.
        self.expected: frozenset[int] = frozenset()
        """Parameters whose gradients the bucket waits for; none if it leaves at the end."""
        self.pending: PendingSum | None = None
        self.num_before = 0
        """Gradients that had arrived when it left."""
        self.version_before = self.version_at_launch = 0
        """Of its memory before the last micro-batch's backward, and when it left."""
        self.is_claimed = False
        """True if its memory may be written in this call."""
        self.was_zero = False
        """True if gradients of it were present, and zero, before this call."""
        self.last_version = -1
        """Of its memory when its newest sum was ready; another one shows that the gradients were written since."""

    flat: torch.Tensor = property(operator.attrgetter("memory.flat"))  # type: ignore[assignment]

    def claim(self) -> None:
        """Make sure that no gradient that the user holds is overwritten; no `.grad` may be set to a view."""
        self.is_claimed = True
        if self.memory.is_referenced:
            self.renew()

    def renew(self) -> None:
        """Take other memory, which holds zeros."""
        held, other, self._zero_version = self.memory, self._spare, -1
        if other is None or other.is_referenced:
            other = BucketMemory(self.laid_out, pins=self._pins)
        else:
            other.flat.zero_()
        self.memory, self._spare = other, held
        self.version_before = other.flat._version

    def holds(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Return whether the gradients that are present lie in the memory, in the order of its views; set the rest to 0."""
        views = self.memory.views
        absent = [number for number, grad in enumerate(grads) if grad is None]
        if len(absent) == len(views) or any(g is not None and g is not v for v, g in zip(views, grads, strict=True)):
            return False
        if absent:
            if not self.memory.is_free(absent):
                return False
            torch._foreach_zero_([views[number] for number in absent])
        return True

    def forget(self) -> None:
        """Take new memory, since a sum that nobody waits for may still write to the present one."""
        self.memory, self._spare, self._zero_version = BucketMemory(self.laid_out, pins=self._pins), None, -1

    def is_zero(self) -> bool:
        """Return whether the memory holds zeros only; reads it once for each change."""
        if self._zero_version != self.flat._version and not bool(self.memory.gradients.count_nonzero()):
            self._zero_version = self.flat._version
        return self._zero_version == self.flat._version

    def is_still_zero(self) -> bool:
        """Return whether what gradients accumulate in holds zeros only, before the first backward of a call."""
        return self.is_zero() if self.was_zero else not bool(self.memory.small.count_nonzero())

    def write_norm(self, order: float = 2) -> None:
        """Put the norm of the gradients behind them: summed over ranks, it bounds every value of the sum."""
        torch.linalg.vector_norm(self.memory.gradients, order, out=self.memory.norm)


@dataclass(frozen=True)
class LaunchPlan:
    """The order in which buckets leave during the backward, for one expectation."""

    queue: tuple[tuple[Bucket, frozenset[int]], ...]
    """Buckets in the order in which they leave, with the parameters that each waits for."""
    used: tuple[Bucket, ...]
    """All buckets with a parameter that is expected."""
    last_ids: frozenset[int]
    """The parameter of each bucket in the queue that comes last."""


def plan_launches(buckets: Sequence[Bucket], expected: Sequence[int]) -> LaunchPlan:
    """Return when buckets leave, given the number of arrivals of each slot that is expected; see reducer.py."""
    queue, used, last_ids = [], [], set()
    for bucket in buckets:
        counts = [expected[slot.index] for slot in bucket.slots]
        if any(counts):
            used.append(bucket)
        if max(counts) == 1:
            awaited = [id(slot.param) for slot, count in zip(bucket.slots, counts, strict=True) if count]
            queue.append((bucket, frozenset(awaited)))
            last_ids.add(awaited[-1])
    return LaunchPlan(tuple(queue), tuple(used), frozenset(last_ids))


def build_buckets(
    slots: Iterable[Slot], segments: BucketSegments, *, pins: bool, sizes: BucketSizes | None = None
) -> list[Bucket]:
    """Cut slots, in the order in which their gradients arrive, into buckets; each model begins with a small one.

    `sizes`: those measured for a link; None: those for a fast one.
    """
    sizes = sizes or BucketSizes(FIRST_BUCKET_BYTES, BUCKET_BYTES)
    groups: dict[tuple[int, torch.dtype, torch.device, int], list[Slot]] = {}
    for slot in slots:
        param = slot.param
        groups.setdefault((slot.model_index, param.dtype, param.device, segments.of(param)), []).append(slot)
    buckets = []
    for members in groups.values():
        limit, part, size = sizes.first_bytes, list[Slot](), 0
        for slot in members:
            part.append(slot)
            size += slot.param.numel() * slot.param.element_size()
            if size >= limit:
                buckets.append(Bucket(part, pins=pins))
                limit, part, size = sizes.other_bytes, [], 0
        if part:
            buckets.append(Bucket(part, pins=pins))
    return buckets


def has_gaps(buckets: Iterable[Bucket], arrived: Sequence[torch.Tensor]) -> bool:
    """Return whether a small gradient may be 0 only because a Function gave None, after the last micro-batch's backward.

    Each gradient of the parameters that `arrived` has changed the memory of its bucket once, unless it was None.
    """
    missing = len(arrived)
    for bucket in buckets:
        now = bucket.flat._version if bucket.pending is None else bucket.version_at_launch
        missing -= now - bucket.version_before
    if missing <= 0:
        return False
    ids = set(map(id, arrived))
    return any(
        id(param) in ids and not bool(view.any())
        for bucket in buckets
        for param, view in zip(bucket.small, bucket.memory.views, strict=False)
    )


def are_finite(buckets: Sequence[Bucket]) -> bool:
    """Return whether all values of these sums are finite."""
    norms = [bucket.memory.norm for bucket in buckets]
    if not norms or math.isfinite(float(norms[0] if len(norms) == 1 else sum_scalars(norms))):
        return True
    # The norms of large but finite gradients may overflow.
    return all_finite(bucket.memory.gradients for bucket in buckets)


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(real(tensor)).all()) for tensor in tensors)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as real numbers, in which a NaN of an imaginary part shows."""
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor


def _view(flat: torch.Tensor, param: nn.Parameter, offset: int) -> torch.Tensor:
    part = flat[offset : offset + param.numel()]
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(param.dim())
    if layout is not None and not param.is_contiguous() and param.is_contiguous(memory_format=layout):
        return part.as_strided(param.size(), param.stride())
    return part.view(param.size())
