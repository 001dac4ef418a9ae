"""The daemon's socket: many connections, none of which can block the others, whatever it sends or doesn't.

Limited are: the number of connections, in all and of one user; the length of a line; the time that an incomplete line may
take; the requests of a user per second (more are not refused: they wait in that user's own buffers); the time that a reply
may stay unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler import messages, paths


@dataclass(frozen=True, slots=True)
class ServerLimits:
    connections: int = 256
    connections_of_user: int = 32
    requests_per_s: float = 1000.0
    incomplete_line_s: float = 5.0
    unread_s: float = 10.0
    """Without a byte of a reply being read."""
    idle_s: float = 600.0


class ClientConnection(asyncio.Protocol):
    """One client; its requests are served one at a time, in order."""

    def __init__(self, server: RequestServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._received = bytearray()
        self._active_s = time.monotonic()
        self._line_began_s: float | None = None
        self._unread = (0, 0.0)
        """Bytes of replies that the client has not read, and since when there are so many."""
        self._is_waiting = False
        """A reply is due; no further request is taken until then."""
        self.pid = self.uid = -1

    @property
    def is_closed(self) -> bool:
        return self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Read the peer's credentials, and refuse it where there are too many connections."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=0)
        try:
            self.pid, self.uid, _ = paths.peer_of(transport.get_extra_info("socket"))
        except OSError:
            transport.abort()
            return
        self._server.admit(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        """Buffer what the client sent, up to one request too many."""
        self._active_s = time.monotonic()
        self._received += data
        if len(self._received) > messages.LARGEST_REQUEST_BYTES:
            if b"\n" not in self._received:
                self.fail(ConfigError(f"a request is a line of at most {messages.LARGEST_REQUEST_BYTES} bytes"))
                return
            self._transport.pause_reading()
        self._server.wake()

    def resume_writing(self) -> None:
        """Continue once the client has read its reply."""
        self._server.wake()

    def next_message(self) -> dict[str, Any] | None:
        """Take the next complete request, if it may be served now."""
        if self._is_waiting or self.is_closed or self._transport.get_write_buffer_size():
            return None
        end = self._received.find(b"\n")
        if end < 0 or not self._server.take_token(self.uid):
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        if len(self._received) <= messages.LARGEST_REQUEST_BYTES:
            self._transport.resume_reading()
        try:
            message = messages.decode(line)
        except ConfigError as error:
            self.fail(error)
            return None
        self._is_waiting = True
        return message

    def reply(self, row: dict[str, Any]) -> None:
        self._is_waiting = False
        self._active_s = time.monotonic()
        if not self.is_closed:
            self._transport.write(messages.encode(row))
            if b"\n" in self._received:
                self._server.wake()

    def fail(self, error: Exception) -> None:
        """Send an error and close: nothing that follows an invalid line can be trusted to be a request."""
        self._received.clear()
        self._transport.write(messages.encode(messages.error_row(type(error)(str(error)[:500]))))
        self._transport.close()

    def check_times(self, now_s: float, limits: ServerLimits) -> None:
        """Close the connection where a time limit is over."""
        is_incomplete = bool(self._received) and b"\n" not in self._received
        self._line_began_s = (self._line_began_s or now_s) if is_incomplete else None
        unread_bytes = self._transport.get_write_buffer_size()
        if unread_bytes != self._unread[0]:
            self._unread = (unread_bytes, now_s)
        if (
            (self._line_began_s is not None and now_s - self._line_began_s > limits.incomplete_line_s)
            or (unread_bytes and now_s - self._unread[1] > limits.unread_s)
            or (not self._is_waiting and now_s - self._active_s > limits.idle_s)
        ):
            self._transport.abort()

    def abort(self) -> None:
        """Close the connection; an unsent reply is lost."""
        self._transport.abort()


class RequestServer:
    """Listens on the queue's socket, and collects whole requests."""

    def __init__(self, folder: Path, wake: Callable[[], None], *, shared: bool) -> None:
        """Bind the socket; the caller holds the writer's lock, so a socket that lies there has no owner any more.

        `wake` is called when there may be requests to take; `shared` lets other users connect.
        """
        self.wake = wake
        self.connections: set[ClientConnection] = set()
        self._limits = ServerLimits()
        self._tokens: dict[int, tuple[float, float]] = {}
        self._server: asyncio.Server | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = folder / paths.SOCKET
        try:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(path.lstat().st_mode):
                    raise ConfigError(f"{path} is a folder: the queue's socket lies there; move it away")
                path.unlink()
            before = os.umask(0o177)
            try:
                with paths.socket_address(folder) as address:
                    self._listener.bind(address)
            finally:
                os.umask(before)
            if shared:
                path.chmod(0o666)  # the kernel identifies who connects; permissions are checked for each request
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"the queue's socket {path} can't be made: {error}") from error

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: ClientConnection(self), sock=self._listener, backlog=128)

    def admit(self, connection: ClientConnection) -> None:
        limits, uid = self._limits, connection.uid
        num_of_user = sum(1 for other in self.connections if other.uid == uid)
        is_own = uid == os.geteuid()  # the daemon's own user and its runners are never refused because of others
        if num_of_user >= limits.connections_of_user * (4 if is_own else 1) or (
            len(self.connections) >= limits.connections and not is_own
        ):
            connection.fail(
                QueueError(
                    f"too many connections to the queue ({num_of_user} of this user): close some, or retry later"
                )
            )
        else:
            self.connections.add(connection)

    def requests(self) -> list[tuple[ClientConnection, dict[str, Any]]]:
        taken = [(connection, connection.next_message()) for connection in list(self.connections)]
        return [(connection, message) for connection, message in taken if message is not None]

    def take_token(self, uid: int) -> bool:
        """Take one of the user's requests of this second; False if none is left."""
        now_s, rate = time.monotonic(), self._limits.requests_per_s
        tokens, since_s = self._tokens.get(uid, (rate, now_s))
        tokens = min(rate, tokens + (now_s - since_s) * rate)
        if tokens < 1:
            return False
        self._tokens[uid] = (tokens - 1, now_s)
        return True

    def check_times(self) -> None:
        """Close connections with a time limit that is over; call it once a second."""
        now_s = time.monotonic()
        for connection in list(self.connections):
            connection.check_times(now_s, self._limits)
        self._tokens = {uid: held for uid, held in self._tokens.items() if now_s - held[1] < 60.0}

    def close(self) -> None:
        for connection in list(self.connections):
            connection.abort()
        if self._server is not None:
            self._server.close()
        self._listener.close()
