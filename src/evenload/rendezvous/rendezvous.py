"""The rendezvous of a run's machines: coordinate it where HOST is this machine, join it elsewhere."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenload.errors import LaunchError
from evenload.rendezvous.address import CONTAINER_BRIDGES, Address, is_own, listen_at, resolve, route_of
from evenload.rendezvous.coordinator import Coordinator, closed_reason
from evenload.rendezvous.event_loop import EventLoopThread
from evenload.rendezvous.host_info import LocalLaunch, collect_host_info
from evenload.rendezvous.late_machines import LateMachines
from evenload.rendezvous.member import connect_to_coordinator, join
from evenload.rendezvous.peer_monitor import CoordinatorMonitor, MemberMonitor, PeerMonitor
from evenload.rendezvous.settings import Endpoint, RendezvousConfig
from evenload.rendezvous.world import RankAssignment, World


@dataclass(frozen=True)
class RendezvousResult:
    node_rank: int
    world: World
    monitor: PeerMonitor
    store: str
    """``host:port`` of the store."""
    listener: socket.socket | None
    """The store's port, where this machine serves it."""
    is_late: bool = False
    """The run is in progress."""

    def assignments(self) -> tuple[RankAssignment, ...]:
        return self.world.assignments(self.node_rank, self.store)


def run_rendezvous(
    config: RendezvousConfig, launch: LocalLaunch, should_stop: Callable[[], bool], log: Callable[[str], None]
) -> RendezvousResult | None:
    """Connect to the other machines and number the ranks; None if ``should_stop()`` became true meanwhile.

    LaunchError: the machines can't connect, or can't train together; all of them print the same error.
    """
    addresses = resolve(config.endpoint)
    own = [address for address in addresses if is_own(address)]
    listener = None
    if config.node_rank == 0 or (config.node_rank is None and own):
        listener = _listen(config, own)
        if listener is None:
            # Another launch on this machine was first, and is the coordinator.
            addresses = tuple(own)
    loop = EventLoopThread()
    result = None
    try:
        result = loop.run(
            _join(loop, config, launch, addresses, log)
            if listener is None
            else _coordinate(loop, config, launch, listener, log),
            should_stop,
        )
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
    log(_describe_coordinator(config, bound, is_any))
    coordinator = Coordinator(config, info, listener, log)
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
    monitor = CoordinatorMonitor(loop, peers, coordinator.close)
    late = LateMachines(config, world, monitor, int(store.getsockname()[1]), log)
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
    log: Callable[[str], None],
) -> RendezvousResult:
    connection = await connect_to_coordinator(config, addresses, log)
    try:
        assignment = await join(config, connection, collect_host_info(config, launch, connection.own_host), log)
    except BaseException:
        connection.close()
        raise
    return RendezvousResult(
        node_rank=assignment.node_rank,
        world=assignment.world,
        monitor=MemberMonitor(loop, connection, assignment.coordinator_name),
        store=str(Endpoint(connection.peer.host, assignment.store_port)),
        listener=None,
        is_late=assignment.is_late,
    )


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
