"""Adds up the buckets of lanes: whoever brings the last part of a bucket adds all parts, in the order of the lanes.

Every lane sends its buckets in one order, as ranks do, so the n-th of each lane belong together. The sum goes into the first
lane's bucket, beside the user's parameters: nobody else needs it. On a GPU it runs on a stream of its own, beside the
backward.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class _Bucket:
    """One bucket of all lanes."""

    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    ready: list[torch.cuda.Event] = field(default_factory=list)
    """Recorded where a part on a GPU was complete."""
    summed: torch.cuda.Event | None = None


class _Waiting:
    """The sum of one bucket, for the reducer that owns the result."""

    def __init__(self, bucket: _Bucket, home: torch.device) -> None:
        self._bucket = bucket
        self._home = home

    def wait(self) -> None:
        """Whatever is computed next sees the sum. All parts have been brought: it is called after the last of them."""
        if self._bucket.summed is not None:
            torch.cuda.current_stream(self._home).wait_event(self._bucket.summed)


class LaneSums:
    """The sums of one attempt; the first member's buckets receive them."""

    def __init__(self, home: torch.device) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._members: tuple[int, ...] = ()
        self._counts: dict[int, int] = {}
        self._buckets: list[_Bucket] = []
        self._stream: torch.cuda.Stream | None = None

    def begin(self, members: Sequence[int]) -> None:
        """An attempt of these lanes begins; the first of them is at home."""
        self._members = tuple(members)
        self._counts = dict.fromkeys(self._members, 0)
        self._buckets = []

    def of(self, index: int) -> LanePart:
        """Where one lane brings its buckets."""
        return LanePart(self, index)

    def bring(self, index: int, flat: torch.Tensor) -> _Waiting:
        """A lane's bucket is complete; adds up if it is the last one's."""
        ready = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
        with self._lock:
            number = self._counts[index]
            self._counts[index] += 1
            if number == len(self._buckets):
                self._buckets.append(_Bucket())
            bucket = self._buckets[number]
            bucket.parts[index] = flat
            if ready is not None:
                bucket.ready.append(ready)
            complete = len(bucket.parts) == len(self._members)
        if complete:
            self._add(bucket)
        return _Waiting(bucket, self._home)

    def settle(self) -> None:
        """Waits until nothing is added any more: what was brought may be overwritten."""
        if self._stream is not None:
            self._stream.synchronize()

    @torch.no_grad()
    def _add(self, bucket: _Bucket) -> None:
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


class LanePart:
    """What the reducer of one lane sums through."""

    def __init__(self, sums: LaneSums, index: int) -> None:
        self._sums = sums
        self._index = index

    def sum_async(self, flat: torch.Tensor) -> _Waiting:
        """Brings one bucket."""
        return self._sums.bring(self._index, flat)
