"""`RowRing`: rows in shared memory, which the first rank of a host pushes without waiting for the others or waking them.

A rank that computes alone pushes what each step gave for the ranks that stand by (step/straight.py). They pop the rows one by one
and in order, a quarter of a step late. Before each of its steps a rank that stands by does not know what comes next: a row, or an
exchange of all ranks. `pop` waits for either. The first rank begins an exchange after the rows that it has pushed, and x86 keeps
the order of its stores, so who looks for an exchange first and then for a row never misses a row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenload.errors import PeerLostError
from evenload.training.comm.shared_memory import LINE, LIVENESS_S, ChannelLayout, SharedChannel, SharedSegment

_CAPACITY = 64
"""Rows that may be pushed before the slowest rank pops one."""
_LATE = 0.25
"""A row is popped late by this part of the time since the one before. Whoever lags makes the first rank wait in an exchange."""
_LEAST_SLEEP_NS = 500_000


class RowRing:
    """Rows in a ring, and for each member of a segment how many it has pushed or popped."""

    def __init__(
        self, segment: SharedSegment, index: int, exchange: SharedChannel, num_values: int, timeout_s: float
    ) -> None:
        """Args:
        index: of the layout that `ring_layout` returned.
        exchange: what a rank waits for besides.
        num_values: of a row.
        timeout_s: limit of each wait.
        """
        memory, offset = segment.place(index)
        num_members = len(segment.members)
        self._segment, self._exchange, self._timeout_s = segment, exchange, timeout_s
        self._counts = [(offset + member * LINE) // 8 for member in range(num_members)]
        shape = _CAPACITY, num_values
        self._rows: NDArray[np.float64] = np.ndarray(shape, np.float64, memory, offset + num_members * LINE)
        self._count = 0
        """Rows that this rank has pushed or popped."""
        self._next_exchange = 0
        """As of the last row. Where all exchange between two rows (`run.any` in each step), the others are woken for a row."""

    def push(self, row: Sequence[float], *, wakes: bool) -> bool:
        """Push a row for the others, on the first rank; False if one of them has too many to pop. PeerLostError after an abort.

        `wakes`: whether they pop it at once, because the script does something together with them in each step.
        """
        segment, count = self._segment, self._count
        segment.check_aborted()  # first, as `pop` looks for rows first: so no rank is ahead of another after a loss
        if count - min(map(segment.words.__getitem__, self._counts[1:])) >= _CAPACITY:
            return False
        self._rows[count % _CAPACITY] = row
        self._count = segment.words[self._counts[0]] = count + 1
        word, next_exchange = self._exchange.next_of_first()
        if wakes or next_exchange != self._next_exchange:
            self._next_exchange = next_exchange
            segment.wake(word)
        return True

    def pop(self) -> NDArray[np.float64] | None:
        """Wait for the first rank; return the row that it has pushed, or None if it has begun an exchange instead.

        Raises:
            PeerLostError: it is gone, or the segment was aborted.
            TimeoutError: it is alive, but did neither in time.
        """
        segment, words, pushed = self._segment, self._segment.words, self._counts[0]
        word, begun = self._exchange.next_of_first()
        since_s = time.monotonic()
        deadline_s, look_s = since_s + self._timeout_s, since_s + LIVENESS_S
        while True:
            value = words[word]  # before the look for a row
            if words[pushed] > self._count:
                row: NDArray[np.float64] = self._rows[self._count % _CAPACITY].copy()
                self._count = words[self._counts[segment.index]] = self._count + 1
                return row
            if value >= begun:
                return None
            segment.check_aborted()
            now_s = time.monotonic()
            if look := now_s >= look_s:
                look_s = now_s + LIVENESS_S
            # It may have pushed or written its last row before it went.
            if (why := segment.why_gone(0, look=look)) and words[pushed] == self._count and words[word] < begun:
                raise PeerLostError(why)
            if now_s >= deadline_s:
                raise TimeoutError(
                    f"timed out after {self._timeout_s:g} s; rank {segment.members[0].rank} did not come"
                )
            segment.sleep(word, value, max(_LEAST_SLEEP_NS, int(1e9 * _LATE * (now_s - since_s))))

    def abort(self, reason: str) -> None:
        """End the exchanges of all members; see `SharedSegment.abort`."""
        self._segment.abort(reason)


def ring_layout(num_members: int, num_values: int) -> ChannelLayout:
    """Return the memory for a ring, as that of a channel."""
    return ChannelLayout(num_members, -(-_CAPACITY * 8 * num_values // (2 * num_members)))
