"""Free devices, and the best place for a gang among them.

A gang goes, in this order: into one host and one kind; into one host; into few hosts of one kind; into few hosts. Among
kinds the one of the most worth is tried first (`Pool.worth`), then the one with the least memory that suffices. Within a
kind ``pack`` takes the host whose free devices the gang fills best, so whole hosts stay whole; a gang larger than a host
takes whole hosts first and packs the rest. ``spread`` takes the emptiest hosts first.

Hosts are kept in buckets by how many devices they have free, one set of buckets for each set of pools in use,
so that finding a place doesn't look at all hosts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from evenload.scheduler.core.layout import Layout


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """The pools a job may use, as groups of one kind each, the best first."""

    groups: tuple[tuple[int, ...], ...]
    one_host: bool = False
    one_kind: bool = False
    pools: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", tuple(pool for group in self.groups for pool in group))


Place = tuple[int | None, int | None]
"""Where devices can serve a gang together: a host, and the number of a group; None where it may be any."""


def place_counter(
    choice: PoolChoice, pool_of: Sequence[int], host_of: Sequence[int]
) -> Callable[[Iterable[int]], dict[Place, int]]:
    """Return a function that counts the devices that a gang of this choice could use, by place."""
    kind_of = {pool: number for number, group in enumerate(choice.groups) for pool in group}
    one_host, one_kind = choice.one_host, choice.one_kind

    def counted(slots: Iterable[int]) -> dict[Place, int]:
        counts: dict[Place, int] = {}
        for slot in slots:
            if (kind := kind_of.get(pool_of[slot])) is not None:
                place = (host_of[slot] if one_host else None, kind if one_kind else None)
                counts[place] = counts.get(place, 0) + 1
        return counts

    return counted


Shares = list[tuple[int, int]]
"""Host index and how many devices to take there."""


class _Buckets:
    """Hosts by the number of their free devices in some pools."""

    def __init__(self) -> None:
        self.count: dict[int, int] = {}
        self.hosts: list[dict[int, None]] = [{}]
        self.total = 0
        self.top = 0

    def add(self, host: int, change: int) -> None:
        before = self.count.get(host, 0)
        after = before + change
        if before:
            del self.hosts[before][host]
        if after:
            while len(self.hosts) <= after:
                self.hosts.append({})
            self.hosts[after][host] = None
            self.count[host] = after
            self.top = max(self.top, after)
        else:
            self.count.pop(host, None)
        self.total += change
        while self.top and not self.hosts[self.top]:
            self.top -= 1

    def best_fit(self, num: int, without: frozenset[int] | set[int] = frozenset()) -> int | None:
        for count in range(num, self.top + 1):
            for host in self.hosts[count]:
                if host not in without:
                    return host
        return None


class FreeDevices:
    """Free devices, changed as a plan gives them out."""

    def __init__(self, layout: Layout, free: Sequence[int], pool_of: Sequence[int], packing: str) -> None:
        """Take the indices of the free devices; `pool_of` may be finer than the layout's own (reservations)."""
        self._host_of, self._pool_of = layout.host_of, pool_of
        self._spread = packing == "spread"
        self._host_size = layout.host_size
        self._free: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self._buckets: dict[tuple[int, ...], _Buckets] = {}
        self._by_pool: dict[int, list[_Buckets]] = {}
        self._failed: dict[PoolChoice, int] = {}
        by_host, host_of = self._free, layout.host_of
        for device in free:
            by_host[host_of[device]][pool_of[device]].append(device)
        self._num_of = Counter([pool_of[device] for device in free])
        self.num_free = len(free)

    def total(self, pools: tuple[int, ...]) -> int:
        return self._buckets_of(pools).total

    def free_pools(self) -> list[int]:
        """Return the pools with free devices."""
        return [pool for pool, num in self._num_of.items() if num]

    def is_hopeless(self, choice: PoolChoice, num: int) -> bool:
        """Return whether it is already known that there is no place for such a gang."""
        return num > self.num_free or self._failed.get(choice, num + 1) <= num

    def place(self, choice: PoolChoice, num: int) -> tuple[int, ...] | None:
        """Find the best place for a gang and take it; None if there is none."""
        if self.is_hopeless(choice, num):
            return None
        found = self._find(choice, num)
        if found is None:
            self._failed[choice] = num
            return None
        pools, shares = found
        return self._take_shares(pools, shares)

    def take(self, devices: Iterable[int]) -> None:
        """Take exactly these; those that aren't free are left out."""
        for device in devices:
            host, pool = self._host_of[device], self._pool_of[device]
            if device in self._free[host][pool]:
                self._free[host][pool].remove(device)
                self._changed(host, pool, -1)

    def give(self, devices: Iterable[int]) -> None:
        for device in devices:
            host, pool = self._host_of[device], self._pool_of[device]
            of_pool = self._free[host][pool]
            of_pool.append(device)
            of_pool.sort()
            self._changed(host, pool, 1)
        self._failed.clear()

    def free(self) -> list[int]:
        return sorted(d for pools in self._free.values() for devices in pools.values() for d in devices)

    def largest(self, choice: PoolChoice) -> int:
        """Return the most devices that a gang of this choice could get."""
        if choice.one_host:
            sets = choice.groups if choice.one_kind else (choice.pools,)
            return max((self._buckets_of(pools).top for pools in sets), default=0)
        if choice.one_kind:
            return max((self.total(group) for group in choice.groups), default=0)
        return self.total(choice.pools)

    def compact(self, choice: PoolChoice, most: int) -> int:
        """Return the most devices up to `most`, or a power of two below it, in as few hosts as can hold so many; 0 for none."""
        size = min(most, self.largest(choice))
        if self._spread:
            return size
        while size > 0:
            found = self._find(choice, size)
            if found is not None and len(found[1]) <= -(-size // self._host_size):
                return size
            size = 1 << ((size - 1).bit_length() - 1) if size > 1 else 0
        return 0

    def _changed(self, host: int, pool: int, change: int) -> None:
        self.num_free += change
        self._num_of[pool] += change
        for buckets in self._by_pool.get(pool, ()):
            buckets.add(host, change)

    def _buckets_of(self, pools: tuple[int, ...]) -> _Buckets:
        buckets = self._buckets.get(pools)
        if buckets is None:
            buckets = self._buckets[pools] = _Buckets()
            for host, by_pool in self._free.items():
                if count := sum(len(by_pool[pool]) for pool in pools if pool in by_pool):
                    buckets.add(host, count)
            for pool in pools:
                self._by_pool.setdefault(pool, []).append(buckets)
        return buckets

    def _find(self, choice: PoolChoice, num: int) -> tuple[tuple[int, ...], Shares] | None:
        is_one_set = choice.one_kind or len(choice.groups) == 1
        sets = choice.groups if is_one_set else (*choice.groups, choice.pools)
        ways = (self._in_one_host, self._over_hosts)
        for way in ways[:1] if choice.one_host else ways[1:] if self._spread else ways:
            for pools in sets:
                if (shares := way(self._buckets_of(pools), num)) is not None:
                    return pools, shares
        return None

    def _in_one_host(self, buckets: _Buckets, num: int) -> Shares | None:
        if self._spread:
            host = next(iter(buckets.hosts[buckets.top])) if 0 < num <= buckets.top else None
        else:
            host = buckets.best_fit(num)
        return None if host is None else [(host, num)]

    def _over_hosts(self, buckets: _Buckets, num: int) -> Shares | None:
        """Take the emptiest hosts; to pack, the last is the one that the rest of the gang fills best."""
        if buckets.total < num:
            return None
        shares: Shares = []
        for count in range(buckets.top, 0, -1):
            for host in buckets.hosts[count]:
                if num <= count and not self._spread:
                    break
                shares.append((host, min(count, num)))
                num -= min(count, num)
                if num == 0:
                    return shares
            if num <= count and not self._spread:
                last = buckets.best_fit(num, {host for host, _ in shares})
                if last is not None:
                    return [*shares, (last, num)]
        return None

    def _take_shares(self, pools: tuple[int, ...], shares: Shares) -> tuple[int, ...]:
        taken: list[int] = []
        for host, num in shares:
            by_pool = self._free[host]
            for pool in pools:
                part = by_pool.get(pool, [])[:num]
                taken += part
                num -= len(part)
        self.take(taken)
        return tuple(taken)
