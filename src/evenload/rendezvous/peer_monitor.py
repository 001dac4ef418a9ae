"""The other machines of a run while ranks train: messages to and from them, which of them is lost, and the run's end.

The coordinator decides; the members report what happens to their ranks and do what it says. The death of a supervisor is seen
at once, because the system closes its connection; a machine that goes down, or a network that is cut, after a silence. Messages
are received in the thread of an event loop; the methods may be called, and the properties read, at any time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from evenload.rendezvous.connection import Connection, Message, printable
from evenload.rendezvous.event_loop import EventLoopThread

if TYPE_CHECKING:  # a run on one machine does not import them
    from evenload.rendezvous.run_state import RunState
    from evenload.rendezvous.world import Machine

COORDINATOR = -1
"""Stands for the coordinator's machine, whichever it is, where a member sends or receives."""
STARTING_SILENCE_S = 30.0
"""A machine from which nothing comes for so long is lost while ranks start: the import of torch may hold its interpreter."""


@dataclass(frozen=True)
class FailureCause:
    """The cause of a run's end, as all its machines print it."""

    text: str
    exit_code: int = 1
    consequence: bool = False
    """The failure is only that another rank is gone; never the cause of the end."""
    time_s: float = 0.0
    """Since the epoch, by the coordinator's clock."""
    lost: bool = False
    """A process or device is gone, and neither the script nor a request to stop is the reason."""


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


@dataclass(frozen=True)
class CoordinatorChanged:
    """On a member: another machine is the coordinator from now on."""

    name: str
    store: str
    """``host:port`` of its store."""


PeerEvent = PeerMessage | PeerLost | PeerJoined | CoordinatorChanged


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
    def cut_off(self) -> PeerLost | None:
        """Set where the run can't go on: the coordinator is lost and nobody takes over, or too many of the others are lost."""
        return None

    @property
    def endpoints(self) -> Sequence[str]:
        """Where the other machines can be reached, one of which may be the coordinator; empty until ranks train."""
        return ()

    @property
    def takeover(self) -> Takeover | None:
        """Set on a member that is the coordinator from now on."""
        return None

    def send(self, node: int, kind: str, **content: Any) -> None:
        """Send a message to a machine; nothing happens if it is lost."""

    def received(self) -> list[PeerEvent]:
        """Return what has happened since the last call, the oldest first."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def announce(self, members: Mapping[str, Any]) -> None:
        """Let all machines know what the next coordinator must. The coordinator calls it."""

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


class ConnectedMonitor(PeerMonitor):
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


@dataclass(frozen=True)
class Takeover:
    """This machine is the coordinator from now on."""

    monitor: ConnectedMonitor
    state: RunState
    lost: tuple[PeerLost, ...]
    """The machines that the run goes on without."""
    lost_s: float
    """When this machine noticed the loss, since the epoch."""
    endpoint: str
    """Where further machines can join."""


def cause_of_loss(lost: PeerLost) -> FailureCause:
    return FailureCause(
        f"{lost.name} is gone: {lost.reason}. Its `evenload run` was killed, its machine went down, or the network broke. Start "
        "the same command again on all machines: the run goes on from its newest checkpoint",
        time_s=time.time(),
    )


def shortened(cause: FailureCause) -> FailureCause:
    return replace(cause, text=printable(cause.text))


def cause_from_message(message: Message) -> FailureCause | None:
    try:
        raw = message["cause"]
        return FailureCause(
            printable(raw["text"]), int(raw["exit_code"]) & 0xFF, bool(raw["consequence"]), float(raw["time_s"])
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
