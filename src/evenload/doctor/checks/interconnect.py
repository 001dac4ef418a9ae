"""Checks of the network link and of InfiniBand."""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from evenload.doctor import system_files
from evenload.doctor.finding import Finding, Options, fail, ok, skip, warn

SLOW_MBIT_PER_S = 1000
"""Below it, the gradients of a small model take longer than its step."""
LOST_FRACTION = 0.01
MIN_PACKETS = 10_000
"""Fewer received packets say nothing about losses."""


@dataclass(frozen=True)
class NetworkLink:
    name: str
    speed_mbit_per_s: int | None
    """None if unknown, as for virtual cards."""
    duplex: str
    num_received: int
    num_lost: int

    @property
    def speed(self) -> str:
        known = self.speed_mbit_per_s
        return "(speed unknown)" if known is None else f"{known / 1000:g} Gbit/s"


def link(options: Options) -> Finding:
    root = options.root_path
    names = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    nccl_names = os.environ.get("NCCL_SOCKET_IFNAME", "")  # prefixes; after "=" names; after "^" prefixes to avoid
    if nccl_names and not nccl_names.startswith("^"):
        is_exact = nccl_names.startswith("=")
        wanted = nccl_names.removeprefix("=").split(",")
        if not any(name == part if is_exact else name.startswith(part) for name in names for part in wanted):
            found = f"NCCL_SOCKET_IFNAME={nccl_names}, but there is no such interface"
            return fail(found, f"one of {', '.join(names)}", "unset NCCL_SOCKET_IFNAME")
    links = _read_links(root)
    if not links:
        return skip("no network card is up; a single machine needs none")
    expected = f"{SLOW_MBIT_PER_S} Mbit/s or more, full duplex, no losses: several machines exchange gradients over it"
    half = [card for card in links if card.duplex == "half"]
    slow = [card for card in links if card.speed_mbit_per_s is not None and card.speed_mbit_per_s < SLOW_MBIT_PER_S]
    for card in (*half, *slow):
        found = f"{card.name} runs at {card.speed}" + (", half duplex" if half else "")
        fix = f"sudo ethtool -s {card.name} autoneg on   # then: another cable, another port of the switch"
        return warn(found, expected, fix)
    for card in links:
        if card.num_received > MIN_PACKETS and card.num_lost > LOST_FRACTION * card.num_received:
            found = f"{card.name} lost {card.num_lost} of {card.num_received} received packets"
            fix = f"sudo ethtool -G {card.name} rx 4096   # then: ethtool -S {card.name}, another cable"
            return warn(found, expected, fix)
    return ok(", ".join(f"{card.name} {card.speed}" for card in links), expected)


def _read_links(root: Path) -> list[NetworkLink]:
    """Return the cards that are up, without the loopback and pure bridges."""
    found = []
    for card in sorted((root / "sys/class/net").glob("*")):
        if card.name == "lo" or system_files.text(card / "operstate") != "up" or (card / "bridge").exists():
            continue
        speed = system_files.number(card / "speed")
        received, *lost = (
            system_files.number(card / "statistics" / name) or 0 for name in ("rx_packets", "rx_errors", "rx_dropped")
        )
        known = speed if speed is not None and speed > 0 else None
        found.append(NetworkLink(card.name, known, system_files.text(card / "duplex"), received, sum(lost)))
    return found


def infiniband(options: Options) -> Finding:
    """Check the ports, device files and locked memory; NCCL locks its buffers in memory to register them."""
    root = options.root_path
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    if not ports:
        return skip("no InfiniBand or RoCE card")
    states = {port: system_files.text(port / "state").rpartition(":")[2].strip() for port in ports}
    found = ", ".join(
        f"{port.parent.parent.name}:{port.name} {state.lower()} {system_files.text(port / 'rate')}"
        for port, state in states.items()
    )
    if "ACTIVE" not in states.values():
        fix = f"sudo ibstat {ports[0].parent.parent.name}   # then: the cable, the switch, a subnet manager (opensm)"
        return warn(found, "an active port; without it NCCL uses TCP", fix)
    if os.environ.get("NCCL_IB_DISABLE") == "1":
        return warn(f"{found}, but NCCL_IB_DISABLE=1 disables it", "NCCL uses the card", "unset NCCL_IB_DISABLE")
    if not any((root / "dev/infiniband").glob("uverbs*")):
        fix = "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 ..."
        return warn(f"{found}, but its device files (/dev/infiniband) are missing", "/dev/infiniband/uverbs*", fix)
    soft, hard = system_files.limits(resource.RLIMIT_MEMLOCK)
    if not math.isinf(soft):
        fix = "ulimit -l unlimited"
        if not math.isinf(hard):
            fix = (
                "echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.conf"
                "   # then log in again; in a container: docker run --ulimit memlock=-1"
            )
        expected = "ulimit -l unlimited: otherwise NCCL cannot register its buffers and stops"
        return fail(f"{found}, but ulimit -l is {soft / 1024:g} KiB", expected, fix)
    return ok(found)
