"""The other machines of a run while ranks train: which rank failed first, which machine is lost, whether all ranks ended.

The coordinator decides on the cause of an end and sends it to all; the members report what happens to their ranks. The death
of a supervisor is seen at once, because the system closes its connection; a machine that goes down, or a network that is
cut, after SILENCE_S. Messages are received in the thread of an event loop; the properties may be read at any time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evenload.rendezvous.connection import Connection, Message, printable
from evenload.rendezvous.event_loop import EventLoopThread


@dataclass(frozen=True)
class FailureCause:
    """The cause of a run's end, as all its machines print it."""

    text: str
    exit_code: int = 1
    consequence: bool = False
    """The failure is only that another rank is gone; never the cause of the end."""
    time_s: float = 0.0
    """Since the epoch, by the coordinator's clock."""


class PeerMonitor:
    """A supervisor's view of the other machines. This class serves a run on one machine, which has none."""

    def __init__(self) -> None:
        self.end_cause: FailureCause | None = None
        """The cause of the run's end, once it is decided."""
        self.all_ended = False
        """True once all ranks of all machines have ended."""
        self._causes: list[FailureCause] = []

    @property
    def decides(self) -> bool:
        """True where this machine chooses among the causes."""
        return True

    @property
    def causes(self) -> Sequence[FailureCause]:
        """Failures that other machines reported, and machines that are lost."""
        return tuple(self._causes)

    def report_failure(self, cause: FailureCause) -> None:
        """Report the failure of a rank of this machine."""

    def report_ended(self) -> None:
        """Report that the ranks of this machine have ended; a second call does nothing."""
        self.all_ended = True

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
    ended: bool = False


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

    ``close_port`` closes the rendezvous port, where later machines are refused.
    """

    def __init__(self, loop: EventLoopThread, peers: Sequence[Peer], close_port: Callable[[], Awaitable[None]]) -> None:
        super().__init__(loop)
        self._peers = tuple(peers)
        self._close_port = close_port
        self._ended = False
        self._receiving = [asyncio.create_task(self._receive(peer)) for peer in peers]

    def report_ended(self) -> None:
        self._ended = True
        self._loop.call_soon(self._check_ended)

    def end_run(self, cause: FailureCause) -> None:
        self._loop.call_soon(self._end_run, cause)

    async def _receive(self, peer: Peer) -> None:
        async for message in peer.connection.messages():
            if message["kind"] == "ended":
                peer.ended = True
                self._check_ended()
            elif (cause := _cause_from_message(message)) is not None:
                cause = replace(cause, time_s=cause.time_s - peer.clock_offset_s)
                if message["kind"] == "failed":
                    self._causes.append(cause)
                elif message["kind"] == "stop":
                    self._end_run(cause)
        if not peer.ended:
            self._causes.append(_lost(f"{peer.name} ({peer.ranks})", peer.connection.lost))

    def _check_ended(self) -> None:
        if self._ended and not self.all_ended and all(peer.ended for peer in self._peers):
            self._send("done")
            self.all_ended = True

    def _end_run(self, cause: FailureCause) -> None:
        if self.end_cause is None:
            self.end_cause = cause
            self._send("end", cause=_shortened(cause))

    def _send(self, kind: str, **content: Any) -> None:
        for peer in self._peers:
            peer.connection.send(kind, **content)

    async def _finish(self) -> None:
        if not self.all_ended:
            self._end_run(FailureCause("the coordinator's supervisor ended without a known cause"))
        await super()._finish()
        await self._close_port()
        await asyncio.gather(*(peer.connection.finish() for peer in self._peers))


class MemberMonitor(_ConnectedMonitor):
    """A member's monitor, created in the thread of ``loop``, which it closes."""

    def __init__(self, loop: EventLoopThread, connection: Connection, coordinator_name: str) -> None:
        super().__init__(loop)
        self._connection = connection
        self._coordinator_name = coordinator_name
        self._reported_end = False
        self._receiving = [asyncio.create_task(self._receive())]

    @property
    def decides(self) -> bool:
        """True only once the coordinator is lost."""
        return bool(self._causes)

    def report_failure(self, cause: FailureCause) -> None:
        self._send("failed", cause=_shortened(cause))

    def report_ended(self) -> None:
        if not self._reported_end:
            self._reported_end = True
            self._send("ended")

    def end_run(self, cause: FailureCause) -> None:
        if self.end_cause is None:
            self.end_cause = cause
            self._send("stop", cause=_shortened(cause))

    async def _receive(self) -> None:
        async for message in self._connection.messages():
            if message["kind"] == "done":
                self.all_ended = True
            elif message["kind"] == "end" and self.end_cause is None:
                self.end_cause = _cause_from_message(message)
        if not self.all_ended and self.end_cause is None:
            self._causes.append(_lost(f"{self._coordinator_name}, the coordinator,", self._connection.lost))

    def _send(self, kind: str, **content: Any) -> None:
        self._loop.call_soon(lambda: self._connection.send(kind, **content))

    async def _finish(self) -> None:
        await super()._finish()
        await self._connection.finish(0.5)


def _lost(name: str, reason: str) -> FailureCause:
    return FailureCause(
        f"{name} is gone: {reason}. Its `evenload run` was killed, its machine went down, or the network broke. Start the same "
        "command again on all machines: the run goes on from its newest checkpoint",
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
