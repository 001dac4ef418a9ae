"""Devices of a cluster from a short text: ``16x4`` is 16 hosts of 4 devices, ``1x8:a100,2x4:v100`` is two kinds.

Where a queue's own record is simulated, ``own`` are its devices, ``own+1`` one card more of its most frequent kind, and
``own,1x4:a100`` a host more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from evenload.errors import ConfigError
from evenload.scheduler.core.values import Device

_OWN = re.compile(r"own(?:\+(?P<more>\d+))?")
_PART = re.compile(r"(?P<hosts>\d+)x(?P<size>\d+)(?::(?P<kind>[\w.-]+))?")


@dataclass(frozen=True)
class KindFacts:
    """Properties of one kind of device; None if not given."""

    speed: float | None = None
    price_per_hour: float | None = None
    cheap_price_per_hour: float | None = None
    power_w: float | None = None
    memory_bytes: int | None = None

    def on(self, device: Device) -> Device:
        return replace(device, **{name: value for name, value in asdict(self).items() if value is not None})


def devices_of(
    text: str, facts: Mapping[str, KindFacts] | None = None, own: tuple[Device, ...] = ()
) -> tuple[Device, ...]:
    """Return the devices of a cluster text, hosts numbered in its order.

    Args:
        text: see the module.
        facts: properties of kinds, also of those in `own`.
        own: the devices of the queue whose record is simulated.

    Raises:
        ConfigError: the text is invalid, or facts are given for a kind that it doesn't name.
    """
    facts = facts or {}
    devices: list[Device] = []
    num_hosts = 0
    taken: set[str] = set()
    for part in text.split(","):
        if (of_queue := _OWN.fullmatch(part.strip())) is not None and not devices:
            devices += _own(own, int(of_queue["more"] or 0), facts)
            taken = {device.host for device in own}
            continue
        match = _PART.fullmatch(part.strip())
        if match is None or not int(match["hosts"]) or not int(match["size"]):
            raise ConfigError(
                f"cluster {text!r}: expected HOSTSxDEVICES[:KIND], such as 16x4 or 1x8:a100,2x4:v100; or own, own+N "
                f"(N cards more) or own,HOSTSxDEVICES[:KIND] for those of a queue's record"
            )
        kind = match["kind"] or "gpu"
        fact = facts.get(kind, KindFacts())
        for _ in range(int(match["hosts"])):
            while f"host{num_hosts}" in taken:
                num_hosts += 1
            host = f"host{num_hosts}"
            num_hosts += 1
            for number in range(int(match["size"])):
                devices.append(fact.on(Device(id=f"{host}:{number}", host=host, kind=kind)))
    kinds = {device.kind for device in devices}
    if strange := facts.keys() - kinds:
        raise ConfigError(
            f"facts of kind {', '.join(sorted(strange))}, but cluster {text!r} has only {', '.join(sorted(kinds))}"
        )
    return tuple(devices)


def _own(own: tuple[Device, ...], num_more: int, facts: Mapping[str, KindFacts]) -> list[Device]:
    if not own:
        raise ConfigError("cluster own: only a queue's own record has devices; expected HOSTSxDEVICES[:KIND]")
    kinds = Counter(device.kind for device in own)
    last = next(device for device in reversed(own) if kinds[device.kind] == max(kinds.values()))
    more = [replace(last, id=f"{last.host}+{number}") for number in range(1, num_more + 1)]
    return [facts.get(device.kind, KindFacts()).on(device) for device in (*own, *more)]


@dataclass(frozen=True)
class DeviceShape:
    """The devices of one job, as far as its speed depends on them."""

    per_host: tuple[int, ...]
    """Number in each host, in the order of the hosts."""
    kinds: tuple[str, ...]
    speeds: tuple[float, ...]

    @property
    def num_devices(self) -> int:
        return len(self.kinds)

    def speed(self, is_evenload: bool) -> float:
        """Return the speed of a gang per device: Evenload's shares sum the devices' speeds, any other waits for the slowest."""
        return sum(self.speeds) / len(self.speeds) if is_evenload else min(self.speeds)


def shape_of(devices: tuple[Device, ...]) -> DeviceShape:
    hosts: dict[str, int] = {}
    for device in devices:
        hosts[device.host] = hosts.get(device.host, 0) + 1
    return DeviceShape(
        tuple(hosts.values()), tuple(device.kind for device in devices), tuple(device.speed for device in devices)
    )
