"""Split a call's arguments over devices and join its results: any nesting, samples along the first dimension of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from evenload.errors import ConfigError
from evenload.training.data.batches import leaves_of, map_leaves, open_container


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors of a nested value, in order."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def num_samples_of(value: Any) -> int | None:
    """Return the length of the first tensor that has one; None where no tensor has."""
    return next((len(tensor) for tensor in tensors_of(value) if tensor.dim()), None)


def cut(value: Any, low: int, high: int, num_samples: int, device: torch.device) -> Any:
    """Return the samples ``[low, high)`` of all tensors that hold `num_samples`, and everything else whole, on `device`.

    Raises:
        ConfigError: A packed sequence or nested tensor, which can't be split.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence) or (isinstance(leaf, torch.Tensor) and leaf.is_nested):
            kind = "a PackedSequence" if isinstance(leaf, PackedSequence) else "a nested tensor"
            raise ConfigError(
                f"data_parallel can't split {kind} over devices; give the padded tensor and the lengths, and pack inside the "
                "module"
            )
        if not isinstance(leaf, torch.Tensor):
            return leaf.to(device)
        part = leaf[low:high] if leaf.dim() and len(leaf) == num_samples else leaf
        return part.to(device, non_blocking=device.type == "cuda")

    return map_leaves(value, one)


def join(parts: Sequence[Any], sizes: Sequence[int], device: torch.device, path: str = "the output") -> Any:
    """Join the replicas' results, equal in structure, into that of the whole batch; `path` names the result in errors.

    Raises:
        ConfigError: The results can't be joined along the samples.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return _join_tensors(parts, sizes, device, path)
    if isinstance(first, PackedSequence):
        raise ConfigError(f"{path} is a PackedSequence, which can't be joined; pad it inside the module")
    if any(type(part) is not type(first) for part in parts):
        kinds = ", ".join(dict.fromkeys(type(part).__name__ for part in parts))
        raise ConfigError(f"{path} has a different type on each replica ({kinds}), so it can't be joined")
    if (opened := open_container(first)) is not None:
        others = [open_container(part) or opened for part in parts]
        if any(other.labels != opened.labels for other in others):
            raise ConfigError(f"{path} has different keys or lengths on each replica, so it can't be joined")
        columns = zip(opened.labels, zip(*(other.parts for other in others), strict=True), strict=True)
        return opened.rebuild([join(column, sizes, device, f"{path}{label}") for label, column in columns])
    if all(_is_same(part, first) for part in parts):
        return first
    raise ConfigError(
        f"{path} is a {type(first).__name__} that differs between replicas, so it can't be joined; return tensors with the "
        "samples along their first dimension"
    )


def _is_same(part: Any, first: Any) -> bool:
    if part is first:
        return True
    try:
        return bool(part == first)
    except (RuntimeError, ValueError):  # an array, which compares element by element
        return False


def _join_tensors(parts: Sequence[Any], sizes: Sequence[int], device: torch.device, path: str) -> torch.Tensor:
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise ConfigError(f"{path} is a tensor on some replicas only, so it can't be joined")
    if parts[0].dim() == 0:
        raise ConfigError(
            f"{path} is a scalar for each part of the batch, either a mean or a sum; return a value for each sample, and reduce "
            "it after data_parallel"
        )
    rows = {len(part) / size for part, size in zip(parts, sizes, strict=True)}
    if len(rows) > 1 or any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        shapes = ", ".join(f"{tuple(part.shape)} for {size} samples" for part, size in zip(parts, sizes, strict=True))
        raise ConfigError(
            f"{path} can't be joined along its first dimension: {shapes}. Put the samples along the first dimension "
            "(batch_first=True), and pad to a fixed length"
        )
    moved = [part.to(device, non_blocking=device.type == "cuda") for part in parts]
    return torch.cat(moved) if len(moved) > 1 else moved[0]
