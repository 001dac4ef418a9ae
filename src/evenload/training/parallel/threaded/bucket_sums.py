"""Add up the gradient buckets of all replicas: the replica that completes a bucket adds the parts, in order of replicas.

Every replica sends its buckets in one order, as ranks do, so the n-th of each belong together. The first replica's bucket
receives the sum, on the device of the user's parameters. On a GPU the sum runs on a stream of its own, beside the backward.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class _BucketParts:
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    ready: list[torch.cuda.Event] = field(default_factory=list)
    """Recorded when a part on a GPU was complete."""
    summed: torch.cuda.Event | None = None


class _PendingSum:
    """The sum of one bucket, for the reducer that owns the result."""

    def __init__(self, bucket: _BucketParts, home: torch.device) -> None:
        self._bucket = bucket
        self._home = home

    def wait(self) -> None:
        """Order later computation after the sum; called after the last part was added."""
        if self._bucket.summed is not None:
            torch.cuda.current_stream(self._home).wait_event(self._bucket.summed)


class BucketSums:
    """The sums of one attempt, on the device `home` of the first replica."""

    def __init__(self, home: torch.device) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._members: tuple[int, ...] = ()
        self._counts: dict[int, int] = {}
        self._buckets: list[_BucketParts] = []
        self._stream: torch.cuda.Stream | None = None

    def begin(self, members: Sequence[int]) -> None:
        self._members = tuple(members)
        self._counts = dict.fromkeys(self._members, 0)
        self._buckets = []

    def add(self, index: int, flat: torch.Tensor) -> _PendingSum:
        """Add a replica's complete bucket; the last replica of a bucket computes its sum."""
        ready = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
        with self._lock:
            number = self._counts[index]
            self._counts[index] += 1
            if number == len(self._buckets):
                self._buckets.append(_BucketParts())
            bucket = self._buckets[number]
            bucket.parts[index] = flat
            if ready is not None:
                bucket.ready.append(ready)
            complete = len(bucket.parts) == len(self._members)
        if complete:
            self._sum(bucket)
        return _PendingSum(bucket, self._home)

    def wait(self) -> None:
        """Wait for all sums under way, so that the buckets may be overwritten."""
        if self._stream is not None:
            self._stream.synchronize()

    @torch.no_grad()
    def _sum(self, bucket: _BucketParts) -> None:
        total, *others = (bucket.parts[member] for member in self._members)
        if not others:
            return
        if self._home.type != "cuda":
            for part in others:
                total.add_(part.to(self._home))
            return
        with torch.cuda.device(self._home):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._home)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                for event in bucket.ready:
                    self._stream.wait_event(event)
                for part in others:
                    total.add_(part.to(self._home, non_blocking=True))
                bucket.summed = self._stream.record_event()


class ReplicaBuckets:
    def __init__(self, sums: BucketSums, index: int) -> None:
        self._sums = sums
        self._index = index

    def sum_async(self, flat: torch.Tensor) -> _PendingSum:
        return self._sums.add(self._index, flat)
