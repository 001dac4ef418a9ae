"""`SharedSums`: sums of vectors among ranks on the CPUs of one host, through shared memory.

A sum of gloo takes a millisecond and more even between two ranks of one host, most of it to wake threads: as much as a whole step
of a small model. Through shared memory a rank writes a small vector when the sum begins, and adds up those of all when it waits
for it. Large vectors are added up by a thread (piecewise_sums.py).

Note [Sums in flight]
  Ranks begin the same sums in one order, but one may begin several before another begins its first, and wait for the others
  elsewhere before it ends one. So no sum may wait for a free channel: the first small ones of an attempt have a channel each, and
  the thread adds up the rest. All of an attempt have ended when the next one begins.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from evenload.errors import PeerLostError
from evenload.training.comm.host_exchange import Gather, HostMap, share_channels
from evenload.training.comm.piecewise_sums import PiecewiseSum, PiecewiseSums
from evenload.training.comm.shared_memory import SharedChannel

MOST_BYTES = 1 << 21
"""Those of all ranks in a small sum, or in a piece of a large one; each rank reads them all."""
_NUM_SMALL = 4
_MOST_RANKS = 8
"""Among whom large vectors are added up in pieces; each rank reads all parts, of which gloo's ring spares it most."""


class SmallSum:
    """A sum of small vectors in progress."""

    def __init__(self, channel: SharedChannel, tensor: torch.Tensor) -> None:
        self._channel = channel
        self.tensor: torch.Tensor | None = tensor
        """None once it has ended: nothing but a step holds the memory of its gradients."""
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait until all ranks have begun it, and add up their parts, in place; PeerLostError if a rank is gone."""
        with self._lock:
            if self.tensor is None:
                return
            try:
                self._channel.end_sum(self.tensor)
            except TimeoutError as error:
                raise PeerLostError(f"a sum of gradients: {error}") from error
            self.tensor = None


SharedSum = SmallSum | PiecewiseSum


class SharedSums:
    """Sums that all members begin in the same order."""

    def __init__(self, channels: Sequence[SharedChannel], num_ranks: int, most_bytes: int) -> None:
        """`most_bytes`: of a small vector, or a piece of a large one. The last two channels are for pieces."""
        self._channels = channels[:_NUM_SMALL]
        self._piecewise = PiecewiseSums(channels[_NUM_SMALL:], most_bytes) if num_ranks <= _MOST_RANKS else None
        self._most_bytes = most_bytes
        self._last: list[SmallSum | None] = [None] * len(self._channels)
        self._num_begun = 0

    def begin_attempt(self) -> None:
        """Begin an attempt of a step; all ranks have ended, or given up, the sums of the one before."""
        self._num_begun = 0

    def begin(self, tensor: torch.Tensor) -> SharedSum | None:
        """Begin a sum, in place, without waiting; None, on all ranks, if another way is better."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
            return None
        vector, index = tensor.view(-1), self._num_begun
        if vector.numel() * vector.element_size() > self._most_bytes or index == len(self._channels):
            return self._piecewise.begin(vector) if self._piecewise is not None else None
        self._num_begun += 1
        if (before := self._last[index]) is not None and before.tensor is not None:
            before.wait()  # all ranks have begun it; this one gave up the attempt
        channel = self._channels[index]
        channel.begin_sum(vector)
        self._last[index] = started = SmallSum(channel, vector)
        return started

    def abort(self, reason: str) -> None:
        """End the sums of all members; see `SharedSegment.abort`."""
        self._channels[0].abort(reason)

    def close(self) -> None:
        """Leave; see `SharedSegment.close`."""
        if self._piecewise is not None:
            self._piecewise.close()
        self._channels[0].close()


def share_sums(
    found: HostMap, rank: int, ranks: Sequence[int], gather: Gather, timeout_s: float
) -> tuple[bool, SharedSums | None]:
    """Return whether some ranks of one host can sum through shared memory, and how; see `share_channels`."""
    most_bytes = MOST_BYTES // len(ranks)
    agreed, channels = share_channels(found, rank, ranks, most_bytes, _NUM_SMALL + 2, gather, timeout_s)
    return agreed, SharedSums(channels, len(ranks), most_bytes) if channels else None
