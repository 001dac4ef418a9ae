"""Hosts and pools of equal devices: computed when devices change, shared by all snapshots until then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from evenload.scheduler.core.values import Device, Needs


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that are equal in all that matters, wherever they are."""

    kind: str
    memory_bytes: int
    speed: float
    price_per_hour: float
    cheap_price_per_hour: float

    def suits(self, needs: Needs) -> bool:
        """Return whether each device of it is one that a job of these needs can use."""
        return (not needs.kinds or self.kind in needs.kinds) and self.memory_bytes >= needs.memory_bytes


@dataclass(frozen=True)
class Layout:
    """All devices by index, in the order in which they were added; indices of each one's host and pool."""

    devices: tuple[Device, ...]
    index: Mapping[str, int]
    host_of: tuple[int, ...]
    pools: tuple[Pool, ...]
    pool_of: tuple[int, ...]
    host_size: int
    """Devices of the largest host; 1 without devices."""
    choices: dict[Any, Any] = field(default_factory=dict, compare=False)
    """Results of `PoolChoices` while nothing was reserved."""
    _most: dict[Needs, int] = field(default_factory=dict, compare=False)

    @property
    def has_speeds(self) -> bool:
        """True if some devices are faster than others."""
        return len({pool.speed for pool in self.pools}) > 1

    def most_together(self, needs: Needs) -> int:
        """Return how many of all devices could serve a job together."""
        if needs not in self._most:
            fits = [pool.suits(needs) for pool in self.pools]
            counts = Counter(
                (host if needs.one_host else None, self.pools[pool].kind if needs.one_kind else None)
                for host, pool in zip(self.host_of, self.pool_of, strict=True)
                if fits[pool]
            )
            self._most[needs] = max(counts.values(), default=0)
        return self._most[needs]


def layout_of(devices: Iterable[Device]) -> Layout:
    """Compute the layout. Devices of one host count as near each other whatever their kind; fast hosts have low numbers."""
    devices = tuple(devices)
    hosts = {h: n for n, h in enumerate(dict.fromkeys(d.host for d in sorted(devices, key=lambda d: -d.speed)))}
    pools: dict[Pool, int] = {}
    pool_of = []
    for device in devices:
        price, cheap = device.price_per_hour, device.cheap_price_per_hour
        key = Pool(device.kind, device.memory_bytes, device.speed, price, price if cheap is None else cheap)
        pool_of.append(pools.setdefault(key, len(pools)))
    return Layout(
        devices=devices,
        index={device.id: index for index, device in enumerate(devices)},
        host_of=tuple([hosts[device.host] for device in devices]),
        pools=tuple(pools),
        pool_of=tuple(pool_of),
        host_size=max(Counter([device.host for device in devices]).values(), default=1),
    )
