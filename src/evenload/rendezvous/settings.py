"""The options of a run on several machines: how many, where they meet, how long to wait."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from evenload.errors import ConfigError

DEFAULT_PORT = 29500
"""The same as torchrun's MASTER_PORT."""
CONNECT_WAIT_S = 10.0
"""Default time in which a machine tries to connect to the coordinator."""
GATHER_WAIT_S = 60.0
"""Default time in which the coordinator waits for the other machines."""

_NAME = re.compile(r"^[\w.-]+$")


@dataclass(frozen=True)
class Endpoint:
    """A host, by name or address, and a port."""

    host: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """True if it can only mean the machine on which it is written."""
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host in ("localhost", "ip6-localhost", "localhost.localdomain")


@dataclass(frozen=True)
class RendezvousConfig:
    """The options of a run on several machines."""

    endpoint: Endpoint
    min_nodes: int
    max_nodes: int
    node_rank: int | None = None
    """As the user fixed it; None leaves it to the coordinator. 0 makes this machine the coordinator."""
    wait_s: float | None = None
    """Time to wait for the other machines; None: GATHER_WAIT_S for the coordinator, CONNECT_WAIT_S for the members."""
    job_id: str = ""
    """A name that is the same on all machines of a job (torchrun's --rdzv-id)."""
    command: str = "evenload run"
    """The command to type on another machine."""

    @property
    def connect_wait_s(self) -> float:
        return CONNECT_WAIT_S if self.wait_s is None else self.wait_s

    @property
    def gather_wait_s(self) -> float:
        return GATHER_WAIT_S if self.wait_s is None else self.wait_s

    @property
    def nodes(self) -> str:
        """The value of ``--nodes``."""
        return str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"


def parse_endpoint(text: str, option: str = "--host", default_port: int = DEFAULT_PORT) -> Endpoint:
    """Parse ``box1``, ``box1:29500``, ``10.0.0.1:29500``, ``fd00::1`` or ``[fd00::1]:29500``; else ConfigError."""
    expected = "expected a machine's name or address, with or without a port: box1, 10.0.0.1:29500, [fd00::1]:29500"
    host, port = text, ""
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not re.fullmatch(r":\d+", rest)):
            raise ConfigError(f"{option} {text}: {expected}")
        port = rest[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
        if not port.isdecimal():
            raise ConfigError(f"{option} {text}: {port!r} is not a port; {expected}")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host.partition("%")[0])
        except ValueError:
            raise ConfigError(f"{option} {text}: {host!r} is not an IPv6 address; {expected}") from None
    elif not _NAME.match(host):
        raise ConfigError(f"{option} {text}: {expected}")
    number = int(port) if port else default_port
    if not 1 <= number <= 65535:
        raise ConfigError(
            f"{option} {text}: the other machines must know the port, so it must be a number from 1 to 65535, not {number}"
        )
    return Endpoint(host, number)


def parse_nodes(text: str, option: str = "--nodes") -> tuple[int, int]:
    """Parse ``2`` or ``1:4`` (MIN:MAX); else ConfigError."""
    low, colon, high = text.partition(":")
    numbers = (low, high) if colon else (low, low)
    if not all(part.isdecimal() and int(part) >= 1 for part in numbers):
        raise ConfigError(
            f"{option} {text}: expected a number of machines such as 2, or MIN:MAX such as 1:4, at least 1"
        )
    least, most = (int(part) for part in numbers)
    if least > most:
        raise ConfigError(f"{option} {text}: MIN is {least}, above MAX, {most}; write MIN:MAX")
    return least, most
