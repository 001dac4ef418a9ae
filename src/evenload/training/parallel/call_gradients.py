"""The gradients of one call of `step.backward`: what is present before it, what arrives, what becomes of both."""

from __future__ import annotations

import operator
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import repeat

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from evenload.errors import StepError
from evenload.training.compute.device_read import DeviceRead, scalars_on
from evenload.training.compute.model_parameters import magnitude, sum_scalars
from evenload.training.parallel.buckets import Bucket, Slot
from evenload.training.parallel.grad_hooks import ArrivalHooks, Hook, SummedHooks

PLAIN_BACKWARD = (
    "loss.backward() was called on a model that run.prepare returned: its gradient would be this rank's alone. Write "
    "instead:  loss = step.backward(loss_fn)  with a function loss_fn(batch) that returns the loss"
)

CHANGED_IN_LOSS_FN = (
    "loss_fn changed the gradients of this step's earlier micro-batches (zero_grad(set_to_none=False), clipping?), so the sum "
    "would be wrong; call step.backward(loss_fn) first, then clip, optimizer.step(), optimizer.zero_grad()"
)

SET_IN_LOSS_FN = (
    "loss_fn set or changed .grad of {name}, where this rank's part of a micro-batch is computed: what it holds before would be "
    "added once for each micro-batch and rank. Return a loss that contains the term, or change .grad after "
    "step.backward(loss_fn)"
)

SHARDED = (
    "{name} is spread over ranks (a DTensor, by fully_shard or parallelize_module), and each rank needs whole weights: give "
    "run.prepare the plain model, and leave out fully_shard, replicate and parallelize_module"
)

Expectation = tuple[int, ...]
"""Number of times each slot accumulates in the last micro-batch of a call."""

_WORD_BITS = 52
_GRAD = operator.attrgetter("grad")
_TRAINABLE = operator.attrgetter("requires_grad")


class CallGradients:
    """State that a reducer over ranks and one for a single rank share. Gradients present before a call are set aside."""

    def __init__(
        self,
        slots: Sequence[Slot],
        check: Callable[[], None] | None = None,
        hooked: Sequence[nn.Parameter] | None = None,
    ) -> None:
        """Args:
        slots: in order of registration.
        check: called at each gradient, in the thread that computed it.
        hooked: the parameters whose hooks run on the sums, if they are not those of the slots.
        """
        self.slots = list(slots)
        self.late = False
        """True if the attempt must be repeated."""
        self.has_run = False
        """True if a backward ran in this attempt."""
        self.on_device = False
        """True if nothing of a gradient is read by the host; equal on all ranks, and set before a call."""
        self.sends_all = False
        """True if all expected buckets leave, also those without a gradient; equal on all ranks, and set before a call."""
        self.refuses_leftovers = False
        """True if gradients that are present are an error unless they are 0; set before a call."""
        self.leftovers: torch.Tensor | None = None
        """Where the host reads nothing: not 0 if such gradients were present; None if none were present."""
        self._check = check
        self._params = [slot.param for slot in slots]
        self._slot_of = {id(slot.param): slot for slot in slots}
        self._hooks = ArrivalHooks(slots, self._checked(self._outside))
        self._summed_hooks = SummedHooks(self._params if hooked is None else hooked)
        self._live = False
        self._last = self._idle = False
        self._no_stash: list[torch.Tensor | None] = [None] * len(slots)
        self._stash = self._no_stash
        self._unread_marks: DeviceRead | None = None
        """Of parts of present gradients, each 0 if the part is; read when the GPU has the forward to do."""
        self._skipped: set[int] = set()
        self._arrived: list[torch.Tensor] = []
        """Parameters whose gradient came in this micro-batch, in order, as often as it came."""
        self._quiet_hook, self._watched_hook = self._checked(self._arrived.append), self._checked(self._arrive)
        self._last_ids: list[int] = []
        self._touched_ids: set[int] = set()
        self._trainable: list[bool] = []
        self._trained_key = 0.0
        self._known_touched: tuple[set[int] | None, list[int], float, tuple[float, ...]] = None, [], 0.0, ()

    def remove(self) -> None:
        """Remove all hooks."""
        self._hooks.remove()

    def begin(self, expected: Expectation | None) -> None:
        """Begin an attempt: set aside gradients of earlier calls in this step, and expect new ones."""
        self._live, self.has_run, self.late = True, False, False
        self._touched_ids.clear()
        self._last_ids = []
        if (trainable := list(map(_TRAINABLE, self._params))) != self._trainable:
            trained = [(s.name, tuple(s.param.shape), s.param.dtype, s.param.requires_grad) for s in self.slots]
            self._trainable = trainable
            self._trained_key = float(zlib.crc32(repr(trained).encode()) % 2**20 << 32)
        self._summed_hooks.take()
        if self._summed_hooks.are_away:
            self._summed_hooks.put_back()

    def micro(self, *, last: bool, idle: bool) -> None:
        """Describe the micro-batch of the next backward."""
        self._last, self._idle, self.has_run = last, idle, True
        self._arrived.clear()
        self._summed_hooks.take()
        if idle:
            self._remove_all()
        quiet, watched = self._quiet_hook, self._watched_hook
        self._hooks.open(quiet, quiet if idle else watched)

    def end_micro(self) -> None:
        """End the backward of a micro-batch; later gradients come from elsewhere."""
        self._hooks.close()
        if self._summed_hooks.are_away:
            self._summed_hooks.put_back()
        ids = list(map(id, self._arrived))
        self._touched_ids.update(ids)
        if self._last:
            self._last_ids = ids

    def observed(self) -> Expectation:
        """Return the arrivals in the last micro-batch."""
        counts = Counter(self._last_ids)
        return tuple(counts[id(param)] for param in self._params)

    def order(self) -> list[int]:
        """Return the indices of slots in the order in which their gradients came in the last micro-batch."""
        return [self._slot_of[key].index for key in dict.fromkeys(self._last_ids)]

    def touched(self) -> list[int]:
        """Return 1 for each slot that received a gradient in this call, idle or not."""
        if self._known_touched[0] != self._touched_ids:
            flags = [int(id(param) in self._touched_ids) for param in self._params]
            key = float(zlib.crc32(bytes(flags)))
            self._known_touched = set(self._touched_ids), flags, key, _pack_flags(flags)
        return self._known_touched[1]

    def touched_key(self) -> float:
        """Return a checksum of `touched` and, above 32 bits, of the trainable parameters; exact in a float64."""
        self.touched()
        return self._known_touched[2] + self._trained_key

    def touched_words(self) -> tuple[float, ...]:
        """Return the last `touched` as bits, each word exact in a float64; see `unpack_flags`."""
        return self._known_touched[3]

    @property
    def has_summed_hooks(self) -> bool:
        """True if hooks of the user run on the sums, where they may make values that aren't finite."""
        return self._summed_hooks.in_use

    def touches(self, touched: Sequence[int], param: torch.Tensor) -> bool:
        """Return whether `touched` counts this parameter."""
        slot = self._slot_of.get(id(param))
        return slot is not None and bool(touched[slot.index])

    def release(self) -> None:
        """Remove all gradients after `flush`, when another reducer keeps the sums."""
        self._remove_all()
        self._stash = self._no_stash

    def clear(self, touched: Sequence[int]) -> None:
        """Remove the gradients of a call, so that an optimizer's step changes nothing.

        Another call of the same step would make half an update, so its parameters stay without gradient until `clear_skip`.
        """
        for slot in self.slots:
            if touched[slot.index]:
                slot.param.grad = None
                self._skipped.add(slot.index)

    def clear_skip(self) -> None:
        """Let gradients count again: an optimizer has stepped, or a new step began."""
        self._skipped.clear()

    def _close(self) -> None:
        self._live = False
        self._hooks.close()
        self._summed_hooks.put_back()

    def _present(self) -> list[torch.Tensor | None] | None:
        """Return all gradients by slot; None if there is none."""
        grads = list(map(_GRAD, self._params))
        return None if all(map(operator.is_, grads, repeat(None))) else grads

    def _note_leftovers(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Take gradients that are present as 0; `leftovers` says if that is wrong."""
        found = magnitude(grads)
        # Not forgotten if the attempt is repeated: what it left is 0.
        self.leftovers = found if self.leftovers is None else self.leftovers + found

    def _begin_to_look(self, parts: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """Begin to read which of these parts are 0."""
        if parts:
            with torch.no_grad():
                marks = [magnitude(grads) for grads in parts]
                self._unread_marks = DeviceRead(scalars_on(marks[0].device, marks))

    def _zero_ones(self) -> list[bool]:
        """Return for each part whether it is 0, once."""
        unread, self._unread_marks = self._unread_marks, None
        return [] if unread is None else [not mark for mark in unread.read()]

    def _remove_all(self) -> None:
        for param in self._params:
            param.grad = None

    def _restore(self) -> None:
        """Put back what was set aside."""
        for param, grad in zip(self._params, self._stash, strict=True):
            param.grad = grad
        self._stash, self._unread_marks = self._no_stash, None

    def _arrive(self, param: torch.Tensor) -> None:
        self._arrived.append(param)

    def _outside(self, param: torch.Tensor) -> None:
        param.grad = None
        if self._live:
            raise StepError(
                "loss_fn called backward() itself; let it return the loss: step.backward(loss_fn) does the rest"
            )
        raise StepError(PLAIN_BACKWARD)

    def _checked(self, hook: Hook) -> Hook:
        check = self._check
        if check is None:
            return hook

        def checked(param: torch.Tensor) -> None:
            check()
            hook(param)

        return checked


def _pack_flags(flags: Sequence[int]) -> tuple[float, ...]:
    text = "".join(map(str, flags))
    return tuple(float(int(text[at : at + _WORD_BITS], 2)) for at in range(0, len(text), _WORD_BITS))


def unpack_flags(words: Sequence[int], count: int) -> list[int]:
    """Return `count` flags of 0 or 1 from their words."""
    sizes = [min(_WORD_BITS, count - at) for at in range(0, count, _WORD_BITS)]
    return [int(bit) for word, size in zip(words, sizes, strict=True) for bit in f"{word:0{size}b}"]


def number_slots(models: Sequence[nn.Module], keep: Collection[int] = ()) -> list[Slot]:
    """Return a slot for each trainable parameter, and for frozen ones whose id is in `keep`."""
    slots: list[Slot] = []
    seen: set[int] = set()
    for model_index, model in enumerate(models):
        prefix = f"{model_index}." if len(models) > 1 else ""
        for name, param in model.named_parameters():
            if id(param) not in seen and (param.requires_grad or id(param) in keep):
                if is_sharded(param):
                    raise StepError(SHARDED.format(name=prefix + name))
                slots.append(Slot(len(slots), model_index, prefix + name, param))
            seen.add(id(param))
    return slots


def put_back_views(bucket: Bucket, filled: Collection[int], *, is_first: bool) -> None:
    """Undo a zero_grad of loss_fn; StepError if it set another gradient.

    `.grad` is where gradients accumulate, or holds those of earlier micro-batches; otherwise it is None.

    Args:
        bucket: of the parameters.
        filled: ids of the parameters whose `.grad` is a view.
        is_first: before the first backward of the call.
    """
    is_small = is_first and not bucket.was_zero  # large gradients have no view yet
    own = [] if not bucket.is_claimed else bucket.small if is_small else bucket.params
    views = bucket.memory.views
    if not all(map(operator.is_, map(_GRAD, own), views)):
        for param, view in zip(own, views, strict=False):  # the small ones come first
            if param.grad is view:
                continue
            if param.grad is not None:
                is_earlier = id(param) in filled and not is_first
                raise StepError(CHANGED_IN_LOSS_FN if is_earlier else _set_in_loss_fn(bucket, param))
            if id(param) in filled:
                param.grad = view
    if not all(map(operator.is_, map(_GRAD, others := bucket.params[len(own) :]), repeat(None))):
        for param, view in zip(others, views[len(own) :], strict=True):
            if param.grad is not None and (param.grad is not view or id(param) not in filled):
                raise StepError(_set_in_loss_fn(bucket, param))


def _set_in_loss_fn(bucket: Bucket, param: nn.Parameter) -> str:
    return SET_IN_LOSS_FN.format(name=next(slot.name for slot in bucket.slots if slot.param is param))


def is_sharded(param: torch.Tensor) -> bool:
    """Return whether each rank holds a part of it: a DTensor."""
    return hasattr(param, "device_mesh") and is_traceable_wrapper_subclass(param)


def sparse_error(name: str) -> StepError:
    return StepError(
        f"the gradient of {name} is sparse, and gradients are summed as dense ones: use sparse=False, and Adam in place of "
        "SparseAdam"
    )


def finite_flag(marks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return whether the sum of these scalars is finite, without reading it."""
    with torch.no_grad():
        return sum_scalars(marks).isfinite() if marks else torch.ones((), dtype=torch.bool)


def scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply in place; a factor on a device is not read."""
    if isinstance(factor, float):
        if factor != 1.0 and tensors:
            torch._foreach_mul_(list(tensors), factor)
        return
    for tensor in tensors:
        tensor.mul_(factor.to(tensor.device, non_blocking=True))
