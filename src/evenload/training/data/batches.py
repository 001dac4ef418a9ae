"""Map the tensors of a nested batch; everything else stays as it is.

torch.utils._pytree would leave out Mapping and list subclasses, dataclasses, and objects that only have a `to` method.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

_TENSOR = {torch.Tensor}
_IS_CPU = attrgetter("is_cpu")


class MicroBatch(NamedTuple):
    """One rank's part of one micro-batch, on its device."""

    data: Any
    """The samples, collated by the user's `collate_fn`."""
    num_samples: int
    """Samples that count; 0 where the rank is idle."""
    idle: bool = False
    """The data is one real sample of weight 0, so that the rank can take part in every collective."""


def transfer_seconds(batch: Any, device: torch.device) -> tuple[float, float]:
    """Return the seconds to copy a batch to a GPU, pageable and pinned; RuntimeError if it can't be pinned."""
    pinned = pin(batch)

    def once(source: Any) -> float:
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        move(source, device)
        torch.cuda.synchronize(device)
        return time.perf_counter() - began_s

    return min(once(batch) for _ in range(3)), min(once(pinned) for _ in range(3))


def move(batch: Any, device: torch.device, kept: frozenset[int] = frozenset()) -> Any:
    """Return the batch on `device`, in new containers.

    Copies from pinned memory to a GPU are asynchronous. On the CPU the tensors are the same objects; the containers are new,
    so that `batch.pop("labels")` does no harm when the code runs again. Tensors whose ids are in `kept` stay where they are.
    """
    if (
        device.type == "cpu"
        and type(batch) in (list, tuple)
        and set(map(type, batch)) == _TENSOR
        and all(map(_IS_CPU, batch))
    ):
        return type(batch)(batch)  # the usual batch, without a call for each part
    asynchronous = device.type == "cuda"

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if id(leaf) in kept else leaf.to(device, non_blocking=asynchronous)
        try:
            return leaf.to(device, non_blocking=asynchronous)
        except TypeError:  # a user-defined `to` that takes only a device
            return leaf.to(device)

    return _map(batch, one, "to")


def pin(batch: Any) -> Any:
    return _map(batch, lambda leaf: leaf.pin_memory(), "pin_memory")


def map_leaves(batch: Any, one: Callable[[Any], Any]) -> Any:
    """Apply `one` to each tensor and each other object that has a `to` method; the containers are new."""
    return _map(batch, one, "to")


def leaves_of(batch: Any) -> list[Any]:
    found: list[Any] = []

    def add(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(batch, add)
    return found


class OpenedContainer(NamedTuple):
    """The parts of a container, their labels such as ``['x']``, ``[0]`` or ``.x``, and its constructor from other parts."""

    labels: list[str]
    parts: list[Any]
    rebuild: Callable[[list[Any]], Any]


def open_container(value: Any) -> OpenedContainer | None:
    """Open a mapping, tuple, list or dataclass; None for any other value."""
    if isinstance(value, Mapping):
        keys = list(value)
        return OpenedContainer(
            [f"[{key!r}]" for key in keys], list(value.values()), partial(_rebuild_mapping, value, keys)
        )
    if isinstance(value, list | tuple):
        return OpenedContainer([f"[{i}]" for i in range(len(value))], list(value), partial(_rebuild_sequence, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        parts = [getattr(value, name) for name in names]
        return OpenedContainer([f".{name}" for name in names], parts, partial(_rebuild_dataclass, value, names))
    return None


def _map(batch: Any, one: Callable[[Any], Any], method: str) -> Any:
    if isinstance(batch, torch.Tensor):
        return one(batch)
    if type(batch) in (list, tuple):  # the usual batch: the search for what else it may be takes longer than the copy
        return type(batch)([_map(part, one, method) for part in batch])
    if batch is None or isinstance(batch, str | bytes | int | float | torch.nn.Module | type):
        return batch
    # PackedSequence, graph batches, TensorDict, the user's own class
    if not isinstance(batch, Mapping) and callable(getattr(batch, method, None)):
        return one(batch)
    opened = open_container(batch)
    return batch if opened is None else opened.rebuild([_map(part, one, method) for part in opened.parts])


def _rebuild_mapping(value: Mapping[Any, Any], keys: list[Any], parts: list[Any]) -> Any:
    items = dict(zip(keys, parts, strict=True))
    if type(value) is dict:
        return items
    try:
        if isinstance(value, MutableMapping):  # BatchEncoding and its like have attributes besides their keys
            clone = copy.copy(value)
            for key, part in items.items():  # a Hugging Face model's output refuses `update`
                clone[key] = part
                if hasattr(type(value), "__dataclass_fields__"):  # a model's output has each key as an attribute too
                    object.__setattr__(clone, key, part)
            return clone
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _rebuild_sequence(value: list[Any] | tuple[Any, ...], parts: list[Any]) -> Any:
    if isinstance(value, tuple):
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    clone = copy.copy(value)
    clone[:] = parts
    return clone


def _rebuild_dataclass(value: Any, names: list[str], parts: list[Any]) -> Any:
    clone = copy.copy(value)
    for name, part in zip(names, parts, strict=True):
        # object's own setter: the class may be frozen, and its __post_init__ has run already
        object.__setattr__(clone, name, part)
    return clone
