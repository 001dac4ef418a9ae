"""Devices of a cluster from a short text: ``16x4`` is 16 hosts of 4 devices, ``1x8:a100,2x4:v100`` is two kinds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from evenload.errors import ConfigError
from evenload.scheduler.core.values import Device

_PART = re.compile(r"(?P<hosts>\d+)x(?P<size>\d+)(?::(?P<kind>[\w.-]+))?")


@dataclass(frozen=True)
class KindFacts:
    """What one kind of device is taken to be like."""

    speed: float = 1.0
    price_per_hour: float = 0.0
    power_w: float = 0.0
    memory_bytes: int = 0


def devices_of(text: str, facts: Mapping[str, KindFacts] | None = None) -> tuple[Device, ...]:
    """The devices, hosts numbered in the order of the text.

    Raises:
        ConfigError: the text is not of the form, or facts are given of a kind that it doesn't name.
    """
    facts = facts or {}
    devices: list[Device] = []
    num_hosts = 0
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or not int(match["hosts"]) or not int(match["size"]):
            raise ConfigError(f"cluster {text!r}: expected HOSTSxDEVICES[:KIND], such as 16x4 or 1x8:a100,2x4:v100")
        kind = match["kind"] or "gpu"
        fact = facts.get(kind, KindFacts())
        for _ in range(int(match["hosts"])):
            host = f"host{num_hosts}"
            num_hosts += 1
            for number in range(int(match["size"])):
                devices.append(
                    Device(
                        id=f"{host}:{number}",
                        host=host,
                        kind=kind,
                        memory_bytes=fact.memory_bytes,
                        speed=fact.speed,
                        price_per_hour=fact.price_per_hour,
                        power_w=fact.power_w,
                    )
                )
    kinds = {device.kind for device in devices}
    if strange := facts.keys() - kinds:
        raise ConfigError(
            f"facts of kind {', '.join(sorted(strange))}, but cluster {text!r} has only {', '.join(sorted(kinds))}"
        )
    return tuple(devices)


@dataclass(frozen=True)
class Shape:
    """The devices that one job has, as far as its speed depends on them."""

    per_host: tuple[int, ...]
    """How many in each host, in the order of the hosts."""
    kinds: tuple[str, ...]
    """Of each device."""
    speeds: tuple[float, ...]

    @property
    def num_devices(self) -> int:
        """All of them."""
        return len(self.kinds)


def shape_of(devices: tuple[Device, ...]) -> Shape:
    """What a program sees of its devices."""
    hosts: dict[str, int] = {}
    for device in devices:
        hosts[device.host] = hosts.get(device.host, 0) + 1
    return Shape(
        tuple(hosts.values()), tuple(device.kind for device in devices), tuple(device.speed for device in devices)
    )
