"""Addresses and network interfaces: resolve names, recognize this machine's addresses, find the route to a host."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload import hardware
from evenload.errors import LaunchError
from evenload.rendezvous.settings import Endpoint

RESOLVE_S = 6.0
"""The system itself waits half a minute for a name server that is down."""
CONTAINER_BRIDGES = ("docker", "br-", "virbr", "veth", "cni", "flannel")
"""Prefixes of interfaces that lead to containers of this machine, not to other machines."""
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921


@dataclass(frozen=True)
class Address:
    """A numeric address with its port."""

    family: int
    sockaddr: tuple[Any, ...]

    @property
    def host(self) -> str:
        """The address alone, such as ``10.0.0.1``."""
        return str(self.sockaddr[0])

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback

    def __str__(self) -> str:
        return str(Endpoint(self.host, self.sockaddr[1]))


@dataclass(frozen=True)
class Route:
    """The interface over which this machine reaches an address."""

    interface: str
    """Empty if unknown."""
    own_address: str
    mtu: int
    """Largest packet in bytes; 0 if unknown."""


def resolve(endpoint: Endpoint, limit_s: float = RESOLVE_S) -> tuple[Address, ...]:
    """Return the addresses of a host; LaunchError if it has none or the name server doesn't answer."""
    answers: list[Any] = []

    def look_up() -> None:
        try:
            answers.append(socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answers.append(error)

    # In a thread that may be left behind: the system's resolver has no time limit.
    resolver = threading.Thread(target=look_up, name="evenload-resolve", daemon=True)
    resolver.start()
    resolver.join(limit_s)
    found = answers[0] if answers else TimeoutError(f"the name server did not answer within {limit_s:g} s")
    if isinstance(found, Exception):
        reason = getattr(found, "strerror", None) or str(found)
        raise LaunchError(
            f"--host {endpoint.host}: the name is unknown on this machine ({reason}); give the address instead (`ip -br "
            f"addr` lists it on that machine), or add the name here: echo 'ADDRESS {endpoint.host}' | sudo tee -a /etc/hosts"
        )
    return tuple(dict.fromkeys(Address(family, sockaddr) for family, _, _, _, sockaddr in found))


def numeric(host: str, port: int) -> Address:
    """Parse a numeric address; OSError if it is not numeric."""
    family, _, _, _, sockaddr = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    )[0]
    return Address(family, sockaddr)


def is_own(address: Address) -> bool:
    if address.is_loopback:
        return True
    known = {own for interface in _interfaces() for own in interface.addresses}
    return _plain(address.host) in {_plain(own) for own in known} if known else _can_bind(address)


def own_addresses() -> list[str]:
    """Return this machine's addresses that others may reach, with their interfaces: ``10.0.0.1 (eth0)``."""
    return [
        f"{address} ({interface.name})"
        for interface in _interfaces()
        if interface.is_up and not interface.is_loopback
        for address in interface.addresses
        if not ipaddress.ip_address(address).is_link_local
    ]


def route_to(address: Address) -> Route | None:
    try:
        with socket.socket(address.family, socket.SOCK_DGRAM) as probe:
            probe.connect(address.sockaddr)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return route_of(own)


def route_of(own_address: str) -> Route:
    name = _interface_of(own_address)
    return Route(name, own_address, _mtu(name))


def chosen_interface(own_address: str) -> str:
    """Return the interface for gloo and NCCL: the one that the user set for gloo, else that of our own address."""
    fixed = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return fixed or route_of(own_address).interface


def gloo_address(interface: str, default: str) -> str:
    """Return the address that gloo takes on an interface: its first, IPv4 before IPv6."""
    for known in _interfaces():
        if known.name == interface and known.addresses:
            return known.addresses[0]
    return default


def listen_at(host: str, port: int) -> socket.socket:
    """Listen at a numeric address, also at a port that another program closed just before; OSError if it can't be opened."""
    address = numeric(host, port)
    listener = socket.socket(address.family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address.sockaddr)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _interfaces() -> tuple[hardware.Interface, ...]:
    try:
        return hardware.interfaces()
    except ImportError:  # psutil is missing: the doctor must work all the same
        return ()


def _plain(address: str) -> str:
    return str(ipaddress.ip_address(address.partition("%")[0]))


def _can_bind(address: Address) -> bool:
    try:
        with socket.socket(address.family) as probe:
            probe.bind((address.host, 0, *address.sockaddr[2:]))
    except OSError:
        return False
    return True


def _interface_of(own_address: str) -> str:
    wanted = _plain(own_address)
    for interface in _interfaces():
        if wanted in {_plain(address) for address in interface.addresses}:
            return interface.name
    if ipaddress.ip_address(wanted).is_loopback:
        return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    return _interface_from_kernel(wanted)


def _interface_from_kernel(wanted: str) -> str:
    """Find the interface of an address without psutil."""
    for _, name in socket.if_nameindex():
        raw = _ioctl(_SIOCGIFADDR, name)
        if raw and socket.inet_ntoa(raw[20:24]) == wanted:
            return name
    try:
        rows = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    for digits, *_, name in (row.split() for row in rows):
        if str(ipaddress.IPv6Address(int(digits, 16))) == wanted:
            return name
    return ""


def _mtu(interface: str) -> int:
    raw = _ioctl(_SIOCGIFMTU, interface) if interface else b""
    return int(struct.unpack("i", raw[16:20])[0]) if raw else 0


def _ioctl(request: int, interface: str) -> bytes:
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", interface.encode()[:15]))
    except (ImportError, OSError):
        return b""
