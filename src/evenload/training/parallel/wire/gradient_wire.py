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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from evenload.balance.wire_bytes import GradientSize, sent_bytes
from evenload.training.comm.groups import Groups
from evenload.training.comm.link import LinkMeter
from evenload.training.comm.pending import Pending
from evenload.training.comm.wire_groups import WireGroups
from evenload.training.parallel.buckets import Bucket, PendingSum, Slot, real
from evenload.training.parallel.wire.bucket_sum import BucketSum, Matrix, Steps, WireFormat
from evenload.training.parallel.wire.formats import open_format, wide_dtype
from evenload.training.parallel.wire.observation import CHOICES, NUM_CALLS, GradientObservation
from evenload.training.parallel.wire.pipeline import Pipeline
from evenload.training.parallel.wire.powersgd import PowerSGD


class GradientWire:
    def __init__(
        self,
        name: str,
        groups: Groups,
        seed: int,
        announce: Callable[..., None] = lambda *_, **__: None,
        link: LinkMeter | None = None,
    ) -> None:
        """Args:
        name: a value of the setting ``wire`` other than ``fp32``.
        groups: with `Generation.wire`.
        seed: of what ``powersgd`` starts with.
        announce: records an event: kind, sentence, fields.
        link: what ``auto`` predicts times from.
        """
        self.name = name
        self.format: WireFormat | None = open_format(name, seed)
        self._announce = announce
        self._link, self._seed = link, seed
        self._observation: GradientObservation | None = None
        """While ``auto`` has not chosen."""
        self._measures = False
        """True until the first commit of a generation, on all ranks alike."""
        self._groups = groups
        self._pipeline: Pipeline | None = None
        self._built_for = -1
        self._buckets: Sequence[Bucket] = ()
        self._errors: dict[Bucket, torch.Tensor] = {}
        """Of the final gradient, like the values of a `BucketSum`."""
        self._started: list[SumInProgress] = []
        self._observed: list[Bucket] = []
        """Both of this call."""
        self._scale = 1.0
        self.difference: float | None = None
        """About ‖Δg‖/‖g‖ of the first call."""

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

    def begin(self, scale: float, shares: Sequence[int] = (), num_micro: int = 1) -> None:
        """Begin a call; `scale` is the loss scale, `shares` are the samples of each rank."""
        self._started, self._observed, self._scale = [], [], scale
        number = self._groups.generation.number
        if self._built_for != number:
            if self._pipeline is not None:
                self._pipeline.close()
            self._pipeline, self._built_for = Pipeline(self._groups.begin), number
            self._measures = True
            if self.name == "auto" and self._groups.gradients is not None:
                self._agree_on_format(None if self.format is None else self.format.name)
                self._observation = GradientObservation() if self.format is None else None
            self._agree_on_starts()
        if self._observation is not None:
            self._observation.begin(shares, num_micro)

    def sum_async(self, bucket: Bucket) -> PendingSum:
        """Begin the sum of a bucket, in place. All ranks begin sums, and wait for them, in the same order."""
        wire = self._groups.generation.wire
        if self._observation is not None:
            self._observation.look_at(bucket)
            self._observed.append(bucket)
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
        if self._measures and self._started:
            self._measures = False
            self._report(self._difference(factor))
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
        if self._observation is not None:
            self._observe(self._observation, factor)

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    def gather(self) -> dict[Bucket, torch.Tensor] | None:
        """Return the errors of all ranks on rank 0, none on the others; all ranks call it, and then `keep`.

        None before the first call of a generation: a rank that has joined has no buckets yet.
        """
        if self.format is None or self._groups.gradients is None or self._built_for != self._groups.generation.number:
            return None
        sums = {}
        for bucket in self._buckets:
            total = self._error(bucket).clone()  # a rank may be lost meanwhile, and the sum repeated
            self._groups.sum_async(total).wait()
            if self._groups.rank == 0:
                sums[bucket] = total
        return sums

    def keep(self, errors: dict[Bucket, torch.Tensor] | None) -> None:
        """Hold what `gather` returned, so that rank 0's `state_dict` has all errors."""
        if errors is not None:
            self._errors = errors

    def forget(self) -> None:
        """Drop the errors of this rank, which has missed a step: the others have used them."""
        self._errors, self._started = {}, []

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
        if self.name == "auto" and state["format"]:
            self.format, self._observation = open_format(state["format"], self._seed), None
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

    def _difference(self, factor: float) -> float:
        """Return about ‖Δg‖/‖g‖ of this call. All ranks that compute call it.

        The errors of the ranks are taken as independent: ‖Δg‖² = Σ_r ‖lost_r‖².
        """
        square, total = torch.zeros(1, dtype=torch.float64), 0.0
        for found in self._started:
            if found.job.lost is not None:
                square += _square(found.job.lost) * factor**2
            total += _square(found.bucket.memory.gradients)
        return math.sqrt(float(self._sum(square)) / total) if total else 0.0

    def _report(self, difference: float) -> None:
        wire = self._started[0].wire
        if self.difference is None and self.format is not None:
            self.difference = difference
            params = [slot.param for bucket in self._buckets for slot in bucket.slots]
            sent, exact = (sent_bytes(name, size_of(params), len(wire.leaders)) for name in (self.format.name, "fp32"))
            where = "machine" if len(wire.leaders) < len(self._groups.generation.computing) else "rank"
            self._announce(
                "wire",
                f"wire={self.format.name}: each {where} sends {sent / 1e6:.3g} MB a step instead of {exact / 1e6:.3g} MB. Not "
                f"exact: the gradient of this step differs from the exact one by {difference:.1e} (‖Δg‖/‖g‖); what it lacks is "
                "added to the next one",
                format=self.format.name,
                sent_bytes=sent,
                exact_bytes=exact,
                difference=difference,
            )

    def _observe(self, observation: GradientObservation, factor: float) -> None:
        """Add a call that counts to what ``auto`` knows, and choose when it knows enough."""
        square = sum(_square(bucket.memory.gradients) for bucket in self._observed) / factor**2
        size = size_of({slot.param: None for bucket in self._buckets for slot in bucket.slots})
        if observation.num_calls == NUM_CALLS - 1 and self._buckets:
            observation.rehearse(self._buckets[0].flat.device, size)
        sums = self._sum(observation.own)
        observation.add(sums, square)
        link = self._link.link if self._link is not None else None
        if observation.num_calls < NUM_CALLS or self._link is None or link is None:
            return
        chosen, why = observation.choose(size, link, self._link.num_senders)
        self._agree_on_format(chosen)
        self._observation = None
        taken = "fp32" if self.format is None else self.format.name
        self._announce("wire", f"wire=auto: {taken}: {why}", format=taken)

    def _agree_on_format(self, own: str | None) -> None:
        """Take the format of the first rank that computes: sums of floating-point numbers may differ between processors."""
        now = self._groups.generation
        number = CHOICES.index(own or "fp32") if now.rank == now.computing[0] else 0
        chosen = CHOICES[int(self._sum(torch.tensor([number], dtype=torch.float64)))]
        if chosen != (self.format.name if self.format is not None else "fp32"):
            self.format = open_format(chosen, self._seed)

    def _sum(self, numbers: torch.Tensor) -> torch.Tensor:
        device = self._buckets[0].flat.device if self._buckets else numbers.device
        summed = numbers.to(device)
        self._groups.sum_async(summed).wait()
        return summed.cpu()

    def _agree_on_starts(self) -> None:
        """Take the first machine's starts: one that was away, or is new, has others."""
        wire, own = self._groups.generation.wire, self.format
        if wire is None or not wire.leads or not isinstance(own, PowerSGD):
            return
        jobs = [SumInProgress(bucket, wire, self._groups.begin).job for bucket in self._buckets]
        own.starts = {one.name: own.start(one, job.values) for job in jobs for one in job.matrices}
        for start in own.starts.values():
            self._groups.wait(dist.broadcast(start, group_src=0, group=wire.stages[0], async_op=True), start.device)

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
        self.job = BucketSum(self.flat[:size], self.flat[size], _matrices(bucket))
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


def spans(bucket: Bucket) -> list[tuple[int, int]]:
    """Return the part ``[low, high)`` of each slot among the real values of a bucket."""
    per_value = 2 if bucket.flat.is_complex() else 1
    starts = [per_value * int(view.storage_offset()) for view in bucket.memory.views]
    return [(start, start + per_value * view.numel()) for start, view in zip(starts, bucket.memory.views, strict=True)]


def gradient_size(models: Sequence[nn.Module]) -> GradientSize:
    """Return the size of the gradients of all trainable parameters."""
    return size_of({p: None for model in models for p in model.parameters() if p.requires_grad})


def size_of(params: Collection[nn.Parameter]) -> GradientSize:
    matrices = tuple((p.shape[0], p.numel() // p.shape[0]) for p in params if p.dim() > 1 and p.numel())
    num_values = sum(p.numel() for p in params)
    num_bytes = sum(p.numel() * p.element_size() for p in params)
    return GradientSize(num_values, num_bytes // max(1, num_values), matrices)


def _square(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(real(tensor), dtype=torch.float64)) ** 2


def _matrices(bucket: Bucket) -> tuple[Matrix, ...]:
    if bucket.flat.is_complex():
        return ()
    parts = zip(bucket.laid_out, spans(bucket), strict=True)
    return tuple(
        Matrix(slot.name, low, *_shape(slot)) for slot, (low, high) in parts if slot.param.dim() > 1 and high > low
    )


def _shape(slot: Slot) -> tuple[int, int]:
    return slot.param.shape[0], slot.param.numel() // slot.param.shape[0]
