"""What joins this machine to others: its network link, and InfiniBand where there is some."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenload.doctor import files
from evenload.doctor.checks.machine import as_limit
from evenload.doctor.finding import Finding, Options

LINK, INFINIBAND = "network link", "InfiniBand"
SLOW_MBIT_PER_S = 1000
"""Below it the gradients of a small model take longer than its step."""
LOST_FRACTION = 0.01
FEWEST_PACKETS = 10_000
"""Received; with fewer the fraction lost says nothing."""


@dataclass(frozen=True)
class Link:
    """A network card as the system sees it; None where it doesn't tell (virtual ones don't)."""

    name: str
    speed_mbit_per_s: int | None = None
    duplex: str = ""
    num_received: int = 0
    num_lost: int = 0
    """Errors and drops of what came in."""


@dataclass(frozen=True)
class Port:
    """A port of an InfiniBand or RoCE card."""

    device: str
    port: str
    state: str
    """``ACTIVE``, ``DOWN``, ``INIT`` ..."""
    rate: str
    """Such as ``100 Gb/sec (4X EDR)``."""
    layer: str
    """``InfiniBand`` or ``Ethernet`` (RoCE)."""


def link(options: Options) -> Finding:
    """Reads the cards that are up, and the variable that names cards to NCCL."""
    root = options.root_path
    names = tuple(path.name for path in (root / "sys/class/net").glob("*"))
    return judge_link(read_links(root), names, os.environ.get("NCCL_SOCKET_IFNAME", ""))


def judge_link(links: Sequence[Link], names: Sequence[str], nccl_names: str = "") -> Finding:
    """What the links mean for several machines.

    Args:
        links: the cards that are up, the loopback left out.
        names: all cards.
        nccl_names: NCCL_SOCKET_IFNAME: beginnings of names, after ``=`` whole ones, after ``^`` those to leave out.
    """
    wanted = nccl_names.removeprefix("^").removeprefix("=").split(",")
    if nccl_names and not nccl_names.startswith("^"):
        exact = nccl_names.startswith("=")
        if not any(name == part if exact else name.startswith(part) for name in names for part in wanted):
            found = f"NCCL_SOCKET_IFNAME={nccl_names}, but there is no such interface"
            return Finding(LINK, "fail", found, f"one of {', '.join(sorted(names))}", "unset NCCL_SOCKET_IFNAME")
    if not links:
        return Finding(LINK, "skip", "no network card is up; one machine needs none")
    slow = [card for card in links if card.speed_mbit_per_s is not None and card.speed_mbit_per_s < SLOW_MBIT_PER_S]
    half = [card for card in links if card.duplex == "half"]
    lossy = [
        card
        for card in links
        if card.num_received > FEWEST_PACKETS and card.num_lost > LOST_FRACTION * card.num_received
    ]
    expected = f"{SLOW_MBIT_PER_S} Mbit/s or more, full duplex, nothing lost: several machines share gradients over it"
    if half or slow:
        card = (half or slow)[0]
        found = f"{card.name} runs at {_speed(card)}" + (", half duplex" if half else "")
        mend = f"sudo ethtool -s {card.name} autoneg on   # then: another cable, another port of the switch"
        return Finding(LINK, "warn", found, expected, mend)
    if lossy:
        card = lossy[0]
        found = f"{card.name} lost {card.num_lost} of {card.num_received} packets that came in"
        mend = f"sudo ethtool -G {card.name} rx 4096   # then: ethtool -S {card.name}, another cable"
        return Finding(LINK, "warn", found, expected, mend)
    return Finding(LINK, "ok", ", ".join(f"{card.name} {_speed(card)}" for card in links), expected)


def read_links(root: Path) -> tuple[Link, ...]:
    """The cards that are up, the loopback and pure bridges left out."""
    found = []
    for card in sorted((root / "sys/class/net").glob("*")):
        if card.name == "lo" or files.text(card / "operstate") != "up" or (card / "bridge").exists():
            continue
        speed = files.number(card / "speed")
        counts = card / "statistics"
        lost = sum(files.number(counts / name) or 0 for name in ("rx_errors", "rx_dropped"))
        found.append(
            Link(
                card.name,
                speed if speed is not None and speed > 0 else None,
                files.text(card / "duplex"),
                files.number(counts / "rx_packets") or 0,
                lost,
            )
        )
    return tuple(found)


def infiniband(options: Options) -> Finding:
    """Reads the ports, and the limit of locked memory that they need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return judge_infiniband(
        read_ports(options.root_path),
        as_limit(soft),
        as_limit(hard),
        can_open=any((options.root_path / "dev/infiniband").glob("uverbs*")),
        environ=os.environ,
    )


def judge_infiniband(
    ports: Sequence[Port], soft_bytes: float, hard_bytes: float, *, can_open: bool, environ: Mapping[str, str]
) -> Finding:
    """What ports and limits mean. NCCL registers its buffers with the card, which locks them in memory."""
    if not ports:
        return Finding(INFINIBAND, "skip", "no InfiniBand or RoCE card")
    active = [port for port in ports if port.state == "ACTIVE"]
    spelled = ", ".join(f"{port.device}:{port.port} {port.state.lower()} {port.rate}" for port in ports)
    if not active:
        mend = f"sudo ibstat {ports[0].device}   # then: the cable, the switch, a subnet manager (opensm)"
        return Finding(INFINIBAND, "warn", spelled, "a port that is active; NCCL goes over TCP without", mend)
    if environ.get("NCCL_IB_DISABLE") == "1":
        found = f"{spelled}, but NCCL_IB_DISABLE=1 keeps NCCL from using it"
        return Finding(INFINIBAND, "warn", found, "NCCL free to use the card", "unset NCCL_IB_DISABLE")
    if not can_open:
        mend = "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 ..."
        found = f"{spelled}, but its device files (/dev/infiniband) are not here"
        return Finding(INFINIBAND, "warn", found, "/dev/infiniband/uverbs*, to open the card", mend)
    if not math.isinf(soft_bytes):
        found = f"{spelled}, but ulimit -l is {soft_bytes / 1024:g} KiB"
        mend = (
            "ulimit -l unlimited"
            if math.isinf(hard_bytes)
            else "echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.conf"
            "   # then log in again; in a container: docker run --ulimit memlock=-1"
        )
        expected = "ulimit -l unlimited: else NCCL can't register its buffers and stops"
        return Finding(INFINIBAND, "fail", found, expected, mend)
    return Finding(INFINIBAND, "ok", spelled)


def read_ports(root: Path) -> tuple[Port, ...]:
    """The ports of all cards."""
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        found.append(
            Port(
                device=port.parent.parent.name,
                port=port.name,
                state=files.text(port / "state").rpartition(":")[2].strip(),
                rate=files.text(port / "rate"),
                layer=files.text(port / "link_layer"),
            )
        )
    return tuple(found)


def _speed(card: Link) -> str:
    return "(speed unknown)" if card.speed_mbit_per_s is None else f"{card.speed_mbit_per_s / 1000:g} Gbit/s"
