"""Sum gradients over ranks in buckets, each as soon as it is complete, during the backward; see docs/decisions/own-reducer.md.

Note [Gradients are views]
  After the first micro-batch `.grad` of a parameter is a view into its bucket: nothing is copied back after the reduction,
  and the buckets replace the gradients instead of needing memory beside them. Small gradients accumulate there from the start.
  If the user still holds a gradient of an earlier call, its bucket takes other memory.

Note [When a bucket leaves]
  The n-th call of `backward` in a step records which parameters receive a gradient, and how often, in the last micro-batch.
  From the second step on a bucket leaves when each has come once, in one order on all ranks; one with a parameter that came
  more often (recursion, re-entrant checkpointing), or on some ranks only, leaves at the end. If a gradient comes after its
  bucket left, all ranks see it in the exchange and repeat the attempt without expectations. Buckets that no rank has a
  gradient for (a dropped layer) do not leave, unless a rank without samples sent them before it knew.

Note [Idle passes]
  A rank without samples still runs forward and backward, so that collectives in the model match; its results are discarded,
  NaN included, and count as zero.

Note [Finite]
  A bucket carries the norm of each rank's part. Its sum over ranks bounds every value of the bucket, so if it is finite, all
  values are. A sum of squares may overflow where no value does: then the values themselves are looked at. Where the host must
  not read the norm of a GPU, it is the largest value's instead, whose sum is finite unless the values are near overflow.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import nn

from evenload.balance.exchange_times import BucketSizes
from evenload.errors import StepError
from evenload.training.compute.grad_norms import GradNorms
from evenload.training.parallel.buckets import (
    Bucket,
    BucketSummer,
    LaunchPlan,
    Slot,
    all_finite,
    are_finite,
    build_buckets,
    has_gaps,
    plan_launches,
)
from evenload.training.parallel.call_gradients import (
    CHANGED_IN_LOSS_FN,
    CallGradients,
    Expectation,
    finite_flag,
    number_slots,
    put_back_views,
    scale_all,
    sparse_error,
)
from evenload.training.parallel.model_split.buckets import BucketSegments
from evenload.training.parallel.wire.gradient_wire import GradientWire

MAX_PLANS = 32


class BucketReducer(CallGradients):
    def __init__(
        self,
        models: Sequence[nn.Module],
        groups: BucketSummer,
        segments: BucketSegments | None = None,
        *,
        check: Callable[[], None] | None = None,
        hooked: Sequence[nn.Parameter] | None = None,
        pins: bool = False,
        grad_norms: GradNorms | None = None,
        keep: Collection[int] = (),
        wire: GradientWire | None = None,
        sizes: BucketSizes | None = None,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        groups: sums the buckets, unless `wire` does.
        segments: which parameters may share a bucket.
        check: called at each gradient, in the thread that computed it.
        hooked: the parameters whose hooks run on the sums, if they are not the models' own.
        pins: buckets lie in pinned memory, to be copied to a GPU.
        grad_norms: receives what leaves and what returns, if norms are measured.
        keep: ids of frozen parameters that keep their slot, because they are trained at times.
        sizes: of buckets, as measured.
        confirm: called when the host has waited for the sums; raises if they may be torn.
        """
        super().__init__(number_slots(models, keep), check, hooked)
        self._groups, self._segments = groups, segments or BucketSegments()
        self._pins, self._sizes = pins, sizes
        self._wire, self._grad_norms, self._confirm = wire, grad_norms, confirm
        if grad_norms is not None:
            grad_norms.follow(self._held)
        self._lock = threading.Lock()  # a model cut over GPUs has a backward thread for each
        self._filled: set[int] = set()
        """Parameters whose slot holds this call's gradient."""
        self._expected: Expectation | None = None
        self._plan: LaunchPlan | None = None
        self._looked_at: list[Bucket] = []  # by the host, when the first backward begins
        self._next = self._num_seen = 0
        self._seen: set[int] = set()
        self._is_published = True  # False until the call's sums are in `.grad`
        self._versions: list[int] = []  # of buckets before loss_fn
        self._is_first = True  # False after a call's first backward
        self._hooks.watch(frozenset(id(slot.param) for slot in self.slots if not slot.is_small))
        # The reverse order of registration is near the order in which gradients arrive.
        self._build(range(len(self.slots) - 1, -1, -1))

    @property
    def device(self) -> torch.device:
        """Where small tensors are summed over ranks."""
        return self.buckets[0].flat.device if self.buckets else torch.device("cpu")

    @property
    def fits(self) -> bool:
        """False if the parameters were converted or moved since the buckets were built."""
        for bucket in self.buckets:
            if (param := bucket.slots[0].param).dtype != bucket.flat.dtype or param.device != bucket.flat.device:
                return False
        return True

    def reorder(self, first: Iterable[int]) -> None:
        """Build the buckets anew, between two calls, beginning with these slots; the order is equal on all ranks."""
        order = list(dict.fromkeys((*first, *self._order)))
        if order != self._order:
            self._build(order)

    # -- one call of step.backward ------------------------------------------------------------------------------------

    def begin(self, expected: Expectation | None) -> None:
        super().begin(expected)
        self._is_published, self._next = False, 0
        self._filled.clear()
        for bucket in self.buckets:
            bucket.pending, bucket.is_claimed, bucket.was_zero = None, False, False
        self._expected, self._plan = expected, None
        self._set_aside()
        if self._unread_marks is None:
            self._expect()
        self._note_versions(is_first=True)

    def micro(self, *, last: bool, idle: bool) -> None:
        if self._unread_marks is not None:
            self._put_back_views()
            self._settle()
        self._seen, self._num_seen = set(), 0
        self._put_back_views()
        for bucket in self.buckets if last else ():
            bucket.version_before = bucket.flat._version
        super().micro(last=last, idle=idle)

    def end_micro(self) -> None:
        if self._last:
            self._look_for_late()
        if not self._idle:
            self._fill_rest()
            self.late = self.late or (self._last and self._plan is not None and has_gaps(self.buckets, self._arrived))
        super().end_micro()
        if not self._last:
            self._note_versions(is_first=False)

    def end_idle(self) -> None:
        """Discard the gradients of an idle micro-batch after its backward."""
        for bucket in self.buckets:
            for slot, view in zip(bucket.laid_out, bucket.memory.views, strict=True):
                slot.param.grad = view if id(slot.param) in self._filled else None
        if self._last and self.sends_all and not self.late:
            self._launch_queue()

    def flush(self, touched: Sequence[int]) -> None:
        """Send all buckets that have not left yet; `touched` as in `finish`."""
        self._live = False
        self._launch_queue(None if self.sends_all else touched)
        for bucket in self.buckets:
            if bucket.pending is None and any(touched[slot.index] for slot in bucket.slots):
                self._launch(bucket)

    def finite_on_device(self) -> torch.Tensor:
        """Return whether all sums are finite, as a flag on their device, after `flush` and before `finish`."""
        return finite_flag([bucket.memory.norm for bucket in self._summed()])

    def finish(self, touched: Sequence[int], correction: torch.Tensor | float) -> bool:
        """Wait for all sums, multiply them by `correction`, put them into `.grad`, and return whether all are finite.

        With `on_device` only buckets that hooks changed are checked; `finite_on_device` has covered the others.
        `touched` holds 1 for each slot to which any rank gave a gradient; equal on all ranks.
        """
        self.flush(touched)
        reduced = []
        with torch.no_grad():
            for bucket in self._summed():
                reduced.append(bucket)
                scale_all([bucket.flat], correction)
                bucket.last_version = bucket.flat._version
                if self._grad_norms is not None:
                    self._grad_norms.summed(bucket.memory.gradients)
            hooked = self._summed_hooks.run(touched, self._view_of)
            changed = {self._bucket_of[index] for index in hooked} if hooked else ()
            is_finite = self.on_device or are_finite([bucket for bucket in reduced if bucket not in changed])
            self._confirm()
            self._publish(touched)
            self._is_published = True
        return is_finite and (not changed or all_finite(bucket.memory.gradients for bucket in changed))

    def rollback(self) -> None:
        """End an attempt that all ranks will repeat: send what the others wait for, and restore earlier gradients."""
        self._close()
        if self._unread_marks is not None:
            self._settle()
        self._launch_queue()
        for bucket in self._summed():
            bucket.pending = None
        self._restore()

    def abort(self) -> None:
        """End an attempt that failed on this rank: restore earlier gradients without waiting for other ranks."""
        self._close()
        if not self._is_published:
            for bucket in self.buckets:
                if bucket.pending is not None:
                    bucket.forget()
            self._restore()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _summed(self) -> Iterator[Bucket]:
        """Yield the buckets that left, each as soon as its sum is there."""
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                yield bucket

    def _build(self, order: Sequence[int]) -> None:
        self._order = list(order)
        slots = (self.slots[index] for index in order)
        self.buckets = build_buckets(slots, self._segments, pins=self._pins, sizes=self._sizes)
        places = {slot.index: (bucket, n) for bucket in self.buckets for n, slot in enumerate(bucket.laid_out)}
        self._bucket_of = [places[slot.index][0] for slot in self.slots]
        self._number_in_bucket = [places[slot.index][1] for slot in self.slots]
        self._plans: dict[Expectation, LaunchPlan] = {}
        if self._wire is not None:
            self._wire.attach(self.buckets)

    def _view_of(self, index: int) -> torch.Tensor:
        return self._bucket_of[index].memory.views[self._number_in_bucket[index]]

    def _set_aside(self) -> None:
        """Set present gradients aside, except for zeros in a bucket (`zero_grad(set_to_none=False)`), which stay there."""
        self._stash = self._no_stash
        if (grads := self._present()) is None:
            return
        self._stash = grads
        looks = self.on_device and not self.refuses_leftovers
        written = [b for b in self.buckets if b.last_version != b.flat._version] if looks else self.buckets
        held = [bucket for bucket in written if bucket.holds([grads[slot.index] for slot in bucket.laid_out])]
        self._remove_all()
        if looks:
            self._looked_at = held
            self._begin_to_look([[grads[slot.index] for slot in bucket.slots] for bucket in held])
        elif self.on_device:
            self._note_leftovers(grads)
            self._keep(held)
        else:
            self._keep(bucket for bucket in held if bucket.is_zero())

    def _keep(self, zero_buckets: Iterable[Bucket]) -> None:
        for bucket in zero_buckets:
            bucket.is_claimed = bucket.was_zero = True
            for slot in bucket.slots:
                if (grad := self._stash[slot.index]) is not None:
                    slot.param.grad = grad
                    self._filled.add(id(slot.param))

    def _settle(self) -> None:
        self._keep(itertools.compress(self._looked_at, self._zero_ones()))
        self._expect()
        self._note_versions(is_first=True)

    def _expect(self) -> None:
        """Prepare the buckets of the parameters that are expected."""
        if (expected := self._expected) is None:
            return
        if (plan := self._plans.get(expected)) is None:
            if len(self._plans) == MAX_PLANS:
                self._plans.clear()
            plan = self._plans[expected] = plan_launches(self.buckets, expected)
            self._hooks.watch(plan.last_ids)
        self._plan = plan
        for bucket in plan.used:
            self._prepare(bucket)

    def _prepare(self, bucket: Bucket) -> None:
        """Let the small gradients of a bucket accumulate in place."""
        if not bucket.was_zero:
            bucket.claim()
            bucket.memory.small.zero_()
        elif bucket.small_ids <= self._filled:
            return
        for param, view in zip(bucket.small, bucket.memory.views, strict=False):  # the small ones come first
            param.grad = view
        self._filled |= bucket.small_ids

    def _arrive(self, param: torch.Tensor) -> None:
        if param.grad is None:  # a Function gave None
            return
        if self._bucket_of[(slot := self._slot_of[id(param)]).index].pending is None:
            self._fill(slot)
        self._arrived.append(param)  # not before: another thread may send the bucket from here on
        plan = self._plan
        if self._last and plan is not None and self._next < len(plan.queue):
            with self._lock:
                self._advance(plan)

    def _put_back_views(self) -> None:
        for bucket, version in zip(self.buckets, self._versions, strict=True):
            is_changed = bucket.is_claimed and bucket.flat._version != version
            if is_changed and not (self._is_first and bucket.is_still_zero()):
                raise StepError(CHANGED_IN_LOSS_FN)
            put_back_views(bucket, self._filled, is_first=self._is_first)

    def _note_versions(self, *, is_first: bool) -> None:
        self._is_first, self._versions = is_first, [bucket.flat._version for bucket in self.buckets]

    def _fill(self, slot: Slot) -> None:
        """Move a gradient into its view."""
        grad, bucket = slot.param.grad, self._bucket_of[slot.index]
        if grad is None:
            return
        if grad.is_sparse:
            raise sparse_error(slot.name)
        if not bucket.is_claimed:
            bucket.claim()
        view = self._view_of(slot.index)
        if grad is view:
            return
        # It holds what came before too, where a Function of the script has put the sum there; its graph is never joined.
        view.copy_(grad.detach())
        slot.param.grad = view
        self._filled.add(id(slot.param))

    def _fill_rest(self) -> None:
        """Move the gradients that no hook has moved: small ones that were not expected."""
        for slot in map(self._slot_of.__getitem__, set(map(id, self._arrived)) - self._filled):
            if slot.param.grad is None:
                self._arrived[:] = [param for param in self._arrived if param is not slot.param]
            elif self._bucket_of[slot.index].pending is None:
                self._fill(slot)

    def _advance(self, plan: LaunchPlan) -> None:
        arrived = self._arrived
        self._seen.update(map(id, arrived[self._num_seen :]))
        self._num_seen = len(arrived)
        while self._next < len(plan.queue) and plan.queue[self._next][1] <= self._seen:
            bucket = plan.queue[self._next][0]
            self._next += 1
            bucket.num_before = len(arrived)
            self._launch(bucket)

    def _look_for_late(self) -> None:
        """Note whether a gradient came after its bucket had left."""
        for bucket in self.buckets:
            if bucket.pending is not None and not bucket.ids.isdisjoint(map(id, self._arrived[bucket.num_before :])):
                self.late = True

    def _launch_queue(self, touched: Sequence[int] | None = None) -> None:
        if self._plan is not None:
            for bucket, _ in self._plan.queue[self._next :]:
                if touched is None or any(touched[slot.index] for slot in bucket.slots):
                    self._launch(bucket)
            self._next = len(self._plan.queue)

    def _launch(self, bucket: Bucket) -> None:
        if not bucket.is_claimed:
            bucket.claim()
        bucket.version_at_launch = bucket.flat._version
        if not bucket.ids <= self._filled:
            for slot, view in zip(bucket.laid_out, bucket.memory.views, strict=True):
                if id(slot.param) not in self._filled:
                    view.zero_()
        bucket.write_norm(math.inf if self.on_device else 2)
        if self._grad_norms is not None:
            self._grad_norms.leaves(bucket.memory.gradients)
        bucket.pending = self._groups.sum_async(bucket.flat) if self._wire is None else self._wire.sum_async(bucket)

    def _publish(self, touched: Sequence[int]) -> None:
        """Put the sums into `.grad`, and add what was set aside."""
        usual = self._stash is self._no_stash and not self._skipped
        if usual and touched == self.touched() and self._filled == self._touched_ids:
            return
        for slot in self.slots:
            slot.param.grad = self._final(slot.index, bool(touched[slot.index]))
        self._stash = self._no_stash

    def _final(self, index: int, touched: bool) -> torch.Tensor | None:
        stash, view = self._stash[index], self._view_of(index)
        if index in self._skipped:
            return None
        if not touched:
            return stash
        if stash is None or stash is view:
            return view
        return stash.add_(view)

    def _restore(self) -> None:
        self._is_published = True
        for bucket in self.buckets:
            if bucket.was_zero:
                bucket.flat.zero_()
                for slot, view in zip(bucket.laid_out, bucket.memory.views, strict=True):
                    if self._stash[slot.index] is not None:
                        self._stash[slot.index] = view
        super()._restore()

    def _held(self) -> list[torch.Tensor]:
        slots = (self._slot_of[key] for key in self._filled)
        return [self._view_of(slot.index) for slot in slots if self._bucket_of[slot.index].pending is None]
