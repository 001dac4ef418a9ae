"""A connection under way, and why it does not come about: refused, silent, no way there."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from evenload.rendezvous.address import Address

MissKind = Literal["refused", "silent", "unreachable", "failed", "stranger", "stalled"]
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
ATTEMPT_S = 3.5
"""One try to connect: the system sends three packets in it, and knows after 3 s that no machine has the address."""
_AT_ONCE_S = 0.5
"""A machine that is off is given up by the kernel after about 3 s; what says "no route" earlier is a firewall or a router."""


@dataclass(frozen=True)
class Miss:
    """Why a connection did not come about."""

    kind: MissKind
    """``stranger``: somebody else answers; ``stalled``: small packets pass, large ones don't."""
    seconds: float = 0.0
    """After how long it was known."""
    told: str = ""
    """What the system said, for ``failed`` and ``unreachable``."""

    def describe(self) -> str:
        """What was seen, and what it usually means."""
        match self.kind:
            case "refused":
                return "it refuses: the machine is there, but nothing listens at that port"
            case "silent":
                return (
                    f"nothing answers within {self.seconds:.0f} s, not even a refusal: a firewall drops what is sent there, or "
                    "the machine is off"
                )
            case "unreachable" if self.seconds < _AT_ONCE_S:
                return f"no way leads there ({self.told}): a firewall or a router forbids it, or it is another network"
            case "unreachable":
                return f"no machine answers at that address ({self.told}): it is off, or the address is wrong"
            case "stranger":
                return "another program or machine answers there"
            case "stalled":
                return (
                    "small packets arrive, large ones don't: the MTU of an interface is larger than the network carries"
                )
            case _:
                return f"the system does not let us connect ({self.told})"


class Dial:
    """One connection under way; nothing of it blocks."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.miss: Miss | None = None
        self._began_s = time.monotonic()
        self._connected = False
        self._socket = socket.socket(address.family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            code = self._socket.connect_ex(address.sockaddr)
        except OSError as error:
            code = error.errno or errno.EINVAL
        if code not in (0, errno.EINPROGRESS):
            self._fail(code)

    def poll(self) -> bool:
        """Whether it is known how it went: `take` the socket, or see `miss`."""
        if self._connected or self.miss is not None:
            return True
        # poll(), not select(): descriptors may be above 1023.
        waiting = select.poll()
        waiting.register(self._socket, select.POLLOUT)
        if not waiting.poll(0):
            return False
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail(code)
        else:
            self._connected = True
        return True

    def give_up(self) -> Miss:
        """Ends the attempt: nothing has answered."""
        if self.miss is None:
            self.miss = Miss("silent", time.monotonic() - self._began_s)
        self._socket.close()
        return self.miss

    def take(self) -> socket.socket:
        """The connected socket; its new owner closes it."""
        return self._socket

    def _fail(self, code: int) -> None:
        seconds = time.monotonic() - self._began_s
        self._socket.close()
        if code == errno.ECONNREFUSED:
            self.miss = Miss("refused", seconds)
        elif code == errno.ETIMEDOUT:
            self.miss = Miss("silent", seconds)
        else:
            self.miss = Miss("unreachable" if code in _UNREACHABLE else "failed", seconds, os.strerror(code))


def dial(address: Address, limit_s: float, is_over: Callable[[], bool] = lambda: False) -> socket.socket | Miss:
    """Connects, or tells why not; gives up early when ``is_over()``."""
    attempt = Dial(address)
    deadline = time.monotonic() + limit_s
    while not attempt.poll():
        if time.monotonic() >= deadline or is_over():
            return attempt.give_up()
        time.sleep(0.01)
    return attempt.miss or attempt.take()
