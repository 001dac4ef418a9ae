"""Map the tensors of a nested batch; everything else stays as it is.

torch.utils._pytree would leave out Mapping and list subclasses, dataclasses, and objects that only have a `to` method.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import torch


@dataclass(frozen=True)
class MicroBatch:
    """One rank's part of one micro-batch, on its device."""

    data: Any
    """The samples, collated by the user's `collate_fn`."""
    num_samples: int
    """Samples that count; 0 where the rank is idle."""
    idle: bool = False
    """The data is one real sample of weight 0, so that the rank can take part in every collective."""


def transfer_seconds(batch: Any, device: torch.device) -> tuple[float, float]:
    """Return the seconds to copy a batch to a GPU from pageable and from pinned memory, each the best of three.

    Raises:
        RuntimeError: The batch can't be pinned.
    """
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
    """Return the batch in pinned memory, where no DataLoader worker pinned it."""
    return _map(batch, lambda leaf: leaf.pin_memory(), "pin_memory")


def map_leaves(batch: Any, one: Callable[[Any], Any]) -> Any:
    """Apply `one` to each tensor and each other object that has a `to` method; the containers are new."""
    return _map(batch, one, "to")


def leaves_of(batch: Any) -> list[Any]:
    """Return the tensors of a batch, and its other objects that have a `to` method, in order."""
    found: list[Any] = []

    def add(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(batch, add)
    return found


def _map(batch: Any, one: Callable[[Any], Any], method: str) -> Any:
    if isinstance(batch, torch.Tensor):
        return one(batch)
    if batch is None or isinstance(batch, str | bytes | int | float | torch.nn.Module | type):
        return batch
    if isinstance(batch, Mapping):
        return _map_mapping(batch, one, method)
    if callable(getattr(batch, method, None)):  # PackedSequence, graph batches, TensorDict, the user's own class
        return one(batch)
    if dataclasses.is_dataclass(batch):
        clone = copy.copy(cast(Any, batch))
        for field in dataclasses.fields(batch):
            # object's own setter: the class may be frozen, and its __post_init__ has run already
            object.__setattr__(clone, field.name, _map(getattr(batch, field.name), one, method))
        return clone
    if isinstance(batch, tuple):
        parts = [_map(part, one, method) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, list):
        clone = copy.copy(batch)
        clone[:] = [_map(part, one, method) for part in batch]
        return clone
    return batch


def _map_mapping(batch: Mapping[Any, Any], one: Callable[[Any], Any], method: str) -> Any:
    parts = {key: _map(value, one, method) for key, value in batch.items()}
    if type(batch) is dict:
        return parts
    try:
        if isinstance(batch, MutableMapping):  # BatchEncoding and its like carry more than their keys
            clone = copy.copy(batch)
            for key, part in parts.items():  # a Hugging Face model's output refuses `update`
                clone[key] = part
            return clone
        return type(batch)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts
