"""Who reaches whom: each machine tries each other one at a port of the kind that gloo and NCCL use.

gloo and NCCL listen at ports that the system picks. A firewall that lets the meeting's port through and nothing else, an
address that is only known at home, or packets that are too large for the network: each would make the ranks hang for minutes
in their first collective. Here it is found within seconds, and named.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from evenload.rendezvous.address import numeric
from evenload.rendezvous.connect import Dial, Miss, MissKind

REACH_LIMIT_S = 5.0
_BULK_BYTES = 1 << 16
"""More than any packet: what passes small and not large is found too."""


@dataclass(frozen=True)
class Doorplate:
    """Where a machine can be tried, and what it then says."""

    host: str
    port: int
    token: str


class Door:
    """A port that the system picked, at which this machine says its token to whoever comes."""

    def __init__(self, host: str) -> None:
        """Raises OSError where the address is none of this machine's."""
        address = numeric(host, 0)
        self._listener = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            self._listener.bind(address.sockaddr)
            self._listener.listen(64)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._callers: list[tuple[socket.socket, int]] = []
        self.plate = Doorplate(host, int(self._listener.getsockname()[1]), secrets.token_hex(8))

    def poll(self) -> None:
        """Serves who has come; to be called often."""
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                break
            caller.setblocking(False)
            with suppress(OSError):
                caller.send(self.plate.token.encode())
            self._callers.append((caller, 0))
        self._callers = [served for call in self._callers if (served := self._serve(*call)) is not None]

    def close(self) -> None:
        """Ends all of it; a second call does nothing."""
        self._listener.close()
        for caller, _ in self._callers:
            caller.close()
        self._callers.clear()

    @staticmethod
    def _serve(caller: socket.socket, count: int) -> tuple[socket.socket, int] | None:
        """Reads on; at the end of the bulk it says so. None when the caller is gone."""
        try:
            while data := caller.recv(_BULK_BYTES):
                count += len(data)
                if count == _BULK_BYTES:
                    caller.send(b".")
        except BlockingIOError:
            return caller, count
        except OSError:
            pass
        caller.close()
        return None


class Attempt:
    """One try at another machine's door; `miss` tells why it failed, and is None where it did not."""

    def __init__(self, plate: Doorplate) -> None:
        self.miss: Miss | None = None
        self.seconds = 0.0
        """What the connection took."""
        self._plate = plate
        self._began_s = time.monotonic()
        self._heard = b""
        self._unsent = _BULK_BYTES
        self._over = False
        self._socket: socket.socket | None = None
        self._dial: Dial | None = None
        try:
            self._dial = Dial(numeric(plate.host, plate.port))
        except OSError as error:
            self._end("failed", error.strerror or str(error))

    def poll(self) -> bool:
        """Goes on as far as it can; whether it is over."""
        if self._over or self._dial is None:
            return True
        if self._socket is None:
            if not self._dial.poll():
                return False
            if self._dial.miss is not None:
                self.miss, self._over = self._dial.miss, True
                return True
            self._socket = self._dial.take()
            self.seconds = time.monotonic() - self._began_s
        try:
            self._exchange(self._socket)
        except BlockingIOError:
            pass
        except OSError:
            self._end("stranger")
        return self._over

    def give_up(self) -> None:
        """Ends a try that takes too long."""
        if self._over or self._dial is None:
            return
        if self._socket is None:
            self.miss, self._over = self._dial.give_up(), True
        elif not self._heard:
            self._end("silent")
        else:
            self._end("stalled" if self._heard == self._plate.token.encode() else "stranger")

    def _exchange(self, connection: socket.socket) -> None:
        token = self._plate.token.encode()
        while len(self._heard) < len(token):
            data = connection.recv(len(token) - len(self._heard))
            self._heard += data
            if not data or not token.startswith(self._heard):
                self._end("stranger")
                return
        while self._unsent:
            self._unsent -= connection.send(bytes(self._unsent))
        self._end(None if connection.recv(1) == b"." else "stranger")

    def _end(self, kind: MissKind | None, told: str = "") -> None:
        if kind is not None:
            self.miss = Miss(kind, time.monotonic() - self._began_s, told)
        self._over = True
        if self._socket is not None:
            self._socket.close()


class Round:
    """This machine's tries at all others, side by side."""

    def __init__(self, plates: Sequence[Doorplate], limit_s: float = REACH_LIMIT_S) -> None:
        self.attempts = tuple(Attempt(plate) for plate in plates)
        self._deadline = time.monotonic() + limit_s

    def poll(self) -> bool:
        """Whether all tries are over."""
        late = time.monotonic() >= self._deadline
        for attempt in self.attempts:
            if not attempt.poll() and late:
                attempt.give_up()
        return all(attempt.poll() for attempt in self.attempts)
