"""The gradients of a rank that is alone: nothing is summed, so they stay where autograd put them, without buckets."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from evenload.errors import StepError
from evenload.training.compute.grad_norms import GradNorms
from evenload.training.compute.model_parameters import any_nonzero, sum_scalars
from evenload.training.parallel.buckets import Bucket, all_finite, real
from evenload.training.parallel.call_gradients import (
    CHANGED_IN_LOSS_FN,
    SET_IN_LOSS_FN,
    CallGradients,
    Expectation,
    finite_flag,
    number_slots,
    scale_all,
    sparse_error,
)

_LARGE = 65_536
"""Values of a gradient that is worth a call of its own."""
_ONE = torch.ones((), dtype=torch.float32, device="cpu")
_set_grad_enabled = torch._C._set_grad_enabled
_GRAD = operator.attrgetter("grad")
_TRAINABLE = operator.attrgetter("requires_grad")
_IS_SPARSE = operator.attrgetter("is_sparse")


class LocalReducer(CallGradients):
    """A `BucketReducer` of one rank."""

    buckets: Sequence[Bucket] = ()

    device = torch.device("cpu")
    fits = True

    def __init__(
        self, models: Sequence[nn.Module], grad_norms: GradNorms | None = None, keep: Collection[int] = ()
    ) -> None:
        super().__init__(number_slots(models, keep))
        self._grad_norms = grad_norms
        if grad_norms is not None:
            grad_norms.follow(self._held)
        self._device_type = next((param.device.type for param in self._params if param.device.type != "cpu"), "cpu")
        """``cpu`` where all parameters lie in the host's memory."""
        self._found_inf = torch.zeros((), dtype=torch.float32, device="cpu")
        self._zeroed: dict[torch.Tensor, int] = {}
        """Gradients that were present, and 0, before this call, and their versions: new ones are added to them in place."""
        self._looked_at: list[int] = []
        """Slots whose present gradients the host looks at when the first backward begins."""
        self._last_versions: list[int] = []
        """Of the gradients by slot, when a call ended: another one shows that a gradient was written since."""
        self._before_idle: list[torch.Tensor | None] | None = None
        self._earlier: list[tuple[torch.Tensor | None, int]] | None = None
        """Gradients of earlier micro-batches and their versions; None before the second one."""

    def reorder(self, first: Iterable[int]) -> None:
        """Do nothing: there are no buckets."""

    def begin(self, expected: Expectation | None) -> None:
        super().begin(expected)
        self._stash, self._zeroed, self._earlier = self._no_stash, {}, None
        if (grads := self._present()) is None:
            return
        self._stash = grads
        self._remove_all()
        present = [index for index, grad in enumerate(grads) if grad is not None]
        if not self.on_device:
            self._keep(index for index in present if not any_nonzero([grads[index]]))
        elif self.refuses_leftovers:
            self._note_leftovers(grads)
            self._keep(present)
        else:
            before, versions = self._last_versions, _versions(grads)
            self._looked_at = [index for index in present if not before or versions[index] != before[index]]
            self._begin_to_look([[grads[index]] for index in self._looked_at])

    def is_as_before(self) -> bool:
        """Return whether `begin` and `micro` would find the parameters as in the last call, and no gradient."""
        return (
            list(map(_TRAINABLE, self._params)) == self._trainable
            and all(map(operator.is_, map(_GRAD, self._params), itertools.repeat(None)))
            and not (self._skipped or self._hooks.has_others)
        )

    def begin_again(self) -> None:
        """Do what `begin` does, where all `is_as_before`."""
        self._live, self._zeroed, self._earlier = True, {}, None
        self._arrived.clear()

    def open_again(self) -> None:
        """Do what `micro` does for the only micro-batch, between loss_fn and its backward."""
        self._look_for_set()
        self._summed_hooks.take()
        self._hooks.open(self._quiet_hook, self._watched_hook)

    def end_again(self) -> bool:
        """Do what `end_micro` does after it; return whether the same parameters received a gradient as in the last call."""
        self._hooks.close()
        self._summed_hooks.put_back()
        ids = list(map(id, self._arrived))
        if self._touched_ids == set(ids):
            return True
        self._touched_ids, self._last_ids = set(ids), ids
        return False

    def micro(self, *, last: bool, idle: bool) -> None:
        if self._earlier is None:
            self._look_for_set()
        else:
            self._put_back_earlier()
        if self._unread_marks is not None:
            self._keep(itertools.compress(self._looked_at, self._zero_ones()))
        self._before_idle = self._present() if idle else None
        super().micro(last=last, idle=idle)

    def end_micro(self) -> None:
        super().end_micro()
        if not (self._last or self._idle):
            grads = [param.grad for param in self._params]
            self._earlier = list(zip(grads, _versions(grads), strict=True))

    def end_idle(self) -> None:
        """Discard the gradients of an idle micro-batch after its backward."""
        for param, grad in zip(self._params, self._before_idle or self._no_stash, strict=True):
            param.grad = grad

    def flush(self, touched: Sequence[int]) -> None:
        """Do nothing: there is nobody to send buckets to."""

    def finite_on_device(self) -> torch.Tensor:
        """Return whether all gradients are finite, as a flag on their device."""
        marks = torch._foreach_norm([real(grad) for grad in grads], math.inf) if (grads := self._held()) else []
        return finite_flag(marks)

    def finish(self, touched: Sequence[int], correction: torch.Tensor | float) -> bool:
        """Multiply the gradients by `correction`, add what was set aside, and return whether all are finite.

        With `on_device` only gradients that hooks changed are checked; `finite_on_device` has covered the others.
        """
        self._live = False
        grads = self._held()
        had_grad = torch.is_grad_enabled()
        _set_grad_enabled(False)  # by `torch.no_grad` it takes five calls of Python
        try:
            if not (isinstance(correction, float) and correction == 1.0):
                scale_all(grads, correction)
            if self._grad_norms is not None:
                for grad in grads:
                    self._grad_norms.summed(grad)
            if self.has_summed_hooks:  # a Function may have given None
                touched = [int(flag and p.grad is not None) for flag, p in zip(touched, self._params, strict=True)]
            changed = self._summed_hooks.run(touched, self._grad_of)
            looked_at = [self._grad_of(index) for index in changed] if self.on_device else grads
            is_finite = self._are_finite(looked_at) or all_finite(looked_at)
            if self._stash is not self._no_stash or self._skipped:
                for slot in self.slots:
                    slot.param.grad = self._final(slot.index)
                self._stash = self._no_stash
        finally:
            _set_grad_enabled(had_grad)
        if self.on_device:
            self._last_versions = _versions([param.grad for param in self._params])
        return is_finite

    def rollback(self) -> None:
        """End an attempt that will be repeated: restore earlier gradients."""
        self.abort()

    def abort(self) -> None:
        """End an attempt that failed: restore earlier gradients."""
        was_live = self._live
        self._close()
        if was_live:
            if self._zeroed:
                torch._foreach_zero_(list(self._zeroed))
            self._restore()

    def _keep(self, zero_indices: Iterable[int]) -> None:
        for index in zero_indices:
            if (grad := self._stash[index]) is not None:
                self._params[index].grad = grad
                self._zeroed[grad] = grad._version

    def _look_for_set(self) -> None:
        """Raise StepError if loss_fn has set a gradient before the first backward; it may remove those that are 0."""
        if all(map(operator.is_, map(_GRAD, self._params), itertools.repeat(None))):
            return
        for slot in self.slots:
            if (
                (grad := slot.param.grad) is not None
                and self._zeroed.get(grad) != grad._version
                and any_nonzero([grad])
            ):
                raise StepError(SET_IN_LOSS_FN.format(name=slot.name))

    def _put_back_earlier(self) -> None:
        """Undo a zero_grad of loss_fn, which would remove the gradients of earlier micro-batches."""
        for slot, (grad, version) in zip(self.slots, self._earlier or (), strict=False):
            param = slot.param
            if grad is None:
                if param.grad is not None:
                    raise StepError(SET_IN_LOSS_FN.format(name=slot.name))
                continue
            if param.grad is None:
                param.grad = grad
            if param.grad is not grad or grad._version != version:
                raise StepError(CHANGED_IN_LOSS_FN)

    def _grad_of(self, index: int) -> torch.Tensor:
        grad = self._params[index].grad
        if grad is None:
            raise RuntimeError(f"{self.slots[index].name} has no gradient")
        return grad

    def _held(self) -> list[torch.Tensor]:
        grads = [grad for grad in map(_GRAD, self._params) if grad is not None]
        if any(map(_IS_SPARSE, grads)):
            raise sparse_error(next(s.name for s in self.slots if s.param.grad is not None and s.param.grad.is_sparse))
        return grads

    def _are_finite(self, grads: Sequence[torch.Tensor]) -> bool:
        """Return False if a value is not finite, or if large ones have no finite sum."""
        if self._device_type != "cpu":
            return _finite_total(grads)
        total, small = 0.0, []
        for grad in grads:
            if grad.numel() > _LARGE or grad.is_complex():
                total += float(real(grad).sum())  # reads memory once
            else:
                small.append(grad)
        if small:
            # One call, which looks for the first value that is not finite, and multiplies all others by 1.
            torch._amp_foreach_non_finite_check_and_unscale_(small, self._found_inf, _ONE)
            if float(self._found_inf):
                self._found_inf.zero_()
                return False
        return math.isfinite(total)

    def _final(self, index: int) -> torch.Tensor | None:
        stash, grad = self._stash[index], self._params[index].grad
        if index in self._skipped:
            return None
        if stash is None or grad is None or stash is grad:
            return stash if grad is None else grad
        return stash.add_(grad)


def _versions(grads: Sequence[torch.Tensor | None]) -> list[int]:
    return [0 if grad is None else grad._version for grad in grads]


def _finite_total(grads: Sequence[torch.Tensor]) -> bool:
    totals = torch._foreach_norm([real(grad) for grad in grads]) if grads else []
    return not totals or math.isfinite(float(sum_scalars(totals)))
