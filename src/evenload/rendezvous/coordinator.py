"""The meeting point: the machine whose address is HOST gathers the others, compares, and tells who is which rank."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from evenload.errors import ConfigError, LaunchError
from evenload.rendezvous import PROTOCOL
from evenload.rendezvous import host_info as cards_of
from evenload.rendezvous import world as worlds
from evenload.rendezvous.address import chosen_interface, gloo_address
from evenload.rendezvous.connect import Miss
from evenload.rendezvous.host_info import Card
from evenload.rendezvous.messages import Message, Wire, printable, wait_readable
from evenload.rendezvous.peer_monitor import Guest, PointParty, tell_all
from evenload.rendezvous.probe import Sheet, attend
from evenload.rendezvous.reachability import Door, Doorplate, Round
from evenload.rendezvous.settings import Terms
from evenload.rendezvous.world import World
from evenload.version import __version__

WORD_S = 5.0
"""How often it is said who is here and who is missing."""
_HELLO_S = 5.0
"""How long who has connected may take to say who it is."""
_TICK_S = 0.05
_REPORT_S = 8.0
"""How long the machines may take to try each other."""


class _Visitor:
    """Somebody who has connected."""

    def __init__(self, connection: socket.socket) -> None:
        self.wire = Wire(connection)
        self.since_s = time.monotonic()
        self.card: Card | None = None
        self.plate: Doorplate | None = None
        self.asked_clock_s = 0.0
        """When its clock was asked for, by ours."""
        self.clock_s = 0.0
        """Its clock minus ours."""
        self.present = False
        self.misses: list[Any] | None = None
        """What it reported of its tries, one entry a machine."""


class MeetingPoint:
    """One meeting, from the first visitor to the last word before the ranks start."""

    def __init__(
        self,
        terms: Terms,
        card: Card,
        sheet: Sheet,
        listener: socket.socket,
        asked: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        listener.setblocking(False)
        self._terms = terms
        self._card = card
        self._sheet = sheet
        self._listener = listener
        self._asked = asked
        self._say = say
        self._visitors: list[_Visitor] = []
        self._began_s = time.monotonic()

    def gather(self) -> bool:
        """Waits until enough machines are here; False when the user asked to end.

        Raises:
            LaunchError: too few came in time, or one that can't take part. All who are here are told the same.
        """
        terms = self._terms
        deadline = self._began_s + terms.gather_s
        next_word_s = self._began_s + WORD_S
        while len(self._present()) + 1 < terms.max_nodes:
            self._tick()
            now_s = time.monotonic()
            if self._asked():
                self._leave()
                return False
            if now_s >= deadline:
                if len(self._present()) + 1 < terms.min_nodes:
                    self._refuse_all(self._too_few())
                break
            if now_s >= next_word_s:
                next_word_s += WORD_S
                self._tell_waiting(deadline - now_s)
        return True

    def introduce(self, settings: dict[str, Any], store_port: int) -> tuple[World, PointParty] | None:
        """Lets all machines try each other, and tells them who is which rank; None when the user asked to end.

        Args:
            settings: what the command line set.
            store_port: of the store that this machine will serve.

        Raises:
            LaunchError: a machine does not reach another, or leaves meanwhile; all are told.
        """
        guests = self._present()[: self._terms.max_nodes - 1]
        self._card = self._with_address(guests)
        cards = [self._card, *(visitor.card for visitor in guests if visitor.card is not None)]
        try:
            indices = worlds.order(cards, self._terms.max_nodes)
            world = worlds.build_world([cards[index] for index in indices], settings)
        except ConfigError as error:
            self._refuse_all(str(error))
        by_node = [guests[index - 1] for index in indices[1:]]
        if by_node and not self._try_each_other(by_node, world):
            return None
        for node_rank, visitor in enumerate(by_node, start=1):
            visitor.wire.send("go", node_rank=node_rank, world=worlds.as_message(world), store_port=store_port)
        names = ", ".join(machine.name for machine in world.machines)
        party = PointParty(
            [
                Guest(visitor.wire, world.machines[node_rank].name, world.ranks(node_rank), visitor.clock_s)
                for node_rank, visitor in enumerate(by_node, start=1)
            ],
            self._listener,
            f"the run at {self._terms.endpoint} began at {time.strftime('%H:%M:%S')} with {names}, and nobody can join it "
            "now; wait for its end, or choose another port",
        )
        for visitor in self._visitors:
            if visitor not in by_node:
                visitor.wire.send("refuse", text="the run has begun")
                visitor.wire.finish(0.2)
        return world, party

    def close(self) -> None:
        """Closes everything, where the meeting comes to nothing."""
        self._listener.close()
        for visitor in self._visitors:
            visitor.wire.close()

    # who comes

    def _tick(self) -> None:
        wait_readable([self._listener, *(visitor.wire for visitor in self._visitors)], _TICK_S)
        with suppress(OSError):
            connection, _ = self._listener.accept()
            self._visitors.append(_Visitor(connection))
        for visitor in tuple(self._visitors):
            for message in visitor.wire.poll():
                if visitor not in self._visitors:
                    break  # a doctor's talk goes on elsewhere
                self._hear(visitor, message)
            if visitor in self._visitors:
                self._look_after(visitor)

    def _hear(self, visitor: _Visitor, message: Message) -> None:
        match message["kind"]:
            case "hello" if visitor.card is None:
                self._welcome(visitor, message)
            case "arrived" if visitor.card is not None and not visitor.present:
                self._admit(visitor, visitor.card, message)
            case "left" if visitor.card is not None:
                self._drop(visitor)
                self._say(f"{visitor.card.label} left: it was ended there")
            case "reached" if visitor.present:
                misses = message.get("misses")
                visitor.misses = misses if isinstance(misses, list) else []

    def _welcome(self, visitor: _Visitor, message: Message) -> None:
        who = visitor.wire.peer.host
        if message.get("what") == "doctor":
            self._visitors.remove(visitor)
            attend(visitor.wire, self._sheet, message)
            return
        theirs = printable(message.get("evenload"), 50)
        if message.get("protocol") != PROTOCOL or theirs != __version__:
            self._refuse_all(cards_of.version_difference(self._card.label, who, "evenload", (__version__, theirs)))
        try:
            visitor.card = cards_of.from_message(message.get("card"))
            visitor.plate = Doorplate(visitor.card.address, int(message["door"][0]), str(message["door"][1]))
        except (ValueError, KeyError, TypeError, IndexError, OverflowError):
            self._visitors.remove(visitor)
            visitor.wire.close()
            self._say(f"{who} connected, but what it says is no introduction; it is not waited for")
            return
        if visitor.card.job != self._card.job:
            self._visitors.remove(visitor)
            visitor.wire.send(
                "refuse",
                text=f"--rdzv-id {visitor.card.job or '(none)'}: at {self._terms.endpoint} another job meets "
                f"(--rdzv-id {self._card.job or '(none)'}); give the same, or another port",
            )
            visitor.wire.finish(0.2)
            return
        visitor.asked_clock_s = time.time()
        visitor.wire.send("welcome", host_name=self._card.host_name)

    def _admit(self, visitor: _Visitor, card: Card, message: Message) -> None:
        """Compares a machine with this one, now that its clock is known too."""
        with suppress(KeyError, TypeError, ValueError):
            visitor.clock_s = float(message["time_s"]) - (visitor.asked_clock_s + time.time()) / 2
        own = self._with_address([visitor])
        found = cards_of.compare(own, card, visitor.clock_s)
        if found.errors:
            self._refuse_all(found.errors[0], extra=found.errors[1:])
        visitor.present = True
        names = ", ".join(seat.name for seat in card.seats)
        self._say(f"{card.label} is here over {card.interface or 'an unknown interface'}: {names}")
        for note in found.notes:
            self._say(f"note: {note}")
            visitor.wire.send("note", text=f"note: {note}")

    def _look_after(self, visitor: _Visitor) -> None:
        """Lives it, and has it said who it is?"""
        visitor.wire.beat()
        if visitor.wire.lost:
            self._drop(visitor)
            if visitor.card is not None:
                self._say(f"{visitor.card.label} left: {visitor.wire.lost}")
        elif not visitor.present and time.monotonic() - visitor.since_s > _HELLO_S:
            self._drop(visitor)
            self._say(
                f"{visitor.wire.peer.host} connected, but its introduction did not come whole within {_HELLO_S:.0f} s: "
                "another program, or large packets are lost on the way (MTU); `evenload doctor --host "
                f"{self._terms.endpoint}` there tells"
            )

    def _drop(self, visitor: _Visitor) -> None:
        self._visitors.remove(visitor)
        visitor.wire.close()

    def _present(self) -> list[_Visitor]:
        return [visitor for visitor in self._visitors if visitor.present]

    # all are here

    def _with_address(self, guests: Sequence[_Visitor]) -> Card:
        """Our card; the address that guests reached us at, where the meeting listens at all of them."""
        if self._card.address or not guests:
            return self._card
        own = guests[0].wire.own_host
        interface = chosen_interface(own)
        return replace(self._card, address=gloo_address(interface, own), interface=interface)

    def _try_each_other(self, guests: Sequence[_Visitor], world: World) -> bool:
        """False when the user asked to end."""
        try:
            door = Door(self._card.address)
        except OSError as error:
            self._refuse_all(
                f"no port can be opened at {self._card.address} on {self._card.host_name}: {error.strerror}"
            )
        try:
            plates = [door.plate, *(visitor.plate for visitor in guests if visitor.plate is not None)]
            for node_rank, visitor in enumerate(guests, start=1):
                visitor.wire.send("roster", plates=[asdict(plate) for plate in plates], node_rank=node_rank)
            own = Round(plates[1:])
            deadline = time.monotonic() + _REPORT_S
            while True:
                # Own tries first: they must not wait for a quiet guest.
                own_over = own.poll()
                door.poll()
                self._tick()
                if self._asked():
                    self._leave()
                    return False
                gone = [i for i, visitor in enumerate(guests, start=1) if visitor not in self._visitors]
                if gone:
                    self._refuse_all(f"{world.machines[gone[0]].name} left while the machines tried each other")
                late = time.monotonic() >= deadline
                if own_over and (late or all(visitor.misses is not None for visitor in guests)):
                    break
        finally:
            door.close()
        own_misses = [None, *(None if a.miss is None else asdict(a.miss) for a in own.attempts)]
        reports = [own_misses, *(visitor.misses for visitor in guests)]
        story = _judge_reach(world, reports)
        if story:
            self._refuse_all(story)
        return True

    # words

    def _tell_waiting(self, left_s: float) -> None:
        terms = self._terms
        here = [self._card.host_name, *(v.card.label for v in self._present() if v.card is not None)]
        need = terms.nodes if terms.min_nodes == terms.max_nodes else f"{terms.min_nodes} to {terms.max_nodes}"
        enough = len(here) >= terms.min_nodes
        text = (
            f"{len(here)} of {need} machines {'is' if len(here) == 1 else 'are'} here: {', '.join(here)}; "
            + (f"the run begins in {left_s:.0f} s with who is here then. " if enough else "")
            + f"type on each of the others: {terms.command}"
            + ("" if enough else f" (waiting {left_s:.0f} s more; if that was done, there: {self._doctor()})")
        )
        self._say(text)
        for visitor in self._present():
            visitor.wire.send("waiting", text=text)

    def _too_few(self) -> str:
        terms = self._terms
        here = [self._card.host_name, *(v.card.label for v in self._present() if v.card is not None)]
        return (
            f"only {len(here)} of {terms.nodes} machines came within {terms.gather_s:g} s: {', '.join(here)}; type on each of "
            f"the others: {terms.command} (--wait SECONDS waits longer). If that was done, there: {self._doctor()}"
        )

    def _doctor(self) -> str:
        return f"evenload doctor --host {self._terms.endpoint}"

    def _leave(self) -> None:
        """The user ends it here: so do the others."""
        text = f"the meeting was ended on {self._card.label}"
        tell_all([visitor.wire for visitor in self._visitors], "refuse", text)
        self.close()

    def _refuse_all(self, text: str, extra: Sequence[str] = ()) -> Any:
        """Ends the meeting with the same words on all sides."""
        story = "\n  ".join([text, *extra])
        tell_all([visitor.wire for visitor in self._visitors], "refuse", story)
        self.close()
        raise LaunchError(story)


def _judge_reach(world: World, reports: Sequence[Sequence[Any] | None]) -> str:
    """What the machines' tries mean; empty where all reach all.

    Args:
        world: the machines.
        reports: by node rank, what each machine found of each: None, or why not; None for one that did not report.
    """
    stories = []
    for node_rank, misses in enumerate(reports):
        source = world.machines[node_rank]
        if misses is None or len(misses) != len(world.machines):
            stories.append(f"{source.name} did not tell which machines it reaches")
            continue
        for other, raw in enumerate(misses):
            if raw is None:
                continue
            target = world.machines[other]
            try:
                miss = Miss(raw["kind"], float(raw["seconds"]), printable(raw["told"], 200))
            except (KeyError, TypeError, ValueError):
                continue
            stories.append(f"{source.name} does not reach {target.name} at {target.address}: {miss.describe()}")
    if not stories:
        return ""
    return (
        "the machines reach the meeting point, but not each other at the ports that gloo and NCCL pick (any from 1024 up):\n  "
        + "\n  ".join(stories)
        + "\n  open all ports between these machines, on each: sudo ufw allow from ADDRESS-OF-THE-OTHER, or sudo firewall-cmd "
        "--zone=trusted --add-source=ADDRESS-OF-THE-OTHER; `evenload doctor --host` tells more"
    )
