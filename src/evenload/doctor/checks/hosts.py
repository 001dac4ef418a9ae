"""What another machine is to this one: asked once by all checks of `--host`, judged by hosts_verdicts.py."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

from evenload.doctor.checks import hosts_verdicts as verdicts
from evenload.doctor.checks.hosts_verdicts import Facts
from evenload.doctor.finding import Finding, Options
from evenload.errors import LaunchError
from evenload.rendezvous.address import Address, is_own, resolve, route_to
from evenload.rendezvous.connect import Miss, dial
from evenload.rendezvous.probe import call, examine, make_sheet
from evenload.rendezvous.settings import parse_endpoint

_OTHER_PORTS = (22, 1, 80)
"""Where a machine that drops one port usually answers, if only by a refusal."""


def name(options: Options) -> Finding:
    """What the name stands for."""
    return verdicts.name(_facts(options))


def port(options: Options) -> Finding:
    """Is the port reached, and who listens there?"""
    return verdicts.port(_facts(options))


def interface(options: Options) -> Finding:
    """Which interface leads there."""
    return verdicts.interface(_facts(options))


def mtu(options: Options) -> Finding:
    """Do large packets pass?"""
    return verdicts.mtu(_facts(options))


def other_ports(options: Options) -> Finding:
    """Are ports that the system picks reached, both ways?"""
    return verdicts.other_ports(_facts(options))


def versions(options: Options) -> Finding:
    """Do both have the same Evenload, Python and torch?"""
    return verdicts.versions(_facts(options))


def clocks(options: Options) -> Finding:
    """Do both have the same time?"""
    return verdicts.clocks(_facts(options))


def code(options: Options) -> Finding:
    """Do both have the same script?"""
    return verdicts.code(_facts(options))


def data(options: Options) -> Finding:
    """Do both see the same data?"""
    return verdicts.data(_facts(options))


def round_trip(options: Options) -> Finding:
    """How long a word takes there and back."""
    return verdicts.round_trip(_facts(options))


def bandwidth(options: Options) -> Finding:
    """How much passes in a second, each way."""
    return verdicts.bandwidth(_facts(options))


def _facts(options: Options) -> Facts:
    return _gather(options.host, options.script, options.data)


@functools.cache
def _gather(host: str, script: str, data_path: str) -> Facts:
    """All facts, as far as one gets: checks of one child share them."""
    endpoint = parse_endpoint(host)
    try:
        addresses = resolve(endpoint)
    except LaunchError as error:
        return Facts(endpoint, unresolved=str(error))
    is_self = any(is_own(address) for address in addresses)
    facts = Facts(endpoint, addresses, is_self=is_self, route=route_to(addresses[0]))
    own = make_sheet(facts.route.own_address if facts.route else "", script, data_path)
    misses: list[tuple[Address, Miss]] = []
    for address in addresses:
        began_s = time.monotonic()
        try:
            found = call(address, own)
        except LaunchError as error:
            return replace(facts, stranger=f"{address}: {error}")
        if isinstance(found, Miss):
            misses.append((address, found))
            continue
        wire, welcome = found
        connect_s = time.monotonic() - began_s
        route = route_to(address)
        own = make_sheet(wire.own_host, script, data_path)
        reached = replace(facts, route=route, own=own, reached=address, connect_s=connect_s)
        try:
            return replace(reached, measured=examine(wire, welcome))
        except LaunchError as error:
            return replace(reached, broken=str(error))
    return replace(facts, misses=tuple(misses), answers_at=_other_answer(misses))


def _other_answer(misses: list[tuple[Address, Miss]]) -> int:
    """A port at which a machine that is silent at ours answers, if only by a refusal; 0 where there is none.

    It tells a firewall from a machine that is off.
    """
    for address, miss in misses:
        if miss.kind != "silent":
            continue
        for number in _OTHER_PORTS:
            other = Address(address.family, (address.host, number, *address.sockaddr[2:]))
            found = dial(other, 0.5)
            if not isinstance(found, Miss):
                found.close()
                return number
            if found.kind == "refused":
                return number
    return 0
