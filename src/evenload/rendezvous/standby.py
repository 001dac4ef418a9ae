"""`Standby`: the port of a member. Other members come here when the coordinator is lost; other launches are sent to it."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from evenload.rendezvous import run_state
from evenload.rendezvous.connection import MAX_MESSAGE_BYTES, Connection, Message, printable
from evenload.rendezvous.run_state import RunState

_HELLO_S = 5.0
_HOLD_S = 20.0
"""A machine whose coordinator is lost, while this one's is not, is refused after so long."""


@dataclass(frozen=True)
class Supporter:
    """A machine that waits for this one to take over."""

    connection: Connection
    state: RunState
    ended: frozenset[int]
    """Machines whose supervisors have certainly ended, as it has seen."""
    clock_offset_s: float
    """Its clock minus ours."""
    launch_id: str


class Standby:
    def __init__(self, listener: socket.socket, coordinator: str) -> None:
        """``coordinator``: its ``host:port``."""
        self.coordinator = coordinator
        self.supporters: dict[int, Supporter] = {}
        """By number."""
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._handlers: dict[Connection, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    async def start(self) -> None:
        copy = self._listener.dup()  # the server closes it
        self._server = await asyncio.start_server(self._accept, sock=copy, limit=MAX_MESSAGE_BYTES)

    async def wait(self, limit_s: float) -> None:
        """Wait until machines come or go."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                self._changed.clear()
                await self._changed.wait()

    async def hand_over(self) -> tuple[socket.socket, dict[int, Supporter]]:
        """End the service; return the port, and the machines that wait here."""
        supporters, tasks = dict(self.supporters), tuple(self._handlers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        kept = [supporter.connection for supporter in supporters.values()]
        for connection in self._handlers:
            if connection not in kept:  # it came at the last moment, and tries again
                connection.close()
        if self._server is not None:
            self._server.close()
        return self._listener, supporters

    async def refuse_all(self, text: str) -> None:
        _, supporters = await self.hand_over()
        for supporter in supporters.values():
            supporter.connection.send("refuse", text=text)
        await asyncio.gather(*(supporter.connection.finish(0.2) for supporter in supporters.values()))

    def close(self) -> None:
        for connection, task in self._handlers.items():
            task.cancel()
            connection.close()
        if self._server is not None:
            self._server.close()
        self._listener.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self._handlers[connection] = asyncio.create_task(self._handle(connection))

    async def _handle(self, connection: Connection) -> None:
        hello: Message | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_HELLO_S):
                hello = await connection.receive()
        match hello and hello.get("what"):
            case "takeover" if hello is not None:
                await self._hold(connection, hello)
            case "run":
                connection.send("elsewhere", endpoint=self.coordinator)
            case "doctor":
                connection.send("refuse", text=f"a run is in progress here; its coordinator is at {self.coordinator}")
        await connection.finish(0.2)
        self._handlers.pop(connection, None)

    async def _hold(self, connection: Connection, hello: Message) -> None:
        """Keep a machine waiting until this one takes over; refuse it if that does not happen."""
        try:
            node = int(hello["node"])
            offset_s = float(hello["time_s"]) - time.time()
            state, ended = run_state.from_message(hello["state"]), frozenset(map(int, hello["ended"]))
            supporter = Supporter(connection, state, ended, offset_s, printable(hello["launch_id"], 50))
        except (KeyError, TypeError, ValueError):
            return
        self.supporters[node] = supporter
        self._changed.set()
        connection.start_heartbeats()
        try:
            async with asyncio.timeout(_HOLD_S):
                while await connection.receive() is not None:
                    pass
        except TimeoutError:
            connection.send("refuse", text="the coordinator is lost there alone")
        if self.supporters.get(node) is supporter:
            del self.supporters[node]
        self._changed.set()
