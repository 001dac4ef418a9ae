"""Hooks on the gradients of parameters: ours, which see them arrive, and the user's, which see the sum.

Note [Shared dictionaries]
  torch keeps the post-accumulate hooks of a parameter in a dictionary that it reads at each call. All parameters of a reducer
  share one of two: one for those that need no attention at once, whose hook is the `append` of a list and runs no Python, and
  one for the rest. So one assignment exchanges the hooks of all parameters, and a hook that the user adds shows in the length.

Note [The user's hooks]
  A hook of `Tensor.register_hook` runs on the sum over ranks and micro-batches, where one process would have run it on the
  gradient of its batch. A post-accumulate hook would see or change this rank's part alone (an optimizer that steps in the
  backward), so it is refused.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from evenload.errors import ConfigError, StepError
from evenload.training.parallel.buckets import Slot

Hook = Callable[[torch.Tensor], None]

_HOOKS = operator.attrgetter("_backward_hooks")
_REMEDY = (
    "it would see or change this rank's part of the gradient (an optimizer that steps in the backward?). Remove it, and "
    "step or read the gradient after step.backward"
)


class ArrivalHooks:
    """Post-accumulate hooks on all parameters of a reducer; see the notes above."""

    def __init__(self, slots: Sequence[Slot], outside: Hook) -> None:
        """Add the hooks; `outside` is called with a gradient that comes while they are closed."""
        for slot in slots:
            if found := getattr(slot.param, "_post_accumulate_grad_hooks", None):
                raise ConfigError(f"{slot.name} has a post-accumulate hook, {_named(found.values())}: {_REMEDY}")
            if getattr(slot.param, "_in_backward_optimizers", None):
                raise ConfigError(f"{slot.name} has an optimizer in the backward: {_REMEDY}")
        self._params = [slot.param for slot in slots]
        self._outside = outside
        self._quiet: OrderedDict[int, Hook] = OrderedDict()
        self._watched: OrderedDict[int, Hook] = OrderedDict()
        self._key = RemovableHandle(self._quiet).id
        self._watched_ids: frozenset[int] = frozenset()
        self.close()
        for param in self._params:
            param._post_accumulate_grad_hooks = self._quiet

    def watch(self, ids: frozenset[int]) -> None:
        """Let the hooks of these parameters (by id) run at once too, as Python."""
        if not ids <= self._watched_ids:
            self._watched_ids |= ids
            for param in self._params:
                if id(param) in ids:
                    param._post_accumulate_grad_hooks = self._watched

    @property
    def has_others(self) -> bool:
        """True if the user added a hook."""
        return len(self._quiet) + len(self._watched) > 2

    def open(self, quiet: Hook, watched: Hook) -> None:
        """Begin to accept gradients; StepError if the user added a hook."""
        if len(self._quiet) + len(self._watched) > 2:
            added = [hook for hooks in (self._quiet, self._watched) for key, hook in hooks.items() if key != self._key]
            raise StepError(f"a parameter of a prepared model has a post-accumulate hook, {_named(added)}: {_REMEDY}")
        self._quiet[self._key], self._watched[self._key] = quiet, watched

    def close(self) -> None:
        """Accept no more gradients."""
        self._quiet[self._key] = self._watched[self._key] = self._outside

    def remove(self) -> None:
        for hooks in (self._quiet, self._watched):
            hooks.clear()
        for param in self._params:
            param._post_accumulate_grad_hooks = None  # type: ignore[assignment]


class SummedHooks:
    """The user's `Tensor.register_hook` hooks, kept from each rank's part and run on the sum."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        """`params`: those of the slots, in their order, or those that the user sees in their place."""
        self._params = params
        self._taken: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {}
        self.are_away = False
        """True if `take` found hooks that `put_back` has not put back."""

    def take(self) -> None:
        """Keep the hooks from running; call `put_back` after the backward."""
        if self._taken:
            self._taken = {}
        if any(map(_HOOKS, self._params)):
            self.are_away = True
            for index, param in enumerate(self._params):
                if hooks := param._backward_hooks:
                    self._taken[index] = hooks, dict(hooks)
                    hooks.clear()

    @property
    def in_use(self) -> bool:
        """True if `take` found hooks."""
        return bool(self._taken)

    def put_back(self) -> None:
        if self.are_away:
            self.are_away = False
            for hooks, taken in self._taken.values():
                hooks.update(taken)

    def run(self, touched: Sequence[int], sum_of: Callable[[int], torch.Tensor]) -> list[int]:
        """Run the hooks of touched slots on their sums, in place; return the indices of slots that had one."""
        if not self._taken:
            return []
        found = [index for index in self._taken if touched[index]]
        for index in found:
            own = grad = sum_of(index)
            for hook in self._taken[index][1].values():
                changed = hook(grad)
                grad = grad if changed is None else changed
            if grad is not own:
                own.copy_(grad)
        return found


def _named(hooks: Collection[Hook]) -> str:
    return ", ".join(getattr(hook, "__qualname__", repr(hook)) for hook in hooks)
