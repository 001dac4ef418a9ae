"""The pseudo-terminal of an interactive program, and the socket through which its owner's client shows it.

Frames in both directions are a byte and a length (`HEADER`), then as many bytes: ``d`` holds bytes of the terminal, ``w``, from
the client alone, the rows and columns of its window (`WINDOW`). One client may connect. What the program writes before that is
kept for it, and everything goes into the job's log too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import termios
import time
from pathlib import Path

from evenload.scheduler import paths

SOCKET = "terminal"
HEADER = struct.Struct("!cI")
WINDOW = struct.Struct("!HH")
_LARGEST_FRAME_BYTES = 1 << 16
_KEPT_BYTES = 1 << 18
"""The program waits with further output while so much waits for the client."""
_CLIENT_WITHIN_S = 60.0
"""A program whose client hasn't come after this long is hung up."""
_FLUSH_S = 5.0


def frame(kind: bytes, data: bytes) -> bytes:
    return HEADER.pack(kind, len(data)) + data


class Frames:
    """Splits a stream into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Return the frames that are complete now; ValueError for one that is too large."""
        self._rest += data
        found = []
        while len(self._rest) >= HEADER.size:
            kind, size = HEADER.unpack_from(self._rest)
            if size > _LARGEST_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            if len(self._rest) < HEADER.size + size:
                break
            found.append((kind, self._rest[HEADER.size : HEADER.size + size]))
            self._rest = self._rest[HEADER.size + size :]
        return found


class ProgramTerminal:
    def __init__(self, folder: Path, uid: int, log: int) -> None:
        """Open the terminal, and listen for the client of user `uid`; OSError where the machine has no more terminals."""
        self._uid, self._log = uid, log
        self._master, self.slave = os.openpty()
        os.set_blocking(self._master, False)
        if os.fstat(self.slave).st_uid != uid:
            os.fchown(self.slave, uid, -1)
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            (folder / SOCKET).unlink()
        with paths.socket_address(folder, SOCKET) as address:
            self._listener.bind(address)
        (folder / SOCKET).chmod(0o666)  # the peer's user id decides, as with the queue's own socket
        self._listener.listen(4)
        self._client: socket.socket | None = None
        self._frames = Frames()
        self._to_client = self._to_program = b""
        self._is_open = True
        self._wait_until_s = time.monotonic() + _CLIENT_WITHIN_S
        self.is_hung_up = False
        """Its client is gone, or never came."""

    def has_started(self) -> None:
        """Close this side's copy of the program's end, so that the end of the program is seen."""
        os.close(self.slave)

    def wait(self, wakeup: int, most_s: float) -> bool:
        """Pass bytes on for up to `most_s` seconds; return True once `wakeup` is readable."""
        if not self._is_open:
            return bool(select.select([wakeup], [], [], most_s)[0])
        reads: list[int | socket.socket] = [wakeup]
        writes: list[int | socket.socket] = []
        if len(self._to_client) < _KEPT_BYTES:
            reads.append(self._master)
        if self._client is not None and len(self._to_program) < _LARGEST_FRAME_BYTES:
            reads.append(self._client)
        if self._listener is not None:
            reads.append(self._listener)
            if time.monotonic() >= self._wait_until_s:
                self._hang_up()
                return False
        if self._to_program:
            writes.append(self._master)
        if self._client is not None and self._to_client:
            writes.append(self._client)
        readable, writable, _ = select.select(reads, writes, [], most_s)
        if self._listener in readable:
            self._accept()
        if self._master in readable:
            self._read_program()
        if self._client is not None and self._client in readable:
            self._read_client()
        if self._is_open and self._master in writable:
            with contextlib.suppress(OSError):
                self._to_program = self._to_program[os.write(self._master, self._to_program) :]
        if self._client is not None and self._client in writable:
            self._write_client()
        return wakeup in readable

    def close(self) -> None:
        """Pass on what the program has written, and close all. A program may have ended before its client could come."""
        deadline_s = time.monotonic() + _FLUSH_S
        while self._read_program():
            pass
        while self._listener is not None and self._to_client and time.monotonic() < deadline_s:
            if select.select([self._listener], [], [], 0.1)[0]:
                self._accept()
        while self._client is not None and self._to_client and time.monotonic() < deadline_s:
            select.select([], [self._client], [], 0.1)
            self._write_client()
        for part in (self._client, self._listener):
            if part is not None:
                part.close()
        if self._is_open:
            self._close_master()

    def _accept(self) -> None:
        if self._listener is None:
            return
        connection, _ = self._listener.accept()
        if paths.peer_of(connection)[1] not in (self._uid, 0):
            connection.close()
            return
        connection.setblocking(False)
        self._client = connection
        self._listener.close()
        self._listener = None

    def _read_program(self) -> bool:
        """Read what the program has written; return False where there is nothing more."""
        if not self._is_open:
            return False
        try:
            data = os.read(self._master, _LARGEST_FRAME_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # EIO: nobody has the other end open
            data = b""
        if not data:
            self._close_master()
            return False
        with contextlib.suppress(OSError):
            os.write(self._log, data)
        if not self.is_hung_up:
            self._to_client += frame(b"d", data)
        return True

    def _read_client(self) -> None:
        try:
            data = b"" if self._client is None else self._client.recv(_LARGEST_FRAME_BYTES)
            for kind, part in self._frames.feed(data):
                if kind == b"d":
                    self._to_program += part
                elif kind == b"w":
                    rows, columns = WINDOW.unpack(part)
                    fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        except BlockingIOError:
            return
        except (OSError, ValueError, struct.error):
            data = b""
        if not data:
            self._hang_up()

    def _write_client(self) -> None:
        if self._client is None:
            return
        try:
            self._to_client = self._to_client[self._client.send(self._to_client) :]
        except BlockingIOError:
            return
        except OSError:
            self._hang_up()

    def _hang_up(self) -> None:
        """Close the terminal: the kernel sends SIGHUP to the program's session."""
        self.is_hung_up, self._to_client = True, b""
        for part in (self._client, self._listener):
            if part is not None:
                part.close()
        self._client = self._listener = None
        while self._read_program():
            pass
        if self._is_open:
            self._close_master()

    def _close_master(self) -> None:
        self._is_open = False
        os.close(self._master)


def take_terminal(slave: int) -> None:
    """Make a terminal the controlling one of this process, which leads a session, and its input and output."""
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for target in (0, 1, 2):
        os.dup2(slave, target)
