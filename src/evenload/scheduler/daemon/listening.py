"""TCP ports on which the processes of a job listen: the address of a notebook or a TensorBoard that a job runs."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from evenload.job.processes import all_stats, descendants

_LISTEN = "0A"
_SOCKET = "socket:["


def listening_addresses(runner: int) -> list[str]:
    """Return the addresses, such as ``127.0.0.1:8888``, on which the descendants of a runner listen, by port."""
    tree = descendants([runner], all_stats())
    own = {inode for pid in tree for inode in _sockets(pid)}
    found: dict[int, str] = {}
    for address, port, inode in _listeners(tree):
        if inode in own:
            found.setdefault(port, f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
    return [found[port] for port in sorted(found)]


def _sockets(pid: int) -> Iterator[str]:
    """Yield the inodes of a process's sockets; none where its user can't be read."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115
                if target.startswith(_SOCKET):
                    yield target[len(_SOCKET) : -1]


def _listeners(pids: Iterable[int]) -> Iterator[tuple[str, int, str]]:
    """Yield address, port and inode of all listening sockets in the network namespaces of these processes."""
    seen = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            namespace = os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115
            if namespace in seen:
                continue
            seen.add(namespace)
            for name in ("tcp", "tcp6"):
                for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                    words = line.split()
                    if words[3] == _LISTEN:
                        address, _, port = words[1].partition(":")
                        yield _readable(address), int(port, 16), words[9]


def _readable(address: str) -> str:
    """Return an address of /proc/net/tcp, whose words of four bytes are in this machine's order."""
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    return str(ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words)))
