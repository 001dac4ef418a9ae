"""Measure each device's speed in earlier calls of a module, and split the next call accordingly."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch

from evenload.balance.cost import CostSample, fit_cost
from evenload.balance.split import even_shares, split_batch

_FIRST_CALLS = 4
"""Measured calls of each device before its speed is used; the very first call is not measured."""
_KEPT_CALLS = 16
_FIRST_RETRY, _LAST_RETRY = 8, 512
"""Calls without samples after which a device gets one, as it may be faster by now; doubles each time."""


@contextlib.contextmanager
def timed(device: torch.device) -> Iterator[Callable[[], float]]:
    """Time the body; the yielded function returns the seconds later, so that nothing waits for a GPU now."""
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()

        def elapsed_s() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        yield elapsed_s
        end.record()
        return
    began_s, spent = time.perf_counter(), [0.0]
    yield lambda: spent[0]
    spent[0] = time.perf_counter() - began_s


class DeviceSpeeds:
    """The times of each device's parts in the last calls of one module."""

    def __init__(self, num_devices: int) -> None:
        self._points: list[deque[CostSample]] = [deque(maxlen=_KEPT_CALLS) for _ in range(num_devices)]
        self._is_warm = [False] * num_devices
        self._is_known = False
        self._returning: set[int] = set()
        self._absent = [0] * num_devices
        self._retry_after = [_FIRST_RETRY] * num_devices
        self._pending: dict[int, tuple[int, Callable[[], float]]] = {}
        self._calls = 0

    def add(self, parts: Mapping[int, tuple[int, Callable[[], float]]]) -> None:
        """Record a call: for each device its samples, and a function that returns the seconds."""
        self._pending = dict(parts)

    def shares(self, num_samples: int) -> list[int]:
        self._collect()
        self._calls += 1
        self._is_known = self._is_known or all(len(points) >= _FIRST_CALLS for points in self._points)
        if not self._is_known:
            return list(even_shares(num_samples, len(self._points)))
        costs = [fit_cost(list(points)).cost for points in self._points]
        shares = list(split_batch(num_samples, costs).shares)
        for index, share in enumerate(shares):
            self._absent[index] = 0 if share else self._absent[index] + 1
            if self._absent[index] >= self._retry_after[index] and num_samples > len(shares):
                self._absent[index], self._retry_after[index] = 0, min(2 * self._retry_after[index], _LAST_RETRY)
                shares[max(range(len(shares)), key=shares.__getitem__)] -= 1
                shares[index] = 1
                self._returning.add(index)
        return shares

    def _collect(self) -> None:
        pending, self._pending = self._pending, {}
        for index, (num_samples, seconds) in pending.items():
            time_s = seconds()
            if index in self._returning:
                self._returning.discard(index)
                self._points[index].clear()  # earlier times are outdated
            if self._is_warm[index] and time_s > 0:
                self._points[index].append(CostSample(self._calls, num_samples, 1, time_s))
            self._is_warm[index] = True  # a first call loads kernels and memory
