"""Put back what a script keeps from call to call, after calls that are no part of the training.

Counters, lists of losses, metrics and queues of loss_fn, of modules and of the dataset: the variables of their code, and what
the objects there hold.
"""

from __future__ import annotations

import collections
import io
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from evenload.training.data.randomness import holders

_DEPTH = 3
_MAX_ENTRIES, _MAX_ELEMENTS = 1 << 16, 1 << 22
"""Entries of a list, and elements of a tensor, that are copied."""
_NOT_THE_USERS = ("evenload.", "torch.nn.", "torch.optim.", "torch._", "numpy", "builtins", "types")
_CONTAINERS = (list, dict, set, collections.deque)


@contextmanager
def state_put_back(models: Iterable[nn.Module], loss_fn: Callable[..., Any], *others: Any) -> Iterator[None]:
    """Restore after the body what these hold; of models what is neither a buffer nor trained, which have their own rules."""
    modules = [module for model in models for module in model.modules()]
    owners = [*holders(loss_fn, _DEPTH), *(one for other in others for one in holders(other, 1)), *modules]
    frozen = [
        p.data for module in modules for p in module._parameters.values() if p is not None and not p.requires_grad
    ]
    undo = [step for owner in owners for step in _undo_of(owner)] + [step for p in frozen for step in _undo_of_value(p)]
    try:
        yield
    finally:
        for step in undo:
            with suppress(Exception):
                step()


def takes_from_an_iterator(loss_fn: Callable[..., Any]) -> bool:
    """Return whether loss_fn names an iterator, such as that of a second loader."""
    named = [vars(one) for one in holders(loss_fn, _DEPTH) if type(one) is types.SimpleNamespace]
    values = [value for names in named for value in names.values()]
    iterators = [value for value in values if isinstance(value, Iterator) and not isinstance(value, io.IOBase)]
    return any(not type(value).__module__.startswith("evenload.") for value in iterators)


def _undo_of(owner: Any) -> Iterator[Callable[[], object]]:
    """Yield what restores the variables of a function, the entries of a container or the attributes of an object."""
    owner = getattr(owner, "__func__", owner)  # of a method
    values: list[Any] = []
    if isinstance(owner, types.FunctionType):
        for cell in owner.__closure__ or ():
            with suppress(ValueError):  # a variable without a value yet
                values.append(cell.cell_contents)
                yield partial(setattr, cell, "cell_contents", cell.cell_contents)
        named = {name: owner.__globals__[name] for name in owner.__code__.co_names if name in owner.__globals__}
        values += named.values()
        yield partial(owner.__globals__.update, named)
    elif type(owner) in _CONTAINERS and len(owner) <= _MAX_ENTRIES:
        values += owner.values() if isinstance(owner, dict) else owner
        yield partial(_refill, owner, owner.copy())
    elif not type(owner).__module__.startswith(_NOT_THE_USERS):
        attributes = dict(getattr(owner, "__dict__", {}))
        values += attributes.values()
        yield partial(vars(owner).update, attributes) if attributes else list
    for value in values:
        yield from _undo_of_value(value)


def _undo_of_value(value: Any) -> Iterator[Callable[[], object]]:
    if type(value) is torch.Tensor and not value.requires_grad and value.numel() <= _MAX_ELEMENTS:
        yield partial(_copy_back, value, value.clone())
    elif isinstance(value, np.ndarray) and value.size <= _MAX_ELEMENTS:
        yield partial(np.copyto, value, value.copy())


def _refill(held: Any, saved: Any) -> None:
    held.clear()
    (held.update if isinstance(held, dict | set) else held.extend)(saved)


def _copy_back(held: torch.Tensor, saved: torch.Tensor) -> None:
    if not torch.equal(held, saved):
        held.copy_(saved)
