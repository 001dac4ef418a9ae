"""The checks of another machine (`--host`): it is measured once, and each check judges a part (hosts_findings.py)."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import replace

from evenload.doctor.checks import hosts_findings as findings
from evenload.doctor.checks.hosts_findings import HostFacts
from evenload.doctor.finding import Finding, Options
from evenload.errors import LaunchError
from evenload.rendezvous.address import Address, is_own, resolve, route_to
from evenload.rendezvous.connection import ConnectFailure, connect
from evenload.rendezvous.probe import call_host, make_host_report, measure_host
from evenload.rendezvous.settings import parse_endpoint

_OTHER_PORTS = (22, 1, 80)
"""Ports at which a machine that drops packets to one port usually answers, if only by a refusal."""


def _check(judge: Callable[[HostFacts], Finding]) -> Callable[[Options], Finding]:
    return lambda options: judge(_gather(options.host, options.script, options.data))


name = _check(findings.name)
port = _check(findings.port)
interface = _check(findings.interface)
mtu = _check(findings.mtu)
other_ports = _check(findings.other_ports)
versions = _check(findings.versions)
clocks = _check(findings.clocks)
code = _check(findings.code)
data = _check(findings.data)
round_trip = _check(findings.round_trip)
bandwidth = _check(findings.bandwidth)
exchange = _check(findings.exchange)


@functools.cache
def _gather(host: str, script: str, data_path: str) -> HostFacts:
    endpoint = parse_endpoint(host)
    try:
        addresses = resolve(endpoint)
    except LaunchError as error:
        return HostFacts(endpoint, unresolved=str(error))
    is_self = any(is_own(address) for address in addresses)
    facts = HostFacts(endpoint, addresses, is_self=is_self, route=route_to(addresses[0]))
    return asyncio.run(_measure(facts, script, data_path))


async def _measure(facts: HostFacts, script: str, data_path: str) -> HostFacts:
    local = make_host_report(facts.route.own_address if facts.route else "", script, data_path)
    failures: list[tuple[Address, ConnectFailure]] = []
    for address in facts.addresses:
        began_s = time.monotonic()
        try:
            found = await call_host(address, local)
        except LaunchError as error:
            return replace(facts, other_program=f"{address}: {error}")
        if isinstance(found, ConnectFailure):
            failures.append((address, found))
            continue
        connection, welcome = found
        reached = replace(
            facts,
            route=route_to(address),
            local=make_host_report(connection.own_host, script, data_path),
            reached=address,
            connect_s=time.monotonic() - began_s,
        )
        try:
            return replace(reached, measurement=await measure_host(connection, welcome))
        except LaunchError as error:
            return replace(reached, interrupted=str(error))
    return replace(facts, failures=tuple(failures), answering_port=await _answering_port(failures))


async def _answering_port(failures: list[tuple[Address, ConnectFailure]]) -> int:
    """Return a port at which a silent machine answers; 0 if none. It distinguishes a firewall from a machine that is off."""
    for address, failure in failures:
        if failure.kind != "silent":
            continue
        for number in _OTHER_PORTS:
            other = Address(address.family, (address.host, number, *address.sockaddr[2:]))
            found = await connect(other, 0.5)
            if not isinstance(found, ConnectFailure):
                found.close()
                return number
            if found.kind == "refused":
                return number
    return 0
