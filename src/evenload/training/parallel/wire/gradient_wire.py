"""`GradientWire`: sums the buckets of `BucketReducer` in another format between machines, with error feedback.

Note [Error feedback]
  What the format loses of a bucket is added to the same bucket of the next step, so over steps nothing is lost: the sum of the
  gradients that the optimizer got is the sum of the exact ones, minus the last errors. (Seide et al., Interspeech 2014;
  Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019.)

Note [Units of an error]
  A bucket holds sums of weight x gradient x loss scale / nominal N, and neither the scale nor N / nominal is the same in the
  next step. Errors are kept in units of the final gradient. With `correction`, the factor from a bucket to the final gradient,
  a bucket gets e · scale; that is e · scale · correction of the final gradient, and the rest of e is kept:

      e' = correction · lost + (1 - scale · correction) · e

  The errors of the ranks are a sum: shares may change, and it does not matter which rank holds what.

Note [Only steps that count]
  Errors change in `commit`, after all ranks know that the step is finite. An attempt that is repeated, and a step that is
  skipped, leave them as they were. So does a parameter that no rank touched: its part of the result is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenload.training.comm.groups import Groups
from evenload.training.comm.pending import Pending
from evenload.training.comm.wire_groups import WireGroups
from evenload.training.parallel.buckets import Bucket, PendingSum, Slot, real
from evenload.training.parallel.wire.bucket_sum import BucketSum, Matrix, Steps, WireFormat
from evenload.training.parallel.wire.formats import open_format
from evenload.training.parallel.wire.pipeline import Pipeline
from evenload.training.parallel.wire.powersgd import PowerSGD


class GradientWire:
    def __init__(self, name: str, groups: Groups, seed: int) -> None:
        """`name`: a value of the setting ``wire`` other than ``fp32``."""
        self.format: WireFormat | None = open_format(name, seed)
        self._groups = groups
        self._pipeline: Pipeline | None = None
        self._built_for = -1
        self._buckets: Sequence[Bucket] = ()
        self._errors: dict[Bucket, torch.Tensor] = {}
        """Of the final gradient, like the values of a `BucketSum`."""
        self._started: list[SumInProgress] = []
        """Of this call."""
        self._scale = 1.0
        self.is_lossy_step = False
        """True after a `commit` of a call whose gradients travelled in `format`."""

    def attach(self, buckets: Sequence[Bucket]) -> None:
        """Take the buckets in place of earlier ones; the errors follow their parameters."""
        kept = {
            id(slot.param): error[low:high]
            for bucket, error in self._errors.items()
            for slot, (low, high) in zip(bucket.laid_out, spans(bucket), strict=True)
        }
        self._buckets, self._errors, self._started = buckets, {}, []
        for bucket in buckets:
            for slot, (low, high) in zip(bucket.laid_out, spans(bucket), strict=True):
                part = kept.get(id(slot.param))
                if part is not None and len(part) == high - low:
                    self._error(bucket)[low:high] = part

    def begin(self, scale: float) -> None:
        """Begin a call; `scale` is the loss scale."""
        self._started, self._scale = [], scale
        number = self._groups.generation.number
        if self._built_for != number:
            if self._pipeline is not None:
                self._pipeline.close()
            self._pipeline, self._built_for = Pipeline(self._groups.begin), number
            self._agree_on_starts()

    def sum_async(self, bucket: Bucket) -> PendingSum:
        """Begin the sum of a bucket, in place. All ranks begin sums, and wait for them, in the same order."""
        wire = self._groups.generation.wire
        if self.format is None or wire is None or self._pipeline is None:
            return self._groups.sum_async(bucket.flat)
        found = SumInProgress(bucket, wire, self._groups.begin)
        self._started.append(found)
        if (error := self._errors.get(bucket)) is not None:
            found.job.values.add_(error.to(found.job.values.device), alpha=self._scale)
        steps = _steps(found, self.format)
        if wire.on_gpus:
            found.event = self._pipeline.start_on_gpu(steps, bucket.flat.device)
        else:
            found.pending = self._pipeline.start(steps)
        return found

    def commit(self, touched: Sequence[int], correction: torch.Tensor | float) -> None:
        """End a call whose gradients count; arguments as in `BucketReducer.finish`."""
        factor = correction if isinstance(correction, float) else float(correction)
        left = 1.0 - self._scale * factor
        self.is_lossy_step = bool(self._started)
        with torch.no_grad():
            for found in self._started:
                bucket, lost = found.bucket, found.job.lost
                parts = [
                    (low, high)
                    for slot, (low, high) in zip(bucket.laid_out, spans(bucket), strict=True)
                    if touched[slot.index]
                ]
                if (error := self._errors.get(bucket)) is not None:
                    for low, high in parts:
                        error[low:high].mul_(left)
                if lost is not None:
                    error = self._error(bucket)
                    for low, high in parts:
                        error[low:high].add_(lost[low:high].to(error.device), alpha=factor)
                if isinstance(self.format, PowerSGD):
                    self.format.starts.update(found.job.next_starts)
        self._started = []

    def relative_loss(self) -> float:
        """Return about ‖Δg‖/‖g‖ of the call that ends now, before `commit`. All ranks of the gradients call it.

        The errors of the ranks are taken as independent: ‖Δg‖² = Σ_r ‖lost_r‖².
        """
        squares = torch.zeros(1, dtype=torch.float64)
        total = 0.0
        for found in self._started:
            if found.job.lost is not None:
                squares += found.job.lost.cpu().double().square().sum()
            total += float(found.bucket.memory.gradients.double().square().sum())
        self._groups.sum_async(squares).wait()
        return math.sqrt(float(squares) / total) if total else 0.0

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Move the errors of all ranks to rank 0, so that its `state_dict` holds all. All ranks call it."""
        if self.format is None or self._groups.gradients is None:
            return
        for bucket in self._buckets:
            self._groups.sum_async(self._error(bucket)).wait()
        if self._groups.rank != 0:
            self._errors = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the errors that this rank holds, and what `powersgd` starts with, by parameter."""
        errors = {
            slot.name: error[low:high].clone()
            for bucket, error in self._errors.items()
            for slot, (low, high) in zip(bucket.laid_out, spans(bucket), strict=True)
        }
        starts = dict(self.format.starts) if isinstance(self.format, PowerSGD) else {}
        return {"format": self.format.name if self.format is not None else "", "errors": errors, "starts": starts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what rank 0's `state_dict` returned; the other ranks begin without errors. Another format keeps the errors."""
        self._errors, self._started = {}, []
        errors = state["errors"] if self._groups.rank == 0 and self.format is not None else {}
        for bucket in self._buckets:
            for slot, (low, high) in zip(bucket.laid_out, spans(bucket), strict=True):
                part = errors.get(slot.name)
                if part is not None and len(part) == high - low:
                    self._error(bucket)[low:high] = part
        if isinstance(self.format, PowerSGD):
            self.format.starts = dict(state["starts"])

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _error(self, bucket: Bucket) -> torch.Tensor:
        if bucket not in self._errors:
            self._errors[bucket] = torch.zeros_like(bucket.memory.gradients, dtype=wide_dtype(bucket))
        return self._errors[bucket]

    def _agree_on_starts(self) -> None:
        """Take the first machine's starts: one that was away, or is new, has others."""
        wire, own = self._groups.generation.wire, self.format
        if wire is None or not wire.leads or not isinstance(own, PowerSGD):
            return
        jobs = [SumInProgress(bucket, wire, self._groups.begin).job for bucket in self._buckets]
        own.starts = {one.name: own.start(one, job.values) for job in jobs for one in job.matrices}
        for start in own.starts.values():
            dist.broadcast(start, group_src=0, group=wire.stages[0])

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._built_for = -1


class SumInProgress:
    """A bucket's sum on this rank."""

    def __init__(self, bucket: Bucket, wire: WireGroups, begin: Callable[[dist.Work | None, bool], Pending]) -> None:
        self.bucket = bucket
        self.wire = wire
        self.pending: Pending | None = None
        self.event: torch.cuda.Event | None = None
        self._begin = begin
        self._target = real(bucket.flat)
        self.flat = self._target if wire.on_gpus else self._target.cpu()
        self.flat = self.flat.to(wide_dtype(bucket))
        size = bucket.memory.gradients.numel()
        self.job = BucketSum(bucket, self.flat[:size], self.flat[size], _matrices(bucket))
        self._is_done = False

    def wait(self) -> None:
        """Return when subsequent computation sees the sum."""
        if self._is_done:
            return
        if self.event is not None:
            self.event.wait()
            self.flat.record_stream(torch.cuda.current_stream(self.flat.device))
        if self.pending is not None:
            self.pending.wait()
        if self.wire.inner is not None:
            work = dist.broadcast(self.flat, group_src=0, group=self.wire.inner, async_op=True)
            self._begin(work, not self.wire.on_gpus).wait()
        if self.flat is not self._target:
            with torch.no_grad():
                self._target.copy_(self.flat)
        self._is_done = True


def _steps(found: SumInProgress, how: WireFormat) -> Steps:
    wire = found.wire
    if wire.inner is not None:
        work = dist.reduce(found.flat, group_dst=0, group=wire.inner, async_op=True)
        if work is not None:
            yield work
    if wire.leads:
        yield from how.sum(found.job, wire)


def wide_dtype(bucket: Bucket) -> torch.dtype:
    """Return the dtype in which a bucket is encoded and its errors are kept."""
    return torch.float64 if real(bucket.flat).dtype == torch.float64 else torch.float32


def spans(bucket: Bucket) -> list[tuple[int, int]]:
    """Return the part ``[low, high)`` of each slot among the real values of a bucket."""
    per_value = 2 if bucket.flat.is_complex() else 1
    return [
        (per_value * view.storage_offset(), per_value * (view.storage_offset() + view.numel()))
        for view in bucket.memory.views
    ]


def _matrices(bucket: Bucket) -> tuple[Matrix, ...]:
    if bucket.flat.is_complex():
        return ()
    parts = zip(bucket.laid_out, spans(bucket), strict=True)
    return tuple(
        Matrix(slot.name, low, *_shape(slot)) for slot, (low, high) in parts if slot.param.dim() > 1 and high > low
    )


def _shape(slot: Slot) -> tuple[int, int]:
    return slot.param.shape[0], slot.param.numel() // slot.param.shape[0]
