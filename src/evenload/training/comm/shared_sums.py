"""`SharedSums`: sums of small vectors among ranks on the CPUs of one host, through shared memory.

A sum of gloo takes a millisecond and more even between two ranks of one host, most of it to wake threads: as much as a whole step
of a small model. Through shared memory a rank writes its part when the sum begins, and adds up those of all when it waits for it.

Note [Sums in flight]
  Ranks begin the same sums in one order, but one may begin several before another begins its first, and wait for the others
  elsewhere before it ends one. So no sum may wait for a free channel: the first ones of an attempt have a channel each, and the
  rest of the attempt travels over gloo. All of an attempt have ended when the next one begins.
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
_NUM_CHANNELS = 4


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
        self._num_begun = 0

    def begin_attempt(self) -> None:
        """Begin an attempt of a step; all ranks have ended, or given up, the sums of the one before."""
        self._num_begun = 0

    def begin(self, tensor: torch.Tensor) -> SharedSum | None:
        """Begin a sum, in place, without waiting; None, on all ranks, if it is too large or no channel is left."""
        is_small = tensor.numel() * tensor.element_size() <= self._most_bytes
        if not is_small or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        index = self._num_begun
        if index == len(self._channels):
            return None
        self._num_begun += 1
        if (before := self._last[index]) is not None:
            before.wait()  # all ranks have begun it; this one gave up the attempt
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
