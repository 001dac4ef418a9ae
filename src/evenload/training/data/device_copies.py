"""Copy batches to a GPU on a stream of its own, beside the computation.

The copy stream never waits for the computation, so a copy that is started while the GPU computes runs beside it; the
computation waits for the copy by an event. From pinned memory (``DataLoader(pin_memory=True)``) the host does not wait either.
On other devices a copy is made at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from evenload.training.data.batches import leaves_of, map_leaves, move


@dataclass(frozen=True)
class StartedCopy:
    data: Any
    """Tensors of the host are on the device, everything else is as it was."""
    event: torch.cuda.Event | None
    """Recorded on the copy stream after the copies; None where they are complete."""


def start_copy(data: Any, device: torch.device) -> StartedCopy:
    """Start to copy a batch's tensors to `device`; their memory must stay unchanged until `finish_copy`."""

    def one(leaf: Any) -> Any:
        # A tensor that is on a device already may still be computed there, and other objects can't be handed over.
        return leaf.to(device, non_blocking=True) if type(leaf) is torch.Tensor and leaf.device.type == "cpu" else leaf

    if device.type == "cpu":
        return StartedCopy(data, None)
    if device.type != "cuda":
        return StartedCopy(map_leaves(data, one), None)
    stream = _copy_stream(device)
    with torch.cuda.stream(stream):
        copied = map_leaves(data, one)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    return StartedCopy(copied, event)


def finish_copy(copy: StartedCopy, device: torch.device) -> Any:
    """Return the batch on `device`, in new containers, for work that the current stream is given from now on."""
    if copy.event is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(copy.event)
        for leaf in leaves_of(copy.data):
            if type(leaf) is torch.Tensor and leaf.is_cuda:
                leaf.record_stream(stream)  # its memory belongs to the copy stream, which must not reuse it too early
    return move(copy.data, device)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
