"""`PiecewiseSums`: sums of large vectors among ranks on the CPUs of one host, piece by piece through shared memory.

A thread adds up the sums one after the other, so they go on while the backward computes, or while this rank waits for something
else. Pieces are small enough to stay in the caches of the cores. While one is added up, the next is written.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch

from evenload.errors import PeerLostError
from evenload.training.comm.shared_memory import SharedChannel

_END_WAIT_S = 5.0


class PiecewiseSum:
    """A sum in progress."""

    def __init__(self, vector: torch.Tensor) -> None:
        self.vector = vector
        self._has_ended = threading.Event()
        self._error: Exception | None = None

    @property
    def has_ended(self) -> bool:
        return self._has_ended.is_set()

    def end(self, error: Exception | None = None) -> None:
        """End the waits, with an error if there is one."""
        self._error = error
        del self.vector  # nothing but a step holds the memory of its gradients
        self._has_ended.set()

    def wait(self) -> None:
        """Wait until the vector holds the sum; PeerLostError if a rank is gone or late, or the sums were aborted.

        The waits of the thread have the time limit of its channels.
        """
        self._has_ended.wait()
        if self._error is not None:
            raise self._error


class PiecewiseSums:
    """Sums that all members begin in the same order."""

    def __init__(self, channels: Sequence[SharedChannel], piece_bytes: int) -> None:
        """`channels`: two, used in turn. `piece_bytes`: of a piece, at most the row of a channel."""
        self._channels = channels
        self._piece_bytes = piece_bytes
        self._sums: queue.SimpleQueue[PiecewiseSum | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: PiecewiseSum | None = None

    def begin(self, vector: torch.Tensor) -> PiecewiseSum:
        """Begin a sum, in place, without waiting."""
        self._last = started = PiecewiseSum(vector)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="evenload-piecewise-sums", daemon=True)
            self._thread.start()
        self._sums.put(started)
        return started

    def close(self) -> None:
        """End the thread; sums in progress fail, on all members."""
        if self._last is not None and not self._last.has_ended:
            self._channels[0].abort("the process groups were closed")
        if self._thread is not None:
            self._sums.put(None)
            self._thread.join(_END_WAIT_S)

    def _run(self) -> None:
        while (one := self._sums.get()) is not None:
            error: Exception | None = None
            try:
                self._add_up(one.vector)
            except TimeoutError as late:
                error = PeerLostError(f"a sum of gradients: {late}")
            except Exception as other:  # whatever it is, it belongs to the thread that waits
                error = other
            one.end(error)

    def _add_up(self, vector: torch.Tensor) -> None:
        pieces = torch.split(vector, self._piece_bytes // vector.element_size())
        self._channel(0).begin_sum(pieces[0])
        for index, piece in enumerate(pieces):
            if index + 1 < len(pieces):
                self._channel(index + 1).begin_sum(pieces[index + 1])
            self._channel(index).end_sum(piece)

    def _channel(self, index: int) -> SharedChannel:
        return self._channels[index % 2]
