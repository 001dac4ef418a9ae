"""Sum gradients over ranks in buckets, each as soon as it is complete, during the backward; see docs/decisions/own-reducer.md.

Note [Gradients are views]
  After the first micro-batch `.grad` of a parameter is a view into its bucket: nothing is copied back after the reduction,
  and the buckets replace the gradients instead of needing memory beside them.

Note [When a bucket is complete]
  The n-th call of `backward` in a step records which parameters receive a gradient, and how often, in the last micro-batch
  (re-entrant checkpointing accumulates several times). From the second step on a bucket leaves when that many have arrived,
  in one order on all ranks. If a gradient comes after its bucket left, all ranks see it in the exchange and repeat the
  attempt without expectations. If one does not come, its bucket leaves at the end.

Note [Idle passes]
  A rank without samples still runs forward and backward, so that collectives in the model match; its results are discarded,
  NaN included, and count as zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from evenload.errors import StepError
from evenload.training.compute.grad_norms import GradNorms
from evenload.training.parallel.model_split.buckets import BucketSegments

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20

PLAIN_BACKWARD = (
    "loss.backward() was called on a model that run.prepare returned: its gradient would be this rank's alone. Write "
    "instead:  loss = step.backward(loss_fn)  with a function loss_fn(batch) that returns the loss"
)

Expectation = tuple[int, ...]
"""Number of times each slot accumulates in the last micro-batch of a call."""


class PendingSum(Protocol):
    """A sum in progress."""

    def wait(self) -> None:
        """Return when subsequent computation sees the sum."""


class BucketSummer(Protocol):
    """Sums a bucket: over the process groups of ranks (`Groups`), or over the replicas of one process (bucket_sums.py)."""

    def sum_async(self, tensor: torch.Tensor, /) -> PendingSum:
        """Begin a sum, in place."""


class Slot:
    __slots__ = ("arrivals", "filled", "handle", "index", "name", "param", "skipped", "stash", "touched", "view")

    def __init__(self, index: int, name: str, param: nn.Parameter, view: torch.Tensor) -> None:
        self.index = index
        self.name = name
        self.param = param
        self.view = view
        self.arrivals = 0  # in the last micro-batch
        self.touched = False  # by any micro-batch of this call, idle or not
        self.filled = False  # the view holds this call's gradient
        self.skipped = False  # a call of this update was skipped, so all of it is
        self.stash: torch.Tensor | None = None  # the gradient from before this call
        self.handle: torch.utils.hooks.RemovableHandle | None = None


@dataclass
class Bucket:
    """Neighbouring parameters of one model, dtype and device (on all ranks), reduced together."""

    flat: torch.Tensor
    slots: list[Slot] = field(default_factory=list)
    missing: int = 0
    """Arrivals still expected in this call; meaningful only with an expectation."""
    pending: PendingSum | None = None


class BucketReducer:
    def __init__(
        self,
        models: Sequence[nn.Module],
        groups: BucketSummer,
        segments: BucketSegments | None = None,
        *,
        check: Callable[[], None] = lambda: None,
        pins: bool = False,
        strategy: str = "ddp",
        grad_norms: GradNorms | None = None,
    ) -> None:
        """Args:
        groups: sums the buckets.
        segments: which parameters may share a bucket.
        check: called at each gradient, in the thread that computed it.
        pins: buckets lie in pinned memory, to be copied to a GPU.
        strategy: its name in messages.
        grad_norms: receives what leaves and what returns, if norms are measured.
        """
        self._groups = groups
        self._segments = segments or BucketSegments()
        self._check = check
        self._pins = pins
        self._strategy = strategy
        self._grad_norms = grad_norms
        if grad_norms is not None:
            grad_norms.follow(self._held)
        self.slots: list[Slot] = []
        self.buckets: list[Bucket] = []
        self._bucket_of: list[Bucket] = []
        self._live = False
        self._running = False
        self._last = False
        self._idle = False
        self._expected: Expectation | None = None
        self._queue: list[Bucket] = []
        self._next = 0
        self.late = False
        self.has_run = False
        """True if a backward ran in this attempt."""
        seen: set[int] = set()
        for model_index, model in enumerate(models):
            prefix = f"{model_index}." if len(models) > 1 else ""
            named = [
                (prefix + name, p)
                for name, p in model.named_parameters()
                if p.requires_grad and not (id(p) in seen or seen.add(id(p)))  # type: ignore[func-returns-value]
            ]
            self._add_model(named)
        trained = [(slot.name, tuple(slot.param.shape), slot.param.dtype) for slot in self.slots]
        self._trained_key = zlib.crc32(repr(trained).encode()) % 2**20
        for slot in self.slots:
            slot.handle = slot.param.register_post_accumulate_grad_hook(self._hook(slot))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for slot in self.slots:
            if slot.handle is not None:
                slot.handle.remove()
                slot.handle = None

    # -- one call of step.backward ------------------------------------------------------------------------------------

    def begin(self, expected: Expectation | None) -> None:
        """Set aside gradients of earlier calls in this step, and expect new ones."""
        self._live, self._running, self.has_run = True, False, False
        self._last = self._idle = self.late = False
        self._expected = expected
        self._next = 0
        for slot in self.slots:
            slot.arrivals, slot.touched, slot.filled = 0, False, False
            grad = slot.param.grad
            if grad is not None:
                slot.stash = grad.clone() if grad is slot.view else grad
                slot.param.grad = None
            else:
                slot.stash = None
        for bucket in self.buckets:
            bucket.pending = None
            bucket.missing = sum(expected[slot.index] for slot in bucket.slots) if expected else 0
        self._queue = [bucket for bucket in self.buckets if bucket.missing] if expected else []

    def micro(self, *, last: bool, idle: bool) -> None:
        """Describe the micro-batch of the next backward."""
        self._running, self._last, self._idle, self.has_run = True, last, idle, True
        if idle:
            for slot in self.slots:
                slot.param.grad = None

    def end_micro(self) -> None:
        """End the backward of a micro-batch; later gradients come from elsewhere."""
        self._running = False

    def end_idle(self) -> None:
        """Discard the gradients of an idle micro-batch after its backward."""
        for slot in self.slots:
            slot.param.grad = slot.view if slot.filled else None
        if self._last and not self.late:
            self._launch_queue()

    def observed(self) -> Expectation:
        """Return the arrivals in the last micro-batch."""
        return tuple(slot.arrivals for slot in self.slots)

    def touched_key(self) -> float:
        """Return a checksum of the parameters that received a gradient and, above 32 bits, of all; exact in a float64."""
        return float(zlib.crc32(bytes([slot.touched for slot in self.slots])) + (self._trained_key << 32))

    def touched(self) -> list[int]:
        return [int(slot.touched) for slot in self.slots]

    def flush(self, touched: Sequence[int]) -> None:
        """Send all buckets that have not left yet; `touched` as in `finish`."""
        self._live = False
        self._launch_queue()
        for bucket in self.buckets:
            if bucket.pending is None and any(touched[slot.index] for slot in bucket.slots):
                self._launch(bucket)

    def finish(self, touched: Sequence[int], correction: float) -> bool:
        """Wait for all sums, multiply them by `correction`, put them into `.grad`, and return whether all are finite.

        `touched` holds 1 for each slot to which any rank gave a gradient; equal on all ranks.
        """
        self.flush(touched)
        sums = []
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.pending is None:
                    continue
                bucket.pending.wait()
                if correction != 1.0:
                    bucket.flat.mul_(correction)
                if self._grad_norms is not None:
                    self._grad_norms.summed(bucket.flat)
                sums.append(bucket.flat.sum().double().to(self.buckets[0].flat.device))
            for slot in self.slots:
                slot.param.grad = self._final(slot, bool(touched[slot.index]))
                slot.stash = None
        if not sums or bool(torch.isfinite(sum(sums, torch.zeros((), dtype=torch.float64, device=sums[0].device)))):
            return True
        # A large but finite gradient may overflow the sum: check each value.
        return all(bool(torch.isfinite(bucket.flat).all()) for bucket in self.buckets if bucket.pending is not None)

    def rollback(self) -> None:
        """End an attempt that all ranks will repeat: send what the others wait for, and restore earlier gradients."""
        self._live = False
        self._launch_queue()
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None
        for slot in self.slots:
            slot.param.grad = slot.stash
            slot.stash = None

    def abort(self) -> None:
        """End an attempt that failed on this rank: restore earlier gradients without waiting for other ranks."""
        if not self._live:
            return
        self._live = self._running = False
        for slot in self.slots:
            slot.param.grad = slot.stash
            slot.stash = None

    def release(self) -> None:
        """Remove all gradients after `flush`, when another reducer keeps the sums."""
        for slot in self.slots:
            slot.param.grad = slot.stash = None

    def clear(self, touched: Sequence[int]) -> None:
        """Remove the gradients of a call, so that an optimizer's step changes nothing.

        Another call of the same step would make half an update, so its parameters stay without gradient until `clear_skip`.
        """
        for slot in self.slots:
            if touched[slot.index]:
                slot.param.grad = None
                slot.skipped = True

    def clear_skip(self) -> None:
        """Let gradients count again: an optimizer has stepped, or a new step began."""
        for slot in self.slots:
            slot.skipped = False

    def leftovers(self) -> list[str]:
        return [
            slot.name for slot in self.slots if slot.param.grad is not None and bool(slot.param.grad.count_nonzero())
        ]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _add_model(self, named: list[tuple[str, nn.Parameter]]) -> None:
        # The reverse order of registration is near the order in which gradients arrive.
        groups: dict[tuple[torch.dtype, torch.device, int], list[tuple[str, nn.Parameter]]] = {}
        for name, param in reversed(named):
            where = param.dtype, param.device, self._segments.of(param)
            groups.setdefault(where, []).append((name, param))
        for members in groups.values():
            limit, part, size = FIRST_BUCKET_BYTES, list[tuple[str, nn.Parameter]](), 0
            for name, param in members:
                part.append((name, param))
                size += param.numel() * param.element_size()
                if size >= limit:
                    self._add_bucket(part)
                    limit, part, size = BUCKET_BYTES, [], 0
            if part:
                self._add_bucket(part)

    def _add_bucket(self, members: list[tuple[str, nn.Parameter]]) -> None:
        first = members[0][1]
        size = sum(p.numel() for _, p in members)
        flat = torch.zeros(size, dtype=first.dtype, device=first.device, pin_memory=self._pins)
        bucket = Bucket(flat)
        offset = 0
        for name, param in members:
            part = flat[offset : offset + param.numel()]
            view = part.view(param.size())
            if (
                param.dim() == 4
                and not param.is_contiguous()
                and param.is_contiguous(memory_format=torch.channels_last)
            ):
                view = part.as_strided(param.size(), param.stride(), part.storage_offset())
            slot = Slot(len(self.slots), name, param, view)
            self.slots.append(slot)
            self._bucket_of.append(bucket)
            bucket.slots.append(slot)
            offset += param.numel()
        self.buckets.append(bucket)

    def _hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        def arrived(param: torch.Tensor) -> None:
            self._check()
            if not self._running:
                param.grad = None
                if self._live:
                    raise StepError(
                        "loss_fn called backward() itself; let it return the loss: step.backward(loss_fn) does the rest"
                    )
                raise StepError(PLAIN_BACKWARD)
            if slot.param.grad is None:
                return
            slot.touched = True
            if self._last:
                slot.arrivals += 1
            if not self._idle:
                self._arrive(slot, slot.param.grad)

        return arrived

    def _arrive(self, slot: Slot, grad: torch.Tensor) -> None:
        bucket = self._bucket_of[slot.index]
        if bucket.pending is not None:
            self.late = True
            return
        if grad is not slot.view:
            if grad.is_sparse:
                raise StepError(
                    f"the gradient of {slot.name} is sparse; strategy={self._strategy!r} sums dense gradients: use "
                    "sparse=False"
                )
            # Hooks run without autograd, unless the user's own backward builds a graph, which a leaf's gradient never joins.
            view = slot.view
            if slot.filled:
                view.add_(grad.detach())
            else:
                view.copy_(grad.detach())
            slot.param.grad = slot.view
        slot.filled = True
        if not self._last or self._expected is None or not bucket.missing:
            return
        if slot.arrivals <= self._expected[slot.index]:
            bucket.missing -= 1
        while self._next < len(self._queue) and self._queue[self._next].missing == 0 and not self.late:
            self._launch(self._queue[self._next])
            self._next += 1

    def _launch_queue(self) -> None:
        for bucket in self._queue[self._next :]:
            self._launch(bucket)
        self._next = len(self._queue)

    def _launch(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            if not slot.filled:
                slot.view.zero_()
        if self._grad_norms is not None:
            self._grad_norms.leaves(bucket.flat)
        bucket.pending = self._groups.sum_async(bucket.flat)

    def _held(self) -> list[torch.Tensor]:
        return [slot.view for b in self.buckets if b.pending is None for slot in b.slots if slot.filled]

    def _final(self, slot: Slot, touched: bool) -> torch.Tensor | None:
        if slot.skipped:
            return None
        if not touched:
            return slot.stash
        if slot.stash is None:
            return slot.view
        return slot.stash.add_(slot.view)
