"""Cut rows out of a collated batch."""

from __future__ import annotations

from typing import Any

import torch

from evenload.training.data.batches import open_container


class NoRowsError(Exception):
    """A part of a batch has no dimension of samples, or it can't be recognised."""


def cut_rows(batch: Any, low: int, high: int, num_samples: int) -> Any:
    """Return samples ``[low, high)`` of a batch of `num_samples`, in new containers.

    Tensors and lists have the samples first; numbers and text stay. Raises NoRowsError where it can't be recognised.
    """
    tensors: list[torch.Tensor] = []
    cut = _cut(batch, low, high, num_samples, tensors)
    # (sequence, batch) of equal size looks the same from both sides.
    if all(tensor.dim() > 1 and tensor.shape[1] == num_samples for tensor in tensors):
        raise NoRowsError
    return cut


def _cut(value: Any, low: int, high: int, num_samples: int, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            return value
        if value.shape[0] != num_samples or value.layout != torch.strided:
            raise NoRowsError
        tensors.append(value)
        return value[low:high].clone()  # the user's code may change it in place
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if type(value) in (list, tuple) and len(value) == num_samples and not all(map(_is_tensor, value)):
        return value[low:high]
    opened = open_container(value)
    if opened is None:
        raise NoRowsError
    return opened.rebuild([_cut(part, low, high, num_samples, tensors) for part in opened.parts])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
