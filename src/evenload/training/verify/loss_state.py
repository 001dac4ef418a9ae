"""Restore the state of a script after calls of loss_fn that are no part of the training.

It restores counters, lists, metrics, queues and random generators of loss_fn, of the modules and of the dataset: the variables
of their code, and what the objects there hold. Names that the calls create stay, as do attributes of functions and classes.
"""

from __future__ import annotations

import collections
import io
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from evenload.training.data.randomness import find_generators, holders, load_generators, save_generators

_DEPTH = 3
_MAX_ENTRIES = 1 << 16
"""Of one container."""
_MAX_ALL_ENTRIES, _MAX_ELEMENTS = 1 << 20, 1 << 24
"""Entries of all containers, and elements of all tensors, that are copied, the smallest first: large ones are data or frozen
weights."""
_LIBRARY_MODULES = ("evenload.", "torch.nn.", "torch.optim.", "torch._", "numpy", "builtins")
_CONTAINERS: tuple[Any, ...] = (collections.OrderedDict, dict, set, list, collections.deque)


@contextmanager
def state_restored(models: Iterable[nn.Module], loss_fn: Callable[..., Any], *others: Any) -> Iterator[None]:
    """Restore after the body what these hold, but no buffer or trained parameter of `models`: the caller restores those."""
    owners = [*holders(loss_fn, _DEPTH), *(one for other in others for one in holders(other, 1))]
    roots = [*models, *(one for one in owners if isinstance(one, nn.Module))]
    modules = {id(module): module for root in roots for module in root.modules()}.values()
    frozen = {id(p): p.data for m in modules for p in m._parameters.values() if p is not None and not p.requires_grad}
    held = {id(owner): owner for owner in (*owners, *modules)}
    undo = [step for owner in list(held.values()) for step in _undo_of(owner, held)]
    containers = [(kind, one) for one in held.values() if (kind := _container_of(one))]
    for kind, one in _smallest(containers, lambda pair: pair[0].__len__(pair[1]), _MAX_ALL_ENTRIES):
        undo.append(partial(_refill, kind, one, _entries(kind, one)))
    for value in _smallest(filter(_is_array, (*held.values(), *frozen.values())), _size, _MAX_ELEMENTS):
        undo.append(partial(_copy_back, value, value.clone() if isinstance(value, torch.Tensor) else value.copy()))
    generators = find_generators(owners)
    undo.append(partial(load_generators, generators, save_generators(generators)))
    with _undone(undo):
        yield


@contextmanager
def weights_restored(models: Iterable[nn.Module]) -> Iterator[None]:
    """Restore after the body the trained parameters, which loss_fn may change in place; of large models the smallest."""
    held = {id(p): p.data for model in models for p in model.parameters() if p.requires_grad and not p.is_meta}
    undo = [partial(_copy_back, value, value.clone()) for value in _smallest(held.values(), _size, _MAX_ELEMENTS)]
    with _undone(undo):
        yield


@contextmanager
def _undone(undo: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Run the steps after the body; one that fails leaves the others."""
    try:
        yield
    finally:
        for step in undo:
            with suppress(Exception):
                step()


def uses_an_iterator(loss_fn: Callable[..., Any]) -> bool:
    """Return whether loss_fn names an iterator, such as that of a second loader."""
    named = [vars(one) for one in holders(loss_fn, _DEPTH) if type(one) is types.SimpleNamespace]
    values = [value for names in named for value in names.values()]
    iterators = [value for value in values if isinstance(value, Iterator) and not isinstance(value, io.IOBase)]
    return any(not type(value).__module__.startswith("evenload.") for value in iterators)


def _undo_of(owner: Any, held: dict[int, Any]) -> Iterator[Callable[[], object]]:
    """Yield what restores the variables of a function or the attributes of an object; add their values to `held`."""
    if isinstance(owner, types.MethodType):
        owner = owner.__func__
    values: list[Any] = []
    if isinstance(owner, types.FunctionType):
        for cell in owner.__closure__ or ():
            with suppress(ValueError):  # a variable without a value yet
                values.append(cell.cell_contents)
                yield partial(setattr, cell, "cell_contents", cell.cell_contents)
        named = {name: owner.__globals__[name] for name in owner.__code__.co_names if name in owner.__globals__}
        values += named.values()
        yield partial(owner.__globals__.update, named)
    elif kind := _container_of(owner):
        values += _entries(kind, owner)
    if not type(owner).__module__.startswith(_LIBRARY_MODULES):
        with suppress(TypeError, AttributeError):  # an object with slots, a class
            attributes = vars(owner)
            values += attributes.values()
            yield partial(attributes.update, dict(attributes))
    held.update((id(value), value) for value in values)


def _smallest(values: Iterable[Any], size: Callable[[Any], int], total: int) -> Iterator[Any]:
    for value in sorted(values, key=size):
        total -= size(value)
        if total < 0:
            return
        yield value


def _container_of(value: Any) -> Any:
    """Return the kind of a container that is not too large; None for anything else."""
    kind = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
    return kind if kind is not None and kind.__len__(value) <= _MAX_ENTRIES else None


def _entries(kind: Any, held: Any) -> list[Any]:
    # By the methods of the kind: a class of the script's own may have others under these names.
    return [*kind.keys(held), *kind.values(held)] if issubclass(kind, dict) else [*kind.__iter__(held)]


def _refill(kind: Any, held: Any, saved: list[Any]) -> None:
    now = _entries(kind, held)
    if len(now) == len(saved) and all(map(operator.is_, now, saved)):
        return  # another thread may be reading it
    kind.clear(held)
    if issubclass(kind, dict):
        half = len(saved) // 2
        kind.update(held, zip(saved[:half], saved[half:], strict=True))
    else:
        (kind.update if kind is set else kind.extend)(held, saved)


def _is_array(value: Any) -> bool:
    is_tensor = type(value) is torch.Tensor and not value.requires_grad
    return is_tensor or (isinstance(value, np.ndarray) and not isinstance(value, np.memmap))


def _size(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else value.size


def _copy_back(held: Any, saved: Any) -> None:
    if isinstance(held, torch.Tensor):
        if not torch.equal(held, saved):
            held.copy_(saved)
    elif not np.array_equal(held, saved):
        np.copyto(held, saved)
