"""A machine that joins a meeting: reaches the point, introduces itself, tries the others, and learns who it is."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from evenload.errors import LaunchError
from evenload.rendezvous import PROTOCOL
from evenload.rendezvous import host_info as cards_of
from evenload.rendezvous import world as worlds
from evenload.rendezvous.address import Address, own_addresses
from evenload.rendezvous.connect import ATTEMPT_S, Miss, dial
from evenload.rendezvous.host_info import Card
from evenload.rendezvous.messages import Message, Wire, printable, wait_readable
from evenload.rendezvous.reachability import Door, Doorplate, Round
from evenload.rendezvous.settings import Terms
from evenload.rendezvous.world import World
from evenload.version import __version__

_AGAIN_S = 0.5
_WORD_S = 3.0
_ANSWER_S = 5.0
"""How long the meeting point may take to answer the introduction."""
_TICK_S = 0.05


@dataclass(frozen=True)
class Invitation:
    """What the meeting point told at its end."""

    node_rank: int
    world: World
    store_port: int
    point: str
    """What the meeting point's machine is called."""


def reach(
    terms: Terms, addresses: Sequence[Address], asked: Callable[[], bool], say: Callable[[str], None]
) -> Wire | None:
    """Connects to the meeting point, which may begin later than we do; None when the user asked to end.

    Raises:
        LaunchError: it can't be reached in time; the message tells a refusal, silence and a missing way apart.
    """
    began_s = time.monotonic()
    deadline = began_s + terms.reach_s
    next_word_s = began_s + _WORD_S
    misses: dict[Address, Miss] = {}
    while True:
        for address in addresses:
            left_s = deadline - time.monotonic()
            found = dial(address, max(0.1, min(ATTEMPT_S, left_s)), asked)
            if isinstance(found, socket.socket):
                return Wire(found)
            misses[address] = found
            if asked():
                return None
            now_s = time.monotonic()
            if now_s >= next_word_s and now_s < deadline:
                next_word_s = now_s + _WORD_S
                say(f"{address}: {misses[address].describe()}; trying for {deadline - now_s:.0f} s more")
        if time.monotonic() >= deadline:
            _give_up(terms, misses)
        pause_s = time.monotonic() + _AGAIN_S
        while time.monotonic() < pause_s and not asked():
            time.sleep(0.02)


def _give_up(terms: Terms, misses: dict[Address, Miss]) -> NoReturn:
    told = "; ".join(f"{address}: {miss.describe()}" for address, miss in misses.items())
    kinds = {miss.kind for miss in misses.values()}
    here = ", ".join(own_addresses()) or "none"
    advice = []
    if "refused" in kinds:
        advice.append(f"on {terms.endpoint.host} type: {terms.command}")
    if kinds & {"silent", "unreachable"}:
        advice.append(
            f"on {terms.endpoint.host} let the port through: sudo ufw allow {terms.endpoint.port}/tcp, or sudo firewall-cmd "
            f"--add-port={terms.endpoint.port}/tcp"
        )
    advice.append(
        "HOST must be the name or address of one of the machines on which the command is typed (this one has "
        f"{here}); from here `evenload doctor --host {terms.endpoint}` looks closer"
    )
    raise LaunchError(
        f"--host {terms.endpoint}: the meeting point was not reached within {terms.reach_s:g} s (--wait SECONDS tries "
        f"longer): {told}.\n  " + "\n  ".join(advice)
    )


def join(
    terms: Terms, wire: Wire, card: Card, asked: Callable[[], bool], say: Callable[[str], None]
) -> Invitation | None:
    """Takes part in the meeting until it is over; None when the user asked to end.

    Raises:
        LaunchError: the meeting point refuses, or is gone; or what answers there is no meeting point.
    """
    try:
        door = Door(card.address)
    except OSError as error:
        raise LaunchError(
            f"no port can be opened at {card.address}, an address of this machine: {error.strerror}"
        ) from None
    visit = _Stay(terms, wire, card, door, say)
    try:
        return visit.run(asked)
    finally:
        door.close()


class _Stay:
    """One machine's stay at a meeting."""

    def __init__(self, terms: Terms, wire: Wire, card: Card, door: Door, say: Callable[[str], None]) -> None:
        self._terms = terms
        self._wire = wire
        self._card = card
        self._door = door
        self._say = say
        self._point = terms.endpoint.host
        self._welcomed = False
        self._round: Round | None = None
        self._node_rank = 0

    def run(self, asked: Callable[[], bool]) -> Invitation | None:
        """From the introduction to the last word."""
        plate = self._door.plate
        self._wire.send(
            "hello",
            what="run",
            protocol=PROTOCOL,
            evenload=__version__,
            card=cards_of.as_message(self._card),
            door=[plate.port, plate.token],
        )
        began_s = time.monotonic()
        while True:
            if asked():
                self._wire.send("left")
                self._wire.finish()
                return None
            while (message := self._wire.take()) is not None:
                invitation = self._take(message)
                if invitation is not None:
                    return invitation
            self._check(began_s)
            self._door.poll()
            self._report_round()
            self._wire.beat()
            wait_readable([self._wire], _TICK_S)

    def _take(self, message: Message) -> Invitation | None:
        match message["kind"]:
            case "welcome":
                self._welcomed = True
                self._point = printable(message.get("host_name") or self._point, 200)
                self._wire.send("arrived", time_s=time.time())
                self._say(
                    f"met {self._point} at {self._wire.peer}, over {self._card.interface or 'an unknown interface'} "
                    f"({self._card.address}), which gloo and NCCL will use"
                )
            case "waiting" | "note":
                self._say(printable(message.get("text")))
            case "refuse":
                self._wire.close()
                raise LaunchError(printable(message.get("text")))
            case "roster":
                self._begin_round(message)
            case "go":
                return Invitation(
                    int(message["node_rank"]),
                    worlds.from_message(message["world"]),
                    int(message["store_port"]),
                    self._point,
                )
        return None

    def _begin_round(self, message: Message) -> None:
        self._node_rank = int(message["node_rank"])
        plates = [Doorplate(**plate) for plate in message["plates"]]
        self._round = Round([plate for index, plate in enumerate(plates) if index != self._node_rank])

    def _report_round(self) -> None:
        if self._round is None or not self._round.poll():
            return
        misses: list[Any] = [None if a.miss is None else asdict(a.miss) for a in self._round.attempts]
        misses.insert(self._node_rank, None)
        self._wire.send("reached", misses=misses)
        self._round = None

    def _check(self, began_s: float) -> None:
        """Is the other side there, and what it should be?

        Raises:
            LaunchError: no.
        """
        where = f"{self._terms.endpoint} ({self._wire.peer})"
        if self._wire.lost and self._welcomed:
            raise LaunchError(
                f"{self._point}, which serves the meeting point {where}, is gone: {self._wire.lost}; start again on all machines"
            )
        if self._wire.lost:
            raise LaunchError(
                f"--host {where}: what listens there is no meeting point of Evenload ({self._wire.lost}); choose another "
                "port, the same on all machines"
            )
        if not self._welcomed and time.monotonic() - began_s > _ANSWER_S:
            raise LaunchError(
                f"--host {where}: the connection is taken, but no answer came within {_ANSWER_S:.0f} s: another program "
                "listens there (choose another port, the same on all machines), or large packets are lost on the way (MTU); "
                f"`evenload doctor --host {self._terms.endpoint}` tells which"
            )
