"""The daemon's socket: many connections, none of which can hold up the others, whatever it sends or doesn't.

Bounds: how many connections there are, in all and of one user; how long a line may be; how long half a line may lie
there; how many requests a user makes a second (more are not refused, they wait in the kernel's buffers and theirs alone);
how much of an answer may lie unread, and how long.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler import messages, paths


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one user may do to the socket."""

    connections: int = 256
    connections_of_user: int = 32
    requests_per_s: float = 1000.0
    requests_at_once: int = 64
    """Of one connection before the others have their turn."""
    half_line_s: float = 5.0
    unread_s: float = 10.0
    idle_s: float = 600.0


@dataclass(eq=False)
class Connection:
    """One client."""

    socket: socket.socket
    pid: int
    uid: int
    heard_s: float
    """When it last sent something, or was answered."""
    line_began_s: float | None = None
    unread_since_s: float | None = None
    received: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)
    is_waiting: bool = False
    """It has asked, and its answer comes later: no further request is read until then."""
    is_closing: bool = False
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A message and who sent it."""

    connection: Connection
    message: dict[str, Any]


class Wire:
    """Listens, reads whole requests, writes answers."""

    def __init__(
        self, folder: Path, selector: selectors.BaseSelector, *, shared: bool, bounds: Bounds = Bounds()
    ) -> None:
        """Binds the socket; the caller holds the writer's lock, so that what lies there is nobody's any more.

        Raises:
            ConfigError: it can't be bound.
        """
        self._selector, self._bounds = selector, bounds
        self._connections: set[Connection] = set()
        self._tokens: dict[int, tuple[float, float]] = {}
        self._has_more = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
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
                path.chmod(0o666)  # who connects is told by the kernel; what he may is decided for each request
            self._listener.listen(128)
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"the queue's socket {path} can't be made: {error}") from error
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def pause_s(self) -> float | None:
        """How long the loop may sleep at most; None for as long as it likes."""
        return 0.0 if self._has_more else None

    def requests(self) -> list[Request]:
        """Whole requests that have come; a few of each connection."""
        found: list[Request] = []
        self._has_more = False
        for connection in list(self._connections):
            for _ in range(self._bounds.requests_at_once):
                request = self._next(connection)
                if request is None:
                    break
                found.append(request)
            else:
                self._has_more = True
        return found

    def answer(self, connection: Connection, row: dict[str, Any]) -> None:
        """Writes an answer, as much of it as the client takes now; the rest follows."""
        connection.is_waiting = False
        connection.heard_s = time.monotonic()
        if connection.is_closed:
            return
        connection.unread += messages.encode(row)
        self._write(connection)
        self._has_more = self._has_more or b"\n" in connection.received

    def tick(self) -> None:
        """Closes what has been silent or half said for too long, and lets those go on who had asked too much."""
        now_s, bounds = time.monotonic(), self._bounds
        for connection in list(self._connections):
            half_s = now_s - connection.line_began_s if connection.line_began_s is not None else 0.0
            unread_s = now_s - connection.unread_since_s if connection.unread_since_s is not None else 0.0
            idle_s = 0.0 if connection.is_waiting else now_s - connection.heard_s
            if half_s > bounds.half_line_s or unread_s > bounds.unread_s or idle_s > bounds.idle_s:
                self._close(connection)
        self._tokens = {uid: held for uid, held in self._tokens.items() if now_s - held[1] < 60.0}
        self._has_more = self._has_more or any(b"\n" in connection.received for connection in self._connections)

    def close(self) -> None:
        """Ends all connections and the socket."""
        for connection in list(self._connections):
            self._close(connection)
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(64):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                return  # no more descriptors: those that are there go on
            try:
                pid, uid, _ = paths.peer_of(client)
            except OSError:
                client.close()
                continue
            client.setblocking(False)
            connection = Connection(client, pid, uid, time.monotonic())
            of_user = sum(1 for other in self._connections if other.uid == uid)
            is_own = uid == os.geteuid()  # the daemon's own user and its runners always find a place
            if of_user >= self._bounds.connections_of_user * (4 if is_own else 1) or (
                len(self._connections) >= self._bounds.connections and not is_own
            ):
                self._refuse(client, of_user)
                continue
            self._connections.add(connection)
            self._selector.register(client, selectors.EVENT_READ, self._reader(connection))

    def _refuse(self, client: socket.socket, of_user: int) -> None:
        error = QueueError(
            f"too many connections to the queue at once ({of_user} of this user): close some, or ask again"
        )
        with contextlib.suppress(OSError):
            client.send(messages.encode(messages.error_row(error)))
        client.close()

    def _reader(self, connection: Connection) -> Callable[[], None]:
        return lambda: self._ready(connection)

    def _ready(self, connection: Connection) -> None:
        if connection.unread:
            self._write(connection)
        if connection.is_closed or connection.is_closing:
            return
        if len(connection.received) > messages.LARGEST_REQUEST_BYTES:
            return  # a whole request lies there already, and waits for its turn
        try:
            part = connection.socket.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._close(connection)
            return
        if not part:
            self._close(connection)
            return
        connection.heard_s = time.monotonic()
        connection.received += part
        if b"\n" in part:
            connection.line_began_s = None
        elif connection.line_began_s is None and b"\n" not in connection.received:
            connection.line_began_s = connection.heard_s
        if len(connection.received) > messages.LARGEST_REQUEST_BYTES:
            if b"\n" not in connection.received:
                self._fail(connection, f"a line of more than {messages.LARGEST_REQUEST_BYTES} bytes")
            else:
                self._listen(connection)

    def _next(self, connection: Connection) -> Request | None:
        """The next whole request, where it may be taken now."""
        if connection.is_waiting or connection.is_closed or connection.is_closing or connection.unread:
            return None
        end = connection.received.find(b"\n")
        if end < 0:
            if connection.received and connection.line_began_s is None:
                connection.line_began_s = time.monotonic()
            return None
        if not self._may_ask(connection.uid):
            return None
        line = bytes(connection.received[:end])
        del connection.received[: end + 1]
        self._listen(connection)
        try:
            message = messages.decode(line)
        except ConfigError as error:
            self._fail(connection, str(error))
            return None
        connection.is_waiting = True
        return Request(connection, message)

    def _may_ask(self, uid: int) -> bool:
        """Takes one of the user's tokens, of which so many come back each second."""
        now_s, rate = time.monotonic(), self._bounds.requests_per_s
        tokens, since_s = self._tokens.get(uid, (rate, now_s))
        tokens = min(rate, tokens + (now_s - since_s) * rate)
        if tokens < 1:
            return False
        self._tokens[uid] = (tokens - 1, now_s)
        return True

    def _fail(self, connection: Connection, text: str) -> None:
        """Says why, and closes: after a line that is none, nothing that follows can be trusted to be one."""
        connection.is_closing = True
        connection.received.clear()
        connection.unread += messages.encode(messages.error_row(ConfigError(text[:500])))
        self._write(connection)

    def _write(self, connection: Connection) -> None:
        try:
            sent = connection.socket.send(connection.unread)
            del connection.unread[:sent]
            if sent:
                connection.unread_since_s = None
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._close(connection)
            return
        if connection.unread:
            if connection.unread_since_s is None:
                connection.unread_since_s = time.monotonic()
        elif connection.is_closing:
            self._close(connection)
            return
        self._listen(connection)

    def _listen(self, connection: Connection) -> None:
        """What of this connection wakes the loop: never what it would not act on."""
        if connection.is_closed:
            return
        wanted = selectors.EVENT_WRITE if connection.unread else 0
        if not connection.is_closing and len(connection.received) <= messages.LARGEST_REQUEST_BYTES:
            wanted |= selectors.EVENT_READ
        try:
            key = self._selector.get_key(connection.socket)
            if not wanted:
                self._selector.unregister(connection.socket)
            elif key.events != wanted:
                self._selector.modify(connection.socket, wanted, key.data)
        except KeyError:
            if wanted:
                self._selector.register(connection.socket, wanted, self._reader(connection))

    def _close(self, connection: Connection) -> None:
        if connection.is_closed:
            return
        connection.is_closed = True
        self._connections.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
