"""Free devices, and the best place for a gang among them.

A gang goes, in this order: into one host and one kind; into one host; into few hosts of one kind; into few hosts. Among
kinds the fastest is tried first, then the one with the least memory that suffices. Within a
kind ``pack`` takes the host whose free devices the gang fills best, so whole hosts stay whole; a gang larger than a host
takes whole hosts first and packs the rest. ``spread`` takes the emptiest hosts first.

Hosts are kept in buckets by how many devices they have free, one set of buckets for each set of pools in use,
so that finding a place doesn't look at all hosts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from evenload.scheduler.core.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class PoolChoice:
    """The pools a job may use, as groups of one kind each, the best first; see `pool_choice`."""

    groups: tuple[tuple[int, ...], ...]
    one_host: bool = False
    one_kind: bool = False
    pools: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", tuple(pool for group in self.groups for pool in group))


@lru_cache(maxsize=4096)
def pool_choice(groups: tuple[tuple[int, ...], ...], one_host: bool, one_kind: bool) -> PoolChoice:
    """Return one object for equal choices: as a key it is compared by its address."""
    return PoolChoice(groups, one_host, one_kind)


Place = tuple[int | None, int | None]
"""Where devices can serve a gang together: a host, and the number of a group; None where it may be any."""


def place_finder(choice: PoolChoice, pool_of: Sequence[int], host_of: Sequence[int]) -> Callable[[int], Place | None]:
    """Return a function from a device to its place for a gang of this choice; None if that can't use it."""
    kind_of = {pool: number for number, group in enumerate(choice.groups) for pool in group}
    one_host, one_kind = choice.one_host, choice.one_kind

    def place_of(slot: int) -> Place | None:
        kind = kind_of.get(pool_of[slot])
        return None if kind is None else (host_of[slot] if one_host else None, kind if one_kind else None)

    return place_of


def _lowest_first(hosts: int) -> Iterator[int]:
    """Return the numbers of the hosts in a set; bit h of that is host h."""
    while hosts:
        lowest = hosts & -hosts
        yield lowest.bit_length() - 1
        hosts ^= lowest


class _Buckets:
    """Sets of hosts by the number of their free devices in some pools."""

    def __init__(self, pools: tuple[int, ...]) -> None:
        self.pools = pools
        self.count: dict[int, int] = {}
        self.hosts = [0]
        self.total = 0
        self.top = 0

    def add(self, host: int, change: int) -> None:
        before = self.count.get(host, 0)
        after = before + change
        while len(self.hosts) <= after:
            self.hosts.append(0)
        if before:
            self.hosts[before] ^= 1 << host
        if after:
            self.hosts[after] ^= 1 << host
        self.count[host] = after
        self.total += change
        self.top = max(self.top, after)
        while self.top and not self.hosts[self.top]:
            self.top -= 1

    def fitting(self, num: int) -> Iterator[int]:
        """Return the hosts with at least `num`, those with the fewest first, the lowest of equal ones."""
        return (host for count in range(num, self.top + 1) for host in _lowest_first(self.hosts[count]))


class FreeDevices:
    """Devices that are free, and those that come free soon, changed as a plan gives them out.

    Devices that are coming count as pools of their own, ``~pool``: what may wait for some also looks at these.
    """

    def __init__(
        self, layout: Layout, free: Sequence[int], pool_of: Sequence[int], packing: str, coming: Iterable[int] = ()
    ) -> None:
        """Take the indices of the free devices; `pool_of` may be finer than the layout's own (reservations)."""
        self._host_of, self._pool_of = layout.host_of, pool_of
        self._spread = packing == "spread"
        self._host_size = layout.host_size
        self._free: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)
        """Host → pool → its free devices, growing."""
        self._buckets: dict[tuple[int, ...], _Buckets] = {}
        self._by_pool: defaultdict[int, list[_Buckets]] = defaultdict(list)
        self._searched: dict[tuple[PoolChoice, bool], list[_Buckets]] = {}
        self.num_free = self.num_coming = 0
        self.give(free)
        self.give(coming, soon=True)

    def free(self, soon: bool = False) -> list[int]:
        """Return the free devices, and those that come free `soon`."""
        by_pool = [item for pools in self._free.values() for item in pools.items()]
        return sorted(device for pool, devices in by_pool if soon or pool >= 0 for device in devices)

    def has(self, pool: int) -> bool:
        """Return whether some device of a pool is free now."""
        return self._buckets_of((pool,)).total > 0

    def largest(self, choice: PoolChoice, soon: bool = False) -> int:
        """Return the most devices that a gang of this choice could get."""
        one_host = choice.one_host
        return max([buckets.top if one_host else buckets.total for buckets in self._searched_for(choice, soon)])

    def find(self, choice: PoolChoice, num: int, soon: bool = False) -> tuple[int, ...] | None:
        """Return the best place for a gang; None if there is none."""
        if num > self.largest(choice, soon):
            return None
        buckets, shares = self._shares(choice, num, soon)
        found: list[int] = []
        for host, part in shares.items():
            found += [device for pool in buckets.pools for device in self._free[host].get(pool, ())][:part]
        return tuple(found)

    def place(self, choice: PoolChoice, num: int, soon: bool = False) -> tuple[int, ...] | None:
        """Find the best place for a gang and take it; None if there is none."""
        if (devices := self.find(choice, num, soon)) is not None:
            self.take(devices)
        return devices

    def take(self, devices: Iterable[int]) -> None:
        """Take exactly these, which are free or coming."""
        for device in devices:
            host, pool = self._host_of[device], self._pool_of[device]
            if device not in self._free[host].get(pool, ()):
                pool = ~pool
            self._free[host][pool].remove(device)
            self._changed(host, pool, -1)

    def give(self, devices: Iterable[int], soon: bool = False) -> None:
        """Make devices free, now or soon."""
        for device in devices:
            host, pool = self._host_of[device], self._pool_of[device]
            if soon:
                pool = ~pool
            of_pool = self._free[host].setdefault(pool, [])
            of_pool.append(device)
            of_pool.sort()
            self._changed(host, pool, 1)

    def compact(self, choice: PoolChoice, most: int, soon: bool = False) -> int:
        """Return the most devices up to `most`, or a power of two below it, in as few hosts as can hold so many; 0 for none."""
        size = min(most, self.largest(choice, soon))
        while size > 0 and not self._spread:
            if len(self._shares(choice, size, soon)[1]) <= -(-size // self._host_size):
                break
            size = 1 << ((size - 1).bit_length() - 1) if size > 1 else 0
        return size

    def _changed(self, host: int, pool: int, change: int) -> None:
        if pool >= 0:
            self.num_free += change
        else:
            self.num_coming += change
        for buckets in self._by_pool[pool]:
            buckets.add(host, change)

    def _searched_for(self, choice: PoolChoice, soon: bool) -> list[_Buckets]:
        """Return where to look: each kind, and all together where they may be mixed."""
        if (known := self._searched.get((choice, soon))) is not None:
            return known
        is_one_set = choice.one_kind or len(choice.groups) == 1
        sets = choice.groups if is_one_set else (*choice.groups, choice.pools)
        if soon:
            sets = tuple([(*pools, *[~pool for pool in pools]) for pools in sets])
        found = self._searched[choice, soon] = [self._buckets_of(pools) for pools in sets or ((),)]
        return found

    def _buckets_of(self, pools: tuple[int, ...]) -> _Buckets:
        buckets = self._buckets.get(pools)
        if buckets is None:
            buckets = self._buckets[pools] = _Buckets(pools)
            for host, by_pool in self._free.items():
                if count := sum([len(by_pool[pool]) for pool in pools if pool in by_pool]):
                    buckets.add(host, count)
            for pool in pools:
                self._by_pool[pool].append(buckets)
        return buckets

    def _shares(self, choice: PoolChoice, num: int, soon: bool) -> tuple[_Buckets, Mapping[int, int]]:
        """Return host → how many devices to take there, for a gang that is known to have a place."""
        searched = self._searched_for(choice, soon)
        if not self._spread:
            for buckets in searched:
                if (host := next(buckets.fitting(num), None)) is not None:
                    return buckets, {host: num}
        buckets = next(b for b in searched if num <= (b.top if choice.one_host else b.total))
        return buckets, self._over_hosts(buckets, num)

    def _over_hosts(self, buckets: _Buckets, num: int) -> Mapping[int, int]:
        """Take the emptiest hosts; to pack, the last is the one that the rest of the gang fills best."""
        shares: dict[int, int] = {}
        for count in range(buckets.top, 0, -1):
            for host in _lowest_first(buckets.hosts[count]):
                if num <= count:
                    last = host if self._spread else next(h for h in buckets.fitting(num) if h not in shares)
                    return shares | {last: num}
                shares[host] = count
                num -= count
        raise ValueError(f"there are {num} devices too few for the gang")
