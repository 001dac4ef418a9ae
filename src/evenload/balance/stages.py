"""Best cut of a chain of layers into contiguous pieces, one for each device.

Nothing is pipelined: while one device computes the others wait, so a step takes the **sum** of all pieces' times and of the
ways between them (the formula below is the plain cost of running a chain in order; a pipeline would ask for the maximum
instead). With layer l on device d(l), device 0 where the batch comes from and where the output goes back to:

    T = Σ_l s(l, d(l)) + x(0, d(1), b_1) + Σ_{cuts before l} 2·x(d(l-1), d(l), b_l) + 2·x(d(n), 0, b_out)
    x(a, b, bytes) = latency(a, b) + bytes / bandwidth(a, b)

s are seconds of forward and backward; activations cross a cut forwards and their gradients come back, hence the 2. Without
pipelining all activations live at the end of the forward, so memory adds up too:

    M(d) = Σ_{l on d} (held_l + activation_l) <= limit(d)

It follows that a fast device gets as much as fits, and that a device which only slows the chain gets nothing. Where
devices are equal, T hardly differs between cuts, but memory does: of all cuts that cost at most `slack` more than the
fastest, the one is taken whose fullest device is least full.

The minimum of T is found exactly by dynamic programming over (layers placed, last device used), as chains are commonly cut
(Bokhari 1988, "Partitioning problems in parallel, pipelined, and distributed computing"), in O(layers x devices²): for each
device the best beginning of a piece is the minimum over a sliding window, because memory only grows with the piece. The
least peak is found by bisection over that minimum, which can only rise as the limits shrink.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from evenload.balance.values import LinkSpeed

_PRECISION = 1e-9
"""Relative; the bisection ends where peaks are closer than that."""


@dataclass(frozen=True)
class LayerCost:
    """Memory, input size and seconds on each device of one layer of a chain."""

    held_bytes: int
    """Parameters, gradients, optimizer state, buffers: what lies on its device all the time."""
    activation_bytes: int
    """Kept from its forward to its backward."""
    input_bytes: int
    """Of the activations that come into it."""
    seconds: tuple[float, ...]
    """Forward and backward on each device; infinite where it can't run."""

    @property
    def num_bytes(self) -> int:
        return self.held_bytes + self.activation_bytes


@dataclass(frozen=True)
class Cut:
    """The layers of each device, and the cost."""

    bounds: tuple[int, ...]
    """Device d has the layers ``[bounds[d], bounds[d + 1])``; an empty range where it is left out."""
    expected_s: float
    """T of the whole chain, transfers included."""
    device_s: tuple[float, ...]
    """Of the layers of each device, without transfers."""
    device_bytes: tuple[int, ...]

    def device_of(self, layer_index: int) -> int:
        return next(d for d in range(len(self.device_bytes)) if self.bounds[d] <= layer_index < self.bounds[d + 1])


def cut_chain(
    layers: Sequence[LayerCost],
    limits_bytes: Sequence[int],
    links: Sequence[Sequence[LinkSpeed]],
    output_bytes: int = 0,
    slack: float = 0.0,
) -> Cut | None:
    """Return the best cut of a chain over devices in their given order; None where no cut keeps to the limits.

    ``links[a][b]`` is the way from device a to device b; only a < b, and those back to 0, are used. ``output_bytes`` go back
    to device 0. ``slack`` is the part of the least time that may be given for even memory; 0.02 allows 2 %.
    """
    chain = _CutSolver(layers, links, output_bytes)
    best = chain.fastest(limits_bytes)
    if best is None:
        return None
    longest_s = best.expected_s * (1.0 + slack)
    low, high = 0.0, _peak(best, limits_bytes)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2.0
        tighter = chain.fastest([math.floor(limit * middle) for limit in limits_bytes])
        if tighter is None or tighter.expected_s > longest_s:
            low = middle
        else:
            best = tighter
            high = _peak(best, limits_bytes)
    return best


def _peak(cut: Cut, limits_bytes: Sequence[int]) -> float:
    """Return how full the fullest device is; 1 is full."""
    pairs = zip(cut.device_bytes, limits_bytes, strict=True)
    return max((used / limit for used, limit in pairs if used), default=0.0)


class _CutSolver:
    """One chain on its devices; sums that every solve needs, added up once."""

    def __init__(self, layers: Sequence[LayerCost], links: Sequence[Sequence[LinkSpeed]], output_bytes: int) -> None:
        self._layers = layers
        self._links = links
        self._output_bytes = output_bytes
        self._num_devices = len(links)
        self._bytes = list(accumulate((layer.num_bytes for layer in layers), initial=0))
        self._seconds = [
            list(accumulate((_finite(layer.seconds[d]) for layer in layers), initial=0.0))
            for d in range(self._num_devices)
        ]
        # A piece on d that ends after layer i can't begin before first_start[d][i]: a layer between doesn't run there.
        self._first_start = [
            [0, *_last_true([not math.isfinite(layer.seconds[d]) for layer in layers])]
            for d in range(self._num_devices)
        ]

    def fastest(self, limits_bytes: Sequence[int]) -> Cut | None:
        """Return the cut of least T within these limits."""
        count, num_devices = len(self._layers), self._num_devices
        # end[d][i]: least time of the first i layers, the last of them on d. enter[d][k]: of the first k layers and the way
        # of their output to d, where a piece begins.
        end = [[math.inf] * (count + 1) for _ in range(num_devices)]
        began = [[-1] * (count + 1) for _ in range(num_devices)]
        came_from = [[-1] * (count + 1) for _ in range(num_devices)]
        enter = [[math.inf] * (count + 1) for _ in range(num_devices)]
        windows: list[deque[int]] = [deque() for _ in range(num_devices)]
        for i in range(count + 1):
            for d in range(num_devices):
                if i:
                    self._end_piece(i, d, limits_bytes[d], windows[d], end, began, enter)
                if i < count:
                    self._begin_piece(i, d, windows[d], end, came_from, enter)
        finals = [end[d][count] + 2.0 * self._way_s(d, 0, self._output_bytes) for d in range(num_devices)]
        last = min(range(num_devices), key=lambda d: finals[d])
        if not count or not math.isfinite(finals[last]):
            return None
        return self._trace(last, finals[last], began, came_from)

    def _end_piece(
        self,
        i: int,
        d: int,
        limit_bytes: int,
        window: deque[int],
        end: list[list[float]],
        began: list[list[int]],
        enter: list[list[float]],
    ) -> None:
        """Find the best piece on d whose last layer is i - 1; starts that lie too far back leave the window for good."""
        while window and (self._bytes[i] - self._bytes[window[0]] > limit_bytes or window[0] < self._first_start[d][i]):
            window.popleft()
        if window:
            start = window[0]
            end[d][i] = enter[d][start] + (self._seconds[d][i] - self._seconds[d][start])
            began[d][i] = start

    def _begin_piece(
        self,
        i: int,
        d: int,
        window: deque[int],
        end: list[list[float]],
        came_from: list[list[int]],
        enter: list[list[float]],
    ) -> None:
        """Compute the cost of starting a piece on d with layer i; the window keeps the starts that can still be best."""
        input_bytes = self._layers[i].input_bytes
        if i == 0:
            enter[d][0] = self._way_s(0, d, input_bytes)
        for before in range(d):
            cost_s = end[before][i] + 2.0 * self._way_s(before, d, input_bytes)
            if cost_s < enter[d][i]:
                enter[d][i], came_from[d][i] = cost_s, before
        if not math.isfinite(enter[d][i]):
            return
        base_s = enter[d][i] - self._seconds[d][i]
        while window and enter[d][window[-1]] - self._seconds[d][window[-1]] >= base_s:
            window.pop()
        window.append(i)

    def _way_s(self, a: int, b: int, num_bytes: int) -> float:
        if a == b:
            return 0.0
        link = self._links[a][b]
        return link.latency_s + num_bytes / link.bandwidth_bytes_per_s

    def _trace(self, last: int, total_s: float, began: list[list[int]], came_from: list[list[int]]) -> Cut:
        starts: dict[int, tuple[int, int]] = {}
        d, i = last, len(self._layers)
        while True:
            start = began[d][i]
            starts[d] = (start, i)
            if start == 0:
                break
            d, i = came_from[d][start], start
        bounds = [0]
        for device in range(self._num_devices):
            bounds.append(starts.get(device, (0, bounds[-1]))[1])
        pieces = list(pairwise(bounds))
        return Cut(
            bounds=tuple(bounds),
            expected_s=total_s,
            device_s=tuple(
                math.fsum(layer.seconds[device] for layer in self._layers[low:high])
                for device, (low, high) in enumerate(pieces)
            ),
            device_bytes=tuple(self._bytes[high] - self._bytes[low] for low, high in pieces),
        )


def _finite(seconds: float) -> float:
    return seconds if math.isfinite(seconds) else 0.0


def _last_true(flags: Sequence[bool]) -> list[int]:
    """Return for each end i the index after the last true flag before it."""
    found, after = [], 0
    for index, flag in enumerate(flags):
        after = index + 1 if flag else after
        found.append(after)
    return found
