"""The rendezvous of a run's machines: coordinate it where HOST is this machine, join it elsewhere."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evenload.errors import LaunchError
from evenload.rendezvous.address import CONTAINER_BRIDGES, Address, is_own, listen_at, resolve, route_of
from evenload.rendezvous.connection import Connection
from evenload.rendezvous.coordinator import Coordinator, closed_reason
from evenload.rendezvous.coordinator_monitor import CoordinatorMonitor
from evenload.rendezvous.elsewhere import CoordinatorElsewhereError
from evenload.rendezvous.event_loop import EventLoopThread
from evenload.rendezvous.host_info import LocalLaunch, collect_host_info
from evenload.rendezvous.late_machines import LateMachines
from evenload.rendezvous.member import connect_to_coordinator, join
from evenload.rendezvous.member_monitor import MemberMonitor
from evenload.rendezvous.peer_monitor import PeerMonitor
from evenload.rendezvous.run_state import RunState
from evenload.rendezvous.settings import Endpoint, RendezvousConfig, parse_endpoint
from evenload.rendezvous.standby import Standby
from evenload.rendezvous.takeover import Candidate
from evenload.rendezvous.world import RankAssignment, World

_RETRY_S = 0.5


@dataclass(frozen=True)
class RendezvousResult:
    node_rank: int
    world: World
    monitor: PeerMonitor
    store: str
    """``host:port`` of the store."""
    listener: socket.socket | None
    """The port of the store that this machine serves; on a member for the time when it is the coordinator."""
    coordinator: str = ""
    """Name of the coordinator's machine."""
    is_late: bool = False
    """The run is in progress."""

    def assignments(self) -> tuple[RankAssignment, ...]:
        return self.world.assignments(self.node_rank, self.store)


def run_rendezvous(
    config: RendezvousConfig,
    launch: LocalLaunch,
    should_stop: Callable[[], bool],
    log: Callable[[str], None],
    others: Sequence[str] = (),
) -> RendezvousResult | None:
    """Connect to the other machines and number the ranks; None if ``should_stop()`` became true meanwhile.

    ``others``: endpoints of the machines of a run that this one was cut off from; one of them is its coordinator.
    LaunchError: the machines can't connect, or can't train together; all of them print the same error.
    """
    addresses = host = resolve(config.endpoint)
    own = [address for address in addresses if is_own(address)]
    listener = None
    if others:
        known = tuple(resolve(parse_endpoint(endpoint))[0] for endpoint in others if endpoint)
        addresses = tuple(dict.fromkeys((*(address for address in addresses if address not in own), *known)))
    elif config.node_rank == 0 or (config.node_rank is None and own):
        listener = _listen(config, own)
        if listener is None:
            # Another launch on this machine was first, and is the coordinator.
            addresses = tuple(own)
    loop = EventLoopThread()
    result = None
    try:
        if listener is not None:
            try:
                result = loop.run(_coordinate(loop, config, launch, listener, log), should_stop)
            except CoordinatorElsewhereError as error:
                log(f"the run is in progress; this machine joins it at {error.endpoint}, its coordinator")
                listener, addresses = None, resolve(error.endpoint)
        if listener is None:
            result = loop.run(_join(loop, config, launch, addresses, host, log), should_stop)
    finally:
        if result is None:
            loop.close()
    return result


async def _coordinate(
    loop: EventLoopThread,
    config: RendezvousConfig,
    launch: LocalLaunch,
    listener: socket.socket,
    log: Callable[[str], None],
) -> RendezvousResult:
    bound = str(listener.getsockname()[0])
    is_any = bound in ("0.0.0.0", "::")
    info = collect_host_info(config, launch, "" if is_any else bound)
    if not is_any:
        info = replace(info, endpoint=_endpoint_of(listener))
    log(_describe_coordinator(config, bound, is_any))
    coordinator = Coordinator(config, info, [listener], log)
    store: socket.socket | None = None
    try:
        await coordinator.start()
        await coordinator.gather()
        store = listen_at(bound, 0)
        world, peers = await coordinator.assign(launch.settings, int(store.getsockname()[1]))
    except BaseException as error:
        if store is not None:
            store.close()
        is_stopped = isinstance(error, asyncio.CancelledError)
        await coordinator.refuse_all(
            f"the rendezvous was stopped on {info.label}" if is_stopped else str(error) or repr(error)
        )
        raise
    state = RunState(0, world.machines, ((*range(len(world.machines)),),))
    monitor = CoordinatorMonitor(loop, state, dict(enumerate(peers, start=1)), coordinator.close)
    late = LateMachines(config, monitor, int(store.getsockname()[1]), log)
    if launch.may_change:
        coordinator.run_in_progress(late.why_closed, late.take_in)
    else:
        coordinator.run_in_progress(lambda: closed_reason(config, world), None)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)
    return RendezvousResult(0, world, monitor, str(Endpoint(host, int(store.getsockname()[1]))), store)


async def _join(
    loop: EventLoopThread,
    config: RendezvousConfig,
    launch: LocalLaunch,
    addresses: Sequence[Address],
    host: tuple[Address, ...],
    log: Callable[[str], None],
) -> RendezvousResult:
    deadline_s, found = time.monotonic() + config.connect_wait_s, addresses
    while True:
        connection = await connect_to_coordinator(config, found, log)
        try:
            return await _join_at(loop, config, launch, connection, host, log)
        except CoordinatorElsewhereError as error:
            connection.close()
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"{connection.peer} is no coordinator, and the one at {error} does not answer"
                ) from None
            found = (*resolve(error.endpoint), *addresses)
            await asyncio.sleep(_RETRY_S)
        except BaseException:
            connection.close()
            raise


async def _join_at(
    loop: EventLoopThread,
    config: RendezvousConfig,
    launch: LocalLaunch,
    connection: Connection,
    host: tuple[Address, ...],
    log: Callable[[str], None],
) -> RendezvousResult:
    info = collect_host_info(config, launch, connection.own_host)
    ports: list[socket.socket] = []
    try:
        if launch.may_change:
            # Of the next coordinator and its store, at ports that the system picks: this machine may be HOST of another run.
            ports = [listen_at(info.address, 0) for _ in range(2)]
            info = replace(info, endpoint=_endpoint_of(ports[0]))
        assignment = await join(config, connection, info, log)
    except BaseException:
        for port in ports:
            port.close()
        raise
    candidate = None
    if ports:
        standby = Standby(ports[0], str(connection.peer))
        await standby.start()
        store_port = int(ports[1].getsockname()[1])
        candidate = Candidate(loop, assignment.node_rank, config, host, info, standby, store_port, log)
    return RendezvousResult(
        node_rank=assignment.node_rank,
        world=assignment.world,
        monitor=MemberMonitor(loop, connection, assignment.coordinator_name, candidate),
        store=str(Endpoint(connection.peer.host, assignment.store_port)),
        listener=ports[1] if ports else None,
        coordinator=assignment.coordinator_name,
        is_late=assignment.is_late,
    )


def _endpoint_of(listener: socket.socket) -> str:
    return str(Endpoint(*listener.getsockname()[:2]))


def _listen(config: RendezvousConfig, own: Sequence[Address]) -> socket.socket | None:
    """Open the rendezvous port; None where another launch on this machine may hold it.

    A name that is a loopback address here (Debian writes ``127.0.1.1 box1`` into box1's own /etc/hosts) is another address
    for the other machines: then the port is opened at all addresses.
    """
    outside = [address for address in own if not address.is_loopback]
    if config.endpoint.is_local:
        host = own[0].host
    elif outside:
        host = outside[0].host
    else:
        host = "::" if own and own[0].family == socket.AF_INET6 else "0.0.0.0"
    try:
        return listen_at(host, config.endpoint.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and own and config.node_rank is None:
            return None
        raise LaunchError(
            f"--host {config.endpoint}: the port can't be opened here ({error.strerror}); choose another, the same on all "
            f"machines: --host {config.endpoint.host}:PORT"
        ) from None


def _describe_coordinator(config: RendezvousConfig, bound: str, is_any: bool) -> str:
    interface = route_of(bound).interface
    where = "all its interfaces" if is_any else f"{bound} ({interface or 'an unknown interface'})"
    why = ""
    if is_any:
        why = f" because {config.endpoint.host} is not an address of its own that others can reach"
    if config.endpoint.is_local:
        why = ", which only other launches on this machine can reach"
    elif interface.startswith(CONTAINER_BRIDGES):
        why = ", a bridge for containers, which other machines can't reach: give --host another address of this machine"
    return (
        f"this machine is the coordinator of {config.nodes} machines, at port {config.endpoint.port} of {where}{why}; type on "
        f"each of the others: {config.command}"
    )
