"""When devices come free, and the earliest time at which a gang finds enough of them; used by `forecast`."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence

from evenload.scheduler.core.layout import Layout
from evenload.scheduler.core.placement import PoolChoice


class Timeline:
    """Each device with the time from which it is free for good, given the jobs placed on it so far."""

    def __init__(self, layout: Layout, pool_of: Sequence[int], closed: Iterable[str], now_s: float) -> None:
        self._pool_of, self._host_of = pool_of, layout.host_of
        self._free_s = [now_s] * len(layout.devices)
        for device in closed:
            if device in layout.index:
                self._free_s[layout.index[device]] = math.inf
        self._closed = {slot for slot, time_s in enumerate(self._free_s) if time_s == math.inf}
        self._lines: dict[int, list[tuple[float, int]]] = {}
        for slot, time_s in enumerate(self._free_s):
            self._lines.setdefault(pool_of[slot], []).append((time_s, slot))
        for line in self._lines.values():
            line.sort()

    def free_s(self, slot: int) -> float:
        return self._free_s[slot]

    def occupy(self, slots: Iterable[int], until_s: float) -> None:
        for slot in slots:
            if slot in self._closed:
                continue
            line = self._lines[self._pool_of[slot]]
            del line[bisect_left(line, (self._free_s[slot], slot))]
            self._free_s[slot] = until_s
            insort(line, (until_s, slot))

    def earliest(self, choice: PoolChoice, num: int, from_s: float) -> tuple[float, tuple[int, ...]] | None:
        """Return the first time from `from_s` on with `num` free devices of the choice, and these devices; None for never."""
        best: tuple[float, tuple[int, ...]] | None = None
        for pools in choice.groups if choice.one_kind else (choice.pools,):
            found = self._on_one_host(pools, num, from_s) if choice.one_host else self._anywhere(pools, num, from_s)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        return best

    def _anywhere(self, pools: Sequence[int], num: int, from_s: float) -> tuple[float, tuple[int, ...]] | None:
        lines = [self._lines[pool] for pool in pools if pool in self._lines]
        first = sorted(entry for line in lines for entry in line[:num])[:num]
        if len(first) < num or first[-1][0] == math.inf:
            return None
        start_s = max(from_s, first[-1][0])
        # Of those free by then the ones that came free last: the others may serve an earlier job.
        usable = [line[max(0, end - num) : end] for line in lines if (end := bisect_right(line, (start_s, math.inf)))]
        last = sorted(entry for part in usable for entry in part)[-num:]
        return start_s, tuple(slot for _, slot in last)

    def _on_one_host(self, pools: Sequence[int], num: int, from_s: float) -> tuple[float, tuple[int, ...]] | None:
        found: dict[int, list[int]] = {}
        for time_s, slot in heapq.merge(*(self._lines[pool] for pool in pools if pool in self._lines)):
            if time_s == math.inf:
                break
            slots = found.setdefault(self._host_of[slot], [])
            slots.append(slot)
            if len(slots) == num:
                return max(from_s, time_s), tuple(slots)
        return None
