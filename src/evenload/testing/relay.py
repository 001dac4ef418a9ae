"""Carry packets between virtual machines after a delay: a process that holds a TUN device of each.

`machines(delay_ms=...)` starts it; the kernel's own delay (netem) is missing on many systems.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from pathlib import Path

from evenload.errors import ConfigError

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_LARGEST_PACKET = 1 << 16


def open_tun(namespace: str, name: str) -> int:
    """Make a TUN device in a network namespace, and return its file descriptor; ConfigError if it is impossible."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            with Path("/run/netns", namespace).open() as place:
                # Of this thread alone.
                if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"network namespace {namespace}")
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
            made.append(fd)
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise ConfigError(f"no TUN device could be made in {namespace}: {made[0]}")
    return made[0]


def relay(delay_s: float, device_of: dict[bytes, int]) -> None:
    """Carry packets by the address of their destination until the process ends."""
    waiting: deque[tuple[float, int, bytes]] = deque()  # one delay for all: in the order of their times
    selector = selectors.DefaultSelector()
    for fd in set(device_of.values()):
        selector.register(fd, selectors.EVENT_READ)
    while True:
        timeout = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        for key, _ in selector.select(timeout):
            for packet in _packets(key.fd):
                destination = packet[16:20] if packet[0] >> 4 == 4 else packet[24:40]
                if (target := device_of.get(destination)) is not None:
                    waiting.append((time.monotonic() + delay_s, target, packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, target, packet = waiting.popleft()
            try:
                os.write(target, packet)
            except OSError:  # the device is down: the packet is lost, as on a cut cable
                continue


def _packets(fd: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < 64:
        try:
            found.append(os.read(fd, _LARGEST_PACKET))
        except OSError:  # no more, or the device is down
            break
    return found


def _main(arguments: list[str]) -> None:
    """Take the delay in milliseconds, and ADDRESS=FD of each address."""
    devices = {}
    for text in arguments[1:]:
        address, _, fd = text.partition("=")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        devices[socket.inet_pton(family, address)] = int(fd)
    relay(float(arguments[0]) / 1e3, devices)


if __name__ == "__main__":
    _main(sys.argv[1:])
