"""Messages between supervisors: JSON objects, one a line, over one TCP connection; nothing waits without a limit."""

from __future__ import annotations

import json
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from evenload.rendezvous.address import Address

Message = dict[str, Any]

BEAT_S = 1.0
"""Each side says something at least this often."""
SILENT_S = 12.0
"""A side that says nothing for so long is gone: its machine is down, or the network between."""
_LONGEST_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
_STRANGE = "what it says is none of ours"


class Wire:
    """One connection to another supervisor."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._in = bytearray()
        self._out = bytearray()
        self._messages: deque[Message] = deque()
        self._heard_s = self._sent_s = time.monotonic()
        self.lost = ""
        """Why nothing more will come; empty while it may."""
        self.own_host = str(connection.getsockname()[0])
        """The address of this end."""
        self.peer: Address = _peer(connection)

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    @property
    def silent_s(self) -> float:
        """How long nothing has come."""
        return time.monotonic() - self._heard_s

    def send(self, kind: str, **content: Any) -> None:
        """Says something; to one who is gone it says nothing."""
        if self.lost:
            return
        self._out += json.dumps({"kind": kind, **content}).encode() + b"\n"
        self._sent_s = time.monotonic()
        self._flush()

    def beat(self) -> None:
        """Says that we live, if it is time; to be called often."""
        if time.monotonic() - self._sent_s >= BEAT_S:
            self.send("beat")
        else:
            self._flush()

    def poll(self) -> list[Message]:
        """All that has come; beats are left out. After the last of it, `lost` may be set."""
        return list(iter(self.take, None))

    def take(self) -> Message | None:
        """The next message, if it is there; what came behind it stays for the next call."""
        if not self._messages:
            self._flush()
            self._read()
            self._cut_lines()
            if not self.lost and self.silent_s > SILENT_S:
                self.lost = f"nothing was heard of it for {SILENT_S:.0f} s: the machine or the network between is down"
        return self._messages.popleft() if self._messages else None

    def receive(self, limit_s: float, is_over: Callable[[], bool] = lambda: False) -> Message | None:
        """The next message; None when it doesn't come in time, or ``is_over()``."""
        deadline = time.monotonic() + limit_s
        while True:
            message = self.take()
            if message is not None:
                return message
            if self.lost or time.monotonic() >= deadline or is_over():
                return None
            wait_readable([self], min(0.05, max(0.0, deadline - time.monotonic())))

    def read_raw(self, num_bytes: int, limit_s: float) -> int:
        """Reads bytes that are no messages and throws them away; how many came before nothing came for ``limit_s``."""
        count = min(num_bytes, len(self._in))
        del self._in[:count]
        deadline = time.monotonic() + limit_s
        while count < num_bytes and not self.lost and time.monotonic() < deadline:
            try:
                data = self._socket.recv(min(16 * _CHUNK_BYTES, num_bytes - count))
            except (BlockingIOError, InterruptedError):
                wait_readable([self], 0.05)
                continue
            except OSError as error:
                self._fail(error)
                break
            if not data:
                self.lost = "it closed the connection"
                break
            count += len(data)
            deadline = time.monotonic() + limit_s
        self._heard_s = time.monotonic()
        return count

    def write_raw(self, num_bytes: int, limit_s: float) -> int:
        """Writes zeros that are no messages; how many left before nothing left for ``limit_s``."""
        zeros = memoryview(bytes(16 * _CHUNK_BYTES))
        count = 0
        deadline = time.monotonic() + limit_s
        while count < num_bytes and not self.lost and time.monotonic() < deadline:
            self._flush()
            if self._out:
                wait_writable(self, 0.05)
                continue
            try:
                count += self._socket.send(zeros[: num_bytes - count])
            except (BlockingIOError, InterruptedError):
                wait_writable(self, 0.05)
            except OSError as error:
                self._fail(error)
            else:
                deadline = time.monotonic() + limit_s
        self._sent_s = self._heard_s = time.monotonic()  # what took long was our doing, not its silence
        return count

    def finish(self, limit_s: float = 1.0) -> None:
        """Closes so that the last words arrive: closing over unread data would take them back."""
        deadline = time.monotonic() + limit_s
        while self._out and not self.lost and time.monotonic() < deadline:
            self._flush()
            if self._out:
                wait_writable(self, 0.05)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        while not self.lost and time.monotonic() < deadline:
            wait_readable([self], 0.05)
            self._in.clear()
            self._read()
        self.close()

    def close(self) -> None:
        """Closes at once; a second call does nothing."""
        self.lost = self.lost or "we closed the connection"
        self._socket.close()

    def _flush(self) -> None:
        while self._out and not self.lost:
            try:
                count = self._socket.send(self._out[:_CHUNK_BYTES])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                # What it said before it went may still be there to read.
                self._read()
                self._fail(error)
                return
            del self._out[:count]

    def _read(self) -> None:
        while not self.lost:
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._fail(error)
                return
            if not data:
                self.lost = "it closed the connection"
                return
            self._heard_s = time.monotonic()
            self._in += data
            if len(self._in) > _LONGEST_BYTES:
                # Whole lines are taken out by and by; a single one of this length is none of ours.
                self._cut_lines()
                if len(self._in) > _LONGEST_BYTES:
                    self.lost = _STRANGE
                    return

    def _cut_lines(self) -> None:
        while (end := self._in.find(b"\n")) >= 0:
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            try:
                message = json.loads(line)
                if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                    raise ValueError(_STRANGE)
            except (ValueError, RecursionError):
                self.lost = _STRANGE
                self._in.clear()
                return
            if message["kind"] != "beat":
                self._messages.append(message)

    def _fail(self, error: OSError) -> None:
        self.lost = self.lost or f"the connection broke ({error.strerror or error})"


def wait_readable(wires: Iterable[Any], limit_s: float) -> None:
    """Waits until one of them has something to read, at most so long."""
    waiting = select.poll()
    for wire in wires:
        if wire.fileno() >= 0:
            waiting.register(wire, select.POLLIN)
    waiting.poll(limit_s * 1000)


def wait_writable(wire: Wire, limit_s: float) -> None:
    """Waits until something can be written, at most so long."""
    waiting = select.poll()
    if wire.fileno() >= 0:
        waiting.register(wire, select.POLLOUT)
    waiting.poll(limit_s * 1000)


def printable(text: Any, limit: int = 20_000) -> str:
    """Another machine's text as it may stand on this terminal: nothing in it can move the cursor."""
    cut = str(text)[:limit]
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in cut)


def _peer(connection: socket.socket) -> Address:
    try:
        return Address(connection.family, connection.getpeername())
    except OSError:  # gone already: the first read will tell
        return Address(connection.family, ("0.0.0.0", 0))
