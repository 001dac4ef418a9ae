"""Hosts and pools of equal devices: computed when devices change, shared by all snapshots until then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from evenload.scheduler.core.values import Device, Settings


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that are equal in all that matters, wherever they are."""

    kind: str
    memory_bytes: int
    speed: float
    price_per_hour: float
    power_w: float

    def worth(self, settings: Settings) -> float:
        """Return the speed less the cost, as the settings weigh money and energy."""
        return self.speed - settings.price_weight * self.price_per_hour - settings.energy_weight * self.power_w / 1000.0


@dataclass(frozen=True)
class Layout:
    """All devices by index, in the order in which they were added; indices of each one's host and pool."""

    devices: tuple[Device, ...]
    index: Mapping[str, int]
    hosts: tuple[str, ...]
    host_of: tuple[int, ...]
    pools: tuple[Pool, ...]
    pool_of: tuple[int, ...]
    host_size: int
    """Devices of the largest host."""
    makeups: tuple[tuple[tuple[int, int], ...], ...]
    """Contents of hosts as (pool, number) pairs; equal hosts once."""
    pool_sizes: tuple[int, ...]

    @property
    def has_speeds(self) -> bool:
        """True if some devices are faster than others."""
        return len({pool.speed for pool in self.pools}) > 1

    def mean_cost(self, settings: Settings) -> float:
        """Return the cost of a device in parts of a device's speed, as the settings weigh money and energy."""
        if not settings.price_weight and not settings.energy_weight:
            return 0.0
        costs = [pool.speed - pool.worth(settings) for pool in self.pools]
        return sum(costs[pool] for pool in self.pool_of) / max(1, len(self.pool_of))


def layout_of(devices: Iterable[Device]) -> Layout:
    """Compute the layout. Devices of one host count as near each other whatever their kind."""
    devices = tuple(devices)
    hosts: dict[str, int] = {}
    pools: dict[tuple[str, int, float, float, float], int] = {}
    host_of, pool_of = [], []
    for device in devices:
        host_of.append(hosts.setdefault(device.host, len(hosts)))
        key = (device.kind, device.memory_bytes, device.speed, device.price_per_hour, device.power_w)
        pool_of.append(pools.setdefault(key, len(pools)))
    by_host: list[Counter[int]] = [Counter() for _ in hosts]
    for host, pool in zip(host_of, pool_of, strict=True):
        by_host[host][pool] += 1
    sizes = Counter(pool_of)
    return Layout(
        devices=devices,
        index={device.id: index for index, device in enumerate(devices)},
        hosts=tuple(hosts),
        host_of=tuple(host_of),
        pools=tuple(Pool(*key) for key in pools),
        pool_of=tuple(pool_of),
        host_size=max(Counter(host_of).values(), default=0),
        makeups=tuple({tuple(sorted(counts.items())): None for counts in by_host}),
        pool_sizes=tuple(sizes[pool] for pool in range(len(pools))),
    )
