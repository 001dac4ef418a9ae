"""Meets the other machines of a run: serves the meeting point where HOST is this machine, joins it elsewhere."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenload.errors import LaunchError
from evenload.rendezvous.address import CONTAINER_BRIDGES, Address, is_own, listen_at, resolve, route_of
from evenload.rendezvous.coordinator import MeetingPoint
from evenload.rendezvous.host_info import Card, make_card
from evenload.rendezvous.member import join, reach
from evenload.rendezvous.peer_monitor import GuestParty, Party
from evenload.rendezvous.probe import sheet_of_card
from evenload.rendezvous.settings import Endpoint, Terms
from evenload.rendezvous.world import World
from evenload.training.launch.environment import WorkerSpec


@dataclass(frozen=True)
class Meeting:
    """What came of a meeting."""

    node_rank: int
    world: World
    party: Party
    store: str
    """``host:port`` of the store; empty for a world of one rank."""
    listener: socket.socket | None
    """The store's port, where this machine serves it."""


@dataclass(frozen=True)
class Subject:
    """What is to be run here."""

    arguments: Sequence[str]
    settings: Mapping[str, Any]
    workers: Sequence[WorkerSpec]
    """The ranks of this machine, numbered as if it were alone."""

    def card(self, terms: Terms, own_address: str = "") -> Card:
        """This machine's card."""
        return make_card(terms, self.arguments, self.settings, self.workers, own_address)


def meet(terms: Terms, subject: Subject, asked: Callable[[], bool], say: Callable[[str], None]) -> Meeting | None:
    """Meets the others; None when the user asked to end meanwhile.

    Raises:
        LaunchError: the machines don't come together, or can't train together; told on all of them.
    """
    addresses = resolve(terms.endpoint)
    own = [address for address in addresses if is_own(address)]
    if terms.node_rank == 0 or (terms.node_rank is None and own):
        listener = _listen(terms, own)
        if listener is not None:
            return _serve(terms, subject, listener, asked, say)
        # Somebody on this machine was here first: with several launches on one machine, the first serves.
        addresses = tuple(own)
    return _join(terms, subject, addresses, asked, say)


def _serve(
    terms: Terms,
    subject: Subject,
    listener: socket.socket,
    asked: Callable[[], bool],
    say: Callable[[str], None],
) -> Meeting | None:
    bound = str(listener.getsockname()[0])
    is_any = bound in ("0.0.0.0", "::")
    card = subject.card(terms, "" if is_any else bound)
    say(_describe_point(terms, bound, is_any))
    point = MeetingPoint(terms, card, sheet_of_card(card), listener, asked, say)
    store: socket.socket | None = None
    try:
        if not point.gather():
            return None
        store = listen_at(bound, 0)
        port = int(store.getsockname()[1])
        found = point.introduce(dict(subject.settings), port)
        if found is None:
            store.close()
            return None
    except BaseException:
        point.close()
        if store is not None:
            store.close()
        raise
    world, party = found
    if world.world_size == 1:
        store.close()
        return Meeting(0, world, party, "", None)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)
    return Meeting(0, world, party, str(Endpoint(host, port)), store)


def _join(
    terms: Terms,
    subject: Subject,
    addresses: Sequence[Address],
    asked: Callable[[], bool],
    say: Callable[[str], None],
) -> Meeting | None:
    wire = reach(terms, addresses, asked, say)
    if wire is None:
        return None
    try:
        invitation = join(terms, wire, subject.card(terms, wire.own_host), asked, say)
    except BaseException:
        wire.close()
        raise
    if invitation is None:
        return None
    return Meeting(
        node_rank=invitation.node_rank,
        world=invitation.world,
        party=GuestParty(wire, invitation.point),
        store=str(Endpoint(wire.peer.host, invitation.store_port)),
        listener=None,
    )


def _listen(terms: Terms, own: Sequence[Address]) -> socket.socket | None:
    """The meeting's port; None where another launch on this machine may hold it.

    A name that is a loopback address here (Debian writes ``127.0.1.1 box1`` into box1's own /etc/hosts) is another address
    for the others: then all addresses are listened at.
    """
    outside = [address for address in own if not address.is_loopback]
    if terms.endpoint.is_local:
        host = own[0].host
    elif outside:
        host = outside[0].host
    else:
        host = "::" if own and own[0].family == socket.AF_INET6 else "0.0.0.0"
    try:
        return listen_at(host, terms.endpoint.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and own and terms.node_rank is None:
            return None
        raise LaunchError(
            f"--host {terms.endpoint}: the port can't be opened here ({error.strerror}); choose another, the same on all "
            f"machines: --host {terms.endpoint.host}:PORT"
        ) from None


def _describe_point(terms: Terms, bound: str, is_any: bool) -> str:
    where = "all its interfaces" if is_any else f"{bound} ({route_of(bound).interface or 'an unknown interface'})"
    why = ""
    if is_any:
        why = f" because {terms.endpoint.host} is no address of its own that others could reach"
    if terms.endpoint.is_local:
        why = ", which only other launches on this machine reach"
    elif route_of(bound).interface.startswith(CONTAINER_BRIDGES):
        why = ", a bridge for containers, which other machines don't reach: give --host another address of this machine"
    return (
        f"this machine is the meeting point for {terms.nodes} machines, at port {terms.endpoint.port} of {where}{why}; type on "
        f"each of the others: {terms.command}"
    )
