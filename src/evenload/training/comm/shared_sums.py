"""`SharedSums`: sums of small vectors among ranks on the CPUs of one host, through shared memory.

A sum of gloo takes a millisecond and more even between two ranks of one host, most of it to wake threads: as much as a whole step
of a small model. Through shared memory a rank writes its part when the sum begins, and adds up those of all when it waits for it.
Each sum in flight has a channel of its own, in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from evenload.errors import PeerLostError
from evenload.training.comm.host_exchange import Gather, HostMap, share_channels
from evenload.training.comm.shared_memory import ChannelLayout, SharedChannel

MOST_BYTES = 1 << 21
"""Those of all ranks in a sum, each of which reads them all."""
_NUM_CHANNELS = 2


class SharedSum:
    """A sum in progress."""

    def __init__(self, channel: SharedChannel, tensor: torch.Tensor) -> None:
        self._channel, self._tensor = channel, tensor
        self._lock = threading.Lock()
        self.done = False

    def wait(self) -> None:
        """Wait until all ranks have begun it, and add up their parts, in place; PeerLostError if a rank is gone."""
        with self._lock:
            if self.done:
                return
            try:
                self._channel.end_sum(self._tensor)
            except TimeoutError as error:
                raise PeerLostError(f"a sum of gradients: {error}") from error
            self.done = True


class SharedSums:
    """Sums that all members begin in the same order."""

    def __init__(self, channels: Sequence[SharedChannel], num_ranks: int) -> None:
        self._channels = channels
        self._most_bytes = MOST_BYTES // num_ranks
        self._last: list[SharedSum | None] = [None] * len(channels)
        self._count = 0

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is small enough; the same on all ranks."""
        is_small = tensor.numel() * tensor.element_size() <= self._most_bytes
        return is_small and tensor.device.type == "cpu" and tensor.is_contiguous()

    def begin(self, tensor: torch.Tensor) -> SharedSum:
        """Begin a sum, in place; it does not wait, unless `_NUM_CHANNELS` sums are in progress."""
        index = self._count % len(self._channels)
        self._count += 1
        if (before := self._last[index]) is not None:
            before.wait()  # all ranks have begun it, or will: it comes before this one
        vector, channel = tensor.view(-1), self._channels[index]
        channel.begin_sum(vector)
        self._last[index] = started = SharedSum(channel, vector)
        return started

    def abort(self, reason: str) -> None:
        """End the sums of all members; see `SharedSegment.abort`."""
        self._channels[0].abort(reason)

    def close(self) -> None:
        """Leave; see `SharedSegment.close`."""
        self._channels[0].close()


def share_sums(
    found: HostMap, rank: int, ranks: Sequence[int], gather: Gather, timeout_s: float
) -> tuple[bool, SharedSums | None]:
    """Return whether some ranks of one host can sum through shared memory, and how; None for a rank outside.

    All ranks call it, and get the same answer to the first.
    """
    if not found.are_together(ranks):
        return False, None
    layouts = [ChannelLayout(len(ranks), MOST_BYTES // len(ranks))] * _NUM_CHANNELS
    agreed, channels = share_channels(found, rank, ranks, layouts, gather, timeout_s)
    return agreed, SharedSums(channels, len(ranks)) if channels else None
