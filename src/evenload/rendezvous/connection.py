"""Connections between supervisors: JSON messages, one a line, over TCP; and the reasons why a connection fails."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from evenload.rendezvous.address import Address, numeric

Message = dict[str, Any]

HEARTBEAT_S = 1.0
SILENCE_S = 12.0
"""A side that sends nothing for so long is lost: its machine is down, or the network between."""
CONNECT_S = 3.5
"""Limit of one attempt: the system sends three packets in it, and reports after 3 s that no machine has the address."""
MAX_MESSAGE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_ROUTER_ANSWER_S = 0.5
"""The kernel gives up a machine that is off after about 3 s; an earlier "no route" comes from a firewall or a router."""
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
boottime_s = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)
"""Return the seconds since boot; unlike those of `time.monotonic` they go on while the machine sleeps."""
_INVALID = "it sent something that is not a message of Evenload"

FailureKind = Literal["refused", "silent", "unreachable", "failed", "other_program", "stalled"]


@dataclass(frozen=True)
class ConnectFailure:
    kind: FailureKind
    """``other_program``: the answer was not the expected one; ``stalled``: small packets pass, large ones don't."""
    seconds: float = 0.0
    detail: str = ""
    """The system's error, for ``failed`` and ``unreachable``."""

    def describe(self) -> str:
        match self.kind:
            case "refused":
                return "connection refused: the machine is up, but nothing listens at that port"
            case "silent":
                return (
                    f"no answer within {self.seconds:.0f} s, not even a refusal: a firewall drops the packets, or the "
                    "machine is off"
                )
            case "unreachable" if self.seconds < _ROUTER_ANSWER_S:
                return f"no route ({self.detail}): a firewall or a router forbids it, or it is another network"
            case "unreachable":
                return f"no machine answers at that address ({self.detail}): it is off, or the address is wrong"
            case "other_program":
                return "another program or machine answers there"
            case "stalled":
                return (
                    "small packets arrive, large ones don't: the MTU of an interface is larger than the network carries"
                )
            case _:
                return f"the system can't connect ({self.detail})"


def to_line(kind: str, content: Mapping[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **content}, default=asdict).encode() + b"\n"


class Connection:
    """One connection to another supervisor; one coroutine at a time may receive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._heartbeats: asyncio.Task[None] | None = None
        family = writer.get_extra_info("socket").family
        self.lost = ""
        """The reason why no more messages will come; empty while they may."""
        self.is_silent = False
        """It is lost by silence: the other side may still be there."""
        self.silence_s = SILENCE_S
        self.received_s = time.monotonic()
        """When the last message came, heartbeats included."""
        self.own_host = str(writer.get_extra_info("sockname", ("",))[0])
        self.peer = Address(family, writer.get_extra_info("peername") or ("0.0.0.0", 0))

    def send(self, kind: str, **content: Any) -> None:
        """Send a message; its values may be dataclasses. Nothing happens once the connection is lost."""
        self.send_line(to_line(kind, content))

    def send_line(self, line: bytes) -> None:
        """Send a message that `to_line` has encoded, for several connections."""
        if not self.lost:
            self._writer.write(line)

    def start_heartbeats(self) -> None:
        """Send a heartbeat every HEARTBEAT_S from now on, until the connection ends."""

        async def beat() -> None:
            while not self.lost:
                await asyncio.sleep(HEARTBEAT_S)
                self.send("heartbeat")

        self._heartbeats = asyncio.create_task(beat())

    async def receive(self) -> Message | None:
        """Return the next message, heartbeats left out; None once the connection is lost.

        A system that was suspended for longer than the limit has been silent itself, whatever it finds when it wakes up.
        """
        while not self.lost:
            limit_s, began_s = self.silence_s, boottime_s()
            message: Message | None = None
            try:
                async with asyncio.timeout(limit_s):
                    line = await self._reader.readuntil(b"\n")
                self.received_s = time.monotonic()
                message = json.loads(line)
                if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                    raise ValueError(_INVALID)
            except TimeoutError:
                began_s = float("-inf")
            except OSError as error:
                self.is_silent = error.errno in _UNREACHABLE
                self.lost = f"the connection broke ({error.strerror or error})"
            except asyncio.IncompleteReadError:
                self.lost = "it closed the connection"
            except (ValueError, RecursionError, asyncio.LimitOverrunError):
                self.lost = _INVALID
            if boottime_s() - began_s >= limit_s:
                self.is_silent = True
                self.lost = f"nothing was received for {limit_s:.0f} s: the machine or the network between is down"
            elif not self.lost and message is not None and message["kind"] != "heartbeat":
                return message
        return None

    def give_up(self) -> None:
        """Close it: a message could not be understood."""
        self.lost = self.lost or _INVALID
        self.close()

    async def messages(self) -> AsyncIterator[Message]:
        while (message := await self.receive()) is not None:
            yield message

    async def receive_bytes(self, num_bytes: int, limit_s: float) -> int:
        """Receive and discard raw bytes; return how many came before nothing came for ``limit_s``."""
        count = 0
        with suppress(OSError):
            while count < num_bytes:
                async with asyncio.timeout(limit_s):
                    data = await self._reader.read(min(_CHUNK_BYTES, num_bytes - count))
                if not data:
                    self.lost = "it closed the connection"
                    break
                count += len(data)
        return count

    async def send_bytes(self, num_bytes: int, limit_s: float) -> int:
        """Send raw zeros; return how many left before nothing left for ``limit_s``."""
        zeros = memoryview(bytes(_CHUNK_BYTES))
        count = 0
        with suppress(OSError):
            while count < num_bytes:
                chunk = zeros[: num_bytes - count]
                self._writer.write(chunk)
                async with asyncio.timeout(limit_s):
                    await self._writer.drain()
                count += len(chunk)
        return count

    async def finish(self, limit_s: float = 1.0) -> None:
        """Close after the last message has arrived: closing with unread data would discard it."""
        with suppress(OSError, RuntimeError):
            if not self.lost:
                async with asyncio.timeout(limit_s):
                    self._writer.write_eof()
                    while await self._reader.read(_CHUNK_BYTES):
                        pass
        self.close()

    def close(self) -> None:
        self.lost = self.lost or "it was closed here"
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        self._writer.close()


def in_tasks(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """Return a callback for `asyncio.start_server` whose handlers may be cancelled; asyncio's own tasks log an error then."""
    tasks = set[asyncio.Task[None]]()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(handle(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return accept


async def open_stream(
    address: Address, limit_s: float = CONNECT_S
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | ConnectFailure:
    """Connect to an address, or return why that failed."""
    began_s = time.monotonic()
    connecting = socket.socket(address.family)
    connecting.setblocking(False)
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.get_running_loop().sock_connect(connecting, address.sockaddr)
        return await asyncio.open_connection(sock=connecting, limit=MAX_MESSAGE_BYTES)
    except BaseException as error:
        connecting.close()
        seconds = time.monotonic() - began_s
        match error:
            case TimeoutError():  # ours, or the system's ETIMEDOUT
                return ConnectFailure("silent", seconds)
            case ConnectionRefusedError():
                return ConnectFailure("refused", seconds)
            case OSError(errno=code):
                kind: FailureKind = "unreachable" if code in _UNREACHABLE else "failed"
                return ConnectFailure(kind, seconds, os.strerror(code) if code else str(error))
        raise


async def connect(address: Address, limit_s: float = CONNECT_S) -> Connection | ConnectFailure:
    opened = await open_stream(address, limit_s)
    return opened if isinstance(opened, ConnectFailure) else Connection(*opened)


async def connect_to(endpoint: str, limit_s: float = CONNECT_S) -> Connection | ConnectFailure:
    """Connect to a numeric ``host:port``."""
    host, _, port = endpoint.rpartition(":")
    try:
        return await connect(numeric(host.strip("[]"), int(port)), limit_s)
    except (OSError, ValueError) as error:
        return ConnectFailure("failed", 0.0, str(error))


async def refuses(endpoint: str, limit_s: float = 1.0) -> bool:
    """Return whether a machine is up where nothing listens at a port any more: the program that did has ended."""
    found = await connect_to(endpoint, limit_s)
    if isinstance(found, Connection):
        found.close()
        return False
    return found.kind == "refused"


def printable(text: Any, limit: int = 20_000) -> str:
    """Return another machine's text without control characters, so that it can't move the cursor of this terminal."""
    cut = str(text)[:limit]
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in cut)
