"""What travels between the server and its workers, and how tensors are joined for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from evenload.training.comm.clock import Segment
from evenload.training.parallel.asynchronous.ledger import PartJob


@dataclass(frozen=True)
class PartGradient:
    """The result of one part, from a worker."""

    job: int
    """`PartJob.number`."""
    version: int
    """`PartJob.version`: the counter of the parameters that it was computed with."""
    worker: int
    units: float
    """N, the sum of the weights."""
    weighted: bool
    loss: float
    """Weighted mean over the part."""
    metrics: Mapping[str, float]
    """Weighted means."""
    seconds: Mapping[Segment, float]
    memory_bytes: int
    num_micro: int
    touched: Sequence[int]
    """Indices of the parameters that have a gradient; none of a part that is skipped, which is not finite."""
    gradients: Sequence[torch.Tensor]
    """Their gradients, joined."""
    buffers: Sequence[torch.Tensor]
    """The changes of buffers (buffers.py), joined."""


@dataclass(frozen=True)
class Handout:
    """The answer to a worker that asks for a part."""

    job: PartJob | None
    """None: the epoch is over, or its loop was left."""
    next_part: int | None = None
    """The part that is kept for this worker, which reads it ahead."""
    indices: Sequence[int] = ()
    """Of the parameters and buffers that are sent."""
    state: Sequence[torch.Tensor] = ()
    """Their values, joined."""
    alive: Sequence[int] = ()
    """At the end of an epoch: the ranks that take part from now on."""


def join(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors into one of each dtype, on the CPU: a message of a few large tensors is much cheaper than one of many."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
    return [torch.cat(parts).cpu() for parts in by_dtype.values()]


def split(joined: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of what `join` made, with the shapes of `like`, which were joined in this order."""
    by_dtype = {tensor.dtype: tensor for tensor in joined}
    begins = dict.fromkeys(by_dtype, 0)
    views = []
    for tensor in like:
        begin = begins[tensor.dtype]
        begins[tensor.dtype] = begin + tensor.numel()
        views.append(by_dtype[tensor.dtype][begin : begin + tensor.numel()].view(tensor.shape))
    return views
