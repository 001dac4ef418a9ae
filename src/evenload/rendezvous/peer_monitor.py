"""The other machines of a run while ranks train: messages to and from them, which of them is lost, and the run's end.

The coordinator decides; the members report what happens to their ranks and do what it says. The death of a supervisor is seen
at once, because the system closes its connection; a machine that goes down, or a network that is cut, after a silence. Messages
are received in the thread of an event loop; the methods may be called, and the properties read, at any time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from evenload.rendezvous.connection import ConnectFailure, Connection, Message, printable
from evenload.rendezvous.event_loop import EventLoopThread
from evenload.rendezvous.reachability import PROBE_S, ProbeTarget, failure_from_message, probe

if TYPE_CHECKING:  # a run on one machine does not import it
    from evenload.rendezvous.world import Machine

COORDINATOR = 0
"""Number of the coordinator's machine."""
_STARTING_SILENCE_S = 30.0
"""A machine from which nothing comes for so long is lost while ranks start: the import of torch may hold its interpreter."""
_QUIET_S = 2.0
"""A machine that sent nothing for so long may be lost: nothing is concluded about its ranks until that is decided."""


@dataclass(frozen=True)
class FailureCause:
    """The cause of a run's end, as all its machines print it."""

    text: str
    exit_code: int = 1
    consequence: bool = False
    """The failure is only that another rank is gone; never the cause of the end."""
    time_s: float = 0.0
    """Since the epoch, by the coordinator's clock."""


@dataclass(frozen=True)
class PeerMessage:
    node: int
    kind: str
    content: Message
    """Of this version, but not checked; ``time_s`` is by the receiver's clock."""


@dataclass(frozen=True)
class PeerLost:
    node: int
    name: str
    reason: str
    is_silent: bool = False
    """Its supervisor may live: the connection ended by silence."""


@dataclass(frozen=True)
class PeerJoined:
    """A machine that joins the run in progress."""

    node: int
    machine: Machine


PeerEvent = PeerMessage | PeerLost | PeerJoined


class PeerMonitor:
    """A supervisor's view of the other machines. This class serves a run on one machine, which has none."""

    coordinates = True
    """True where this machine decides on the members, and on the cause of an end."""

    def __init__(self) -> None:
        self.end_cause: FailureCause | None = None
        """The cause of the run's end, once it is decided."""
        self.end_code: int | None = None
        """Exit code of a run that ended well, once all ranks of all machines have ended."""
        self._events: deque[PeerEvent] = deque()

    @property
    def coordinator_lost(self) -> PeerLost | None:
        """Set on a member that has lost the coordinator."""
        return None

    def send(self, node: int, kind: str, **content: Any) -> None:
        """Send a message to a machine; nothing happens if it is lost."""

    def received(self) -> list[PeerEvent]:
        """Return what has happened since the last call, the oldest first."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def is_quiet(self, node: int) -> bool:
        """Return True if nothing has come from a machine for a while: it may be lost."""
        return False

    def limit_silence(self, seconds: float) -> None:
        """Let a machine count as lost, from now on, once nothing has come from it for so long. The coordinator calls it."""

    def report_ended(self, exit_code: int) -> None:
        """Report that all ranks of all machines have ended well. The coordinator calls it."""
        self.end_code = exit_code

    def end_run(self, cause: FailureCause) -> None:
        """End the run on all machines, with this cause."""
        self.end_cause = cause

    def close(self) -> None:
        """Send the last messages and disconnect; a second call does nothing."""


@dataclass
class Peer:
    """A member, seen from the coordinator."""

    connection: Connection
    name: str
    ranks: str
    """Such as ``ranks 2-3``."""
    clock_offset_s: float
    """Its clock minus the coordinator's."""
    launch_id: str = ""


class _ConnectedMonitor(PeerMonitor):
    def __init__(self, loop: EventLoopThread) -> None:
        super().__init__()
        self._loop = loop
        self._receiving: list[asyncio.Task[None]] = []
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.run(self._finish())
            self._loop.close()

    async def _finish(self) -> None:
        for task in self._receiving:
            task.cancel()
        await asyncio.gather(*self._receiving, return_exceptions=True)


class CoordinatorMonitor(_ConnectedMonitor):
    """The coordinator's monitor, created in the thread of ``loop``, which it closes.

    ``close_port`` closes the rendezvous port, where later machines join or are refused.
    """

    def __init__(self, loop: EventLoopThread, peers: Sequence[Peer], close_port: Callable[[], Awaitable[None]]) -> None:
        super().__init__(loop)
        self._peers = dict(enumerate(peers, start=1))
        self._lost: set[int] = set()
        self._close_port = close_port
        self._silence_s: float | None = None
        self._probes: dict[int, asyncio.Future[ConnectFailure | None]] = {}
        for peer in peers:
            peer.connection.silence_s = _STARTING_SILENCE_S
        self._receiving = [asyncio.create_task(self._receive(node, peer)) for node, peer in self._peers.items()]

    def send(self, node: int, kind: str, **content: Any) -> None:
        self._loop.call_soon(lambda: self._peers[node].connection.send(kind, **content))

    def is_quiet(self, node: int) -> bool:
        return time.monotonic() - self._peers[node].connection.received_s > _QUIET_S

    def limit_silence(self, seconds: float) -> None:
        def limit() -> None:
            self._silence_s = seconds
            for peer in self._peers.values():
                _limit_silence(peer, seconds)

        self._loop.call_soon(limit)

    def report_ended(self, exit_code: int) -> None:
        if self.end_code is None:
            self.end_code = exit_code
            self._loop.call_soon(lambda: self._send_all("done", exit_code=exit_code))

    def end_run(self, cause: FailureCause) -> None:
        if self.end_cause is None:
            self.end_cause = cause
            self._loop.call_soon(lambda: self._send_all("end", cause=_shortened(cause)))

    # in the thread of the loop, for machines that join later

    @property
    def num_machines(self) -> int:
        return 1 + len(self._peers) - len(self._lost)

    @property
    def names(self) -> list[str]:
        """The names of the members that are not lost."""
        return [peer.name for node, peer in self._peers.items() if node not in self._lost]

    def add(self, node: int, peer: Peer, machine: Machine) -> None:
        self._peers[node] = peer
        self._events.append(PeerJoined(node, machine))
        if self._silence_s is not None:
            _limit_silence(peer, self._silence_s)
        self._receiving.append(asyncio.create_task(self._receive(node, peer)))

    def drop(self, launch_id: str) -> None:
        """Lose the old connection of a machine that connects again, at once."""
        for node, peer in self._peers.items():
            if launch_id and peer.launch_id == launch_id and node not in self._lost:
                peer.connection.lost = "it connected again"
                self._lose(node, peer)
                peer.connection.close()

    async def probe_from_all(self, target: ProbeTarget) -> list[tuple[str, ConnectFailure | None]]:
        """Let all members probe a machine; return the names of those that answered in time, and the outcomes."""
        asked = {node: peer for node, peer in self._peers.items() if node not in self._lost}
        self._probes = {node: asyncio.get_running_loop().create_future() for node in asked}
        for peer in asked.values():
            peer.connection.send("probe", target=target)
        if asked:
            await asyncio.wait(self._probes.values(), timeout=PROBE_S + 1.0)
        return [(asked[node].name, answer.result()) for node, answer in self._probes.items() if answer.done()]

    # receiving

    def _lose(self, node: int, peer: Peer) -> None:
        if node not in self._lost and self.end_code is None:
            self._lost.add(node)
            self._events.append(PeerLost(node, f"{peer.name} ({peer.ranks})", peer.connection.lost))

    async def _receive(self, node: int, peer: Peer) -> None:
        async for message in peer.connection.messages():
            if message["kind"] == "probed":
                if (probing := self._probes.get(node)) is not None and not probing.done():
                    probing.set_result(failure_from_message(message["failure"]))
                continue
            if message["kind"] == "stop":
                if (cause := _cause_from_message(message)) is not None:
                    self.end_run(replace(cause, time_s=cause.time_s - peer.clock_offset_s))
                continue
            if isinstance(message.get("time_s"), int | float):
                message["time_s"] -= peer.clock_offset_s
            self._events.append(PeerMessage(node, message["kind"], message))
        self._lose(node, peer)

    def _send_all(self, kind: str, **content: Any) -> None:
        for peer in self._peers.values():
            peer.connection.send(kind, **content)

    async def _finish(self) -> None:
        if self.end_code is None and self.end_cause is None:
            self._send_all("end", cause=FailureCause("the coordinator's supervisor ended without a known cause"))
        await super()._finish()
        await self._close_port()
        await asyncio.gather(*(peer.connection.finish() for peer in self._peers.values()))


class MemberMonitor(_ConnectedMonitor):
    """A member's monitor, created in the thread of ``loop``, which it closes."""

    coordinates = False

    def __init__(self, loop: EventLoopThread, connection: Connection, coordinator_name: str) -> None:
        super().__init__(loop)
        self._connection = connection
        connection.silence_s = _STARTING_SILENCE_S
        self._coordinator_name = coordinator_name
        self._lost: PeerLost | None = None
        self._receiving = [asyncio.create_task(self._receive())]

    @property
    def coordinator_lost(self) -> PeerLost | None:
        return self._lost

    def send(self, node: int, kind: str, **content: Any) -> None:
        self._loop.call_soon(lambda: self._connection.send(kind, **content))

    def report_ended(self, exit_code: int) -> None:
        """Do nothing: the coordinator knows which ranks have ended."""

    def end_run(self, cause: FailureCause) -> None:
        if self.end_cause is None:
            self.end_cause = cause
            self.send(COORDINATOR, "stop", cause=_shortened(cause))

    async def _receive(self) -> None:
        async for message in self._connection.messages():
            match message["kind"]:
                case "done":
                    self.end_code = int(message["exit_code"])
                case "end":
                    self.end_cause = self.end_cause or _cause_from_message(message)
                case "silence":
                    self._connection.silence_s = float(message["seconds"])
                case "probe":
                    self._receiving.append(asyncio.create_task(self._probe(ProbeTarget(**message["target"]))))
                case kind:
                    self._events.append(PeerMessage(COORDINATOR, kind, message))
        if self.end_code is None and self.end_cause is None:
            name = f"{self._coordinator_name}, the coordinator,"
            self._lost = PeerLost(COORDINATOR, name, self._connection.lost, self._connection.is_silent)

    async def _probe(self, target: ProbeTarget) -> None:
        self._connection.send("probed", failure=await probe(target))

    async def _finish(self) -> None:
        await super()._finish()
        await self._connection.finish(0.5)


def _limit_silence(peer: Peer, seconds: float) -> None:
    peer.connection.silence_s = seconds
    peer.connection.send("silence", seconds=seconds)


def cause_of_loss(lost: PeerLost) -> FailureCause:
    return FailureCause(
        f"{lost.name} is gone: {lost.reason}. Its `evenload run` was killed, its machine went down, or the network broke. Start "
        "the same command again on all machines: the run goes on from its newest checkpoint",
        time_s=time.time(),
    )


def _shortened(cause: FailureCause) -> FailureCause:
    return replace(cause, text=printable(cause.text))


def _cause_from_message(message: Message) -> FailureCause | None:
    try:
        raw = message["cause"]
        return FailureCause(
            printable(raw["text"]), int(raw["exit_code"]) & 0xFF, bool(raw["consequence"]), float(raw["time_s"])
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
