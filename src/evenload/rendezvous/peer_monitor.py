"""All machines of a run, seen from one supervisor while ranks train: who failed, who is gone, whether all are through.

The meeting point decides what the cause of an end was, and tells it; the guests tell it what happens to them. A supervisor
that is killed is seen at once, because the system closes its connection; a machine that goes down, or a network that is cut,
after SILENT_S.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from evenload.rendezvous.messages import Wire, printable

_HEAR_LATECOMER_S = 2.0


@dataclass(frozen=True)
class Cause:
    """Why a run ended, as all its machines tell it."""

    text: str
    exit_code: int = 1
    consequence: bool = False
    """It only tells that another rank is gone; never the cause."""
    time_s: float = 0.0
    """Since the epoch, by the clock of the meeting point."""


class Party(Protocol):
    """What a supervisor knows of the others."""

    @property
    def decides(self) -> bool:
        """Whether this machine chooses among the causes."""

    @property
    def verdict(self) -> Cause | None:
        """Why the run ends, once that is decided."""

    @property
    def all_ended(self) -> bool:
        """Whether all ranks of all machines are through."""

    @property
    def causes(self) -> Sequence[Cause]:
        """What other machines told, or their absence tells."""

    def poll(self) -> None:
        """Hears the others and lets them hear from us; called many times a second."""

    def report(self, cause: Cause) -> None:
        """Tells what happened to a rank of this machine."""

    def tell_ended(self) -> None:
        """Tells that the ranks of this machine are through; a second call does nothing."""

    def end(self, verdict: Cause) -> None:
        """Ends the run on all machines, with these words."""

    def close(self) -> None:
        """Leaves; a second call does nothing."""


class Alone:
    """One machine: there are no others."""

    decides = True
    all_ended = True
    causes: Sequence[Cause] = ()

    def __init__(self) -> None:
        self.verdict: Cause | None = None

    def poll(self) -> None:
        """Nobody speaks."""

    def report(self, cause: Cause) -> None:
        """Nobody hears it."""

    def tell_ended(self) -> None:
        """Nobody waits for it."""

    def end(self, verdict: Cause) -> None:
        """It ends here alone."""
        self.verdict = verdict

    def close(self) -> None:
        """There is nothing to leave."""


@dataclass
class Guest:
    """Another machine, seen from the meeting point."""

    wire: Wire
    name: str
    ranks: str
    """Such as ``ranks 2-3``."""
    clock_s: float
    """Its clock minus ours."""
    ended: bool = False
    gone: bool = False


class PointParty:
    """The side of the meeting point."""

    decides = True

    def __init__(self, guests: Sequence[Guest], listener: socket.socket | None, busy: str) -> None:
        """Args:
        guests: the other machines.
        listener: the meeting's port, at which who comes too late is told so.
        busy: what they are told.
        """
        self.verdict: Cause | None = None
        self._causes: list[Cause] = []
        self._guests = tuple(guests)
        self._listener = listener
        self._busy = busy
        self._latecomers: list[tuple[Wire, float]] = []
        self._ended = self._done = self._closed = False

    @property
    def causes(self) -> Sequence[Cause]:
        """What guests told, or their absence tells."""
        return tuple(self._causes)

    @property
    def all_ended(self) -> bool:
        """Whether our ranks and those of all guests are through; the guests are told then."""
        over = self._ended and all(guest.ended for guest in self._guests)
        if over and not self._done:
            self._done = True
            self._tell("done")
        return over

    def poll(self) -> None:
        """Hears all guests."""
        if self._closed:
            return
        for guest in self._guests:
            if guest.gone:
                continue
            for message in guest.wire.poll():
                self._take(guest, message)
            guest.wire.beat()
            if guest.wire.lost:
                guest.gone = True
                if not guest.ended:
                    self._causes.append(_gone(f"{guest.name} ({guest.ranks})", guest.wire.lost))
        self._turn_away()

    def report(self, cause: Cause) -> None:
        """Our own ranks' stories are known to us."""

    def tell_ended(self) -> None:
        """Our ranks are through."""
        self._ended = True

    def end(self, verdict: Cause) -> None:
        """Tells all guests why the run ends."""
        if self.verdict is None:
            self.verdict = verdict
            self._tell("end", cause=_as_message(verdict))

    def close(self) -> None:
        """Says the last words and closes the port."""
        if self._closed:
            return
        if self.verdict is None and not self._done:
            self.end(Cause("the supervisor at the meeting point ended without a cause that it knew"))
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        for wire, _ in self._latecomers:
            wire.close()
        for guest in self._guests:
            guest.wire.finish()

    def _take(self, guest: Guest, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ended":
            guest.ended = True
        elif kind in ("failed", "asked"):
            cause = _cause(message)
            if cause is None:
                return
            cause = replace(cause, time_s=cause.time_s - guest.clock_s)
            if kind == "failed":
                self._causes.append(cause)
            else:
                self.end(cause)

    def _tell(self, kind: str, **content: Any) -> None:
        for guest in self._guests:
            guest.wire.send(kind, **content)

    def _turn_away(self) -> None:
        """Tells who comes now that the run has begun."""
        if self._listener is None:
            return
        with suppress(OSError):
            caller, _ = self._listener.accept()
            self._latecomers.append((Wire(caller), time.monotonic()))
        waiting = []
        for wire, since_s in self._latecomers:
            # Heard first: closing over what was not read would take our words back.
            if wire.poll():
                wire.send("refuse", text=self._busy)
                wire.finish(0.2)
            elif wire.lost or time.monotonic() - since_s > _HEAR_LATECOMER_S:
                wire.close()
            else:
                waiting.append((wire, since_s))
        self._latecomers = waiting


class GuestParty:
    """The side of a guest."""

    def __init__(self, wire: Wire, point: str) -> None:
        """Args:
        wire: to the meeting point.
        point: what its machine is called.
        """
        self.verdict: Cause | None = None
        self.all_ended = False
        self._wire = wire
        self._point = point
        self._causes: list[Cause] = []
        self._ended = False

    @property
    def decides(self) -> bool:
        """Only when the meeting point is gone."""
        return bool(self._causes)

    @property
    def causes(self) -> Sequence[Cause]:
        """That the meeting point is gone, if it is."""
        return tuple(self._causes)

    def poll(self) -> None:
        """Hears the meeting point."""
        if self._causes or self.all_ended or self.verdict is not None:
            return
        for message in self._wire.poll():
            if message["kind"] == "done":
                self.all_ended = True
            elif message["kind"] == "end":
                self.verdict = _cause(message)
        self._wire.beat()
        if self._wire.lost and not self.all_ended and self.verdict is None:
            self._causes.append(_gone(f"{self._point}, the machine of the meeting point,", self._wire.lost))

    def report(self, cause: Cause) -> None:
        """Tells the meeting point."""
        self._wire.send("failed", cause=_as_message(cause))

    def tell_ended(self) -> None:
        """Tells the meeting point."""
        if not self._ended:
            self._ended = True
            self._wire.send("ended")

    def end(self, verdict: Cause) -> None:
        """Asks the meeting point to end the run everywhere."""
        if self.verdict is None:
            self.verdict = verdict
            self._wire.send("asked", cause=_as_message(verdict))

    def close(self) -> None:
        """Says the last words."""
        if self._wire.fileno() >= 0:
            self._wire.finish(0.5)


def tell_all(guests: Sequence[Wire], kind: str, text: str, finish: Callable[[Wire], None] = Wire.finish) -> None:
    """Says one thing to all, and closes."""
    for wire in guests:
        wire.send(kind, text=text)
    for wire in guests:
        finish(wire)


def _gone(who: str, how: str) -> Cause:
    return Cause(
        f"{who} is gone: {how}. Its `evenload run` was killed, its machine went down, or the network broke. Start the same "
        "command again on all machines: the run goes on from its newest checkpoint",
        time_s=time.time(),
    )


def _as_message(cause: Cause) -> dict[str, Any]:
    return asdict(replace(cause, text=printable(cause.text)))


def _cause(message: dict[str, Any]) -> Cause | None:
    raw = message.get("cause")
    if not isinstance(raw, dict):
        return None
    try:
        return Cause(
            printable(raw["text"]), int(raw["exit_code"]) & 0xFF, bool(raw["consequence"]), float(raw["time_s"])
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
