"""Machines that join a run in progress: one that is typed later, or one that comes back after its network was down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from evenload.rendezvous.connection import ConnectFailure
from evenload.rendezvous.coordinator import LateMember, closed_reason
from evenload.rendezvous.coordinator_monitor import CoordinatorMonitor
from evenload.rendezvous.peer_monitor import Peer
from evenload.rendezvous.reachability import probe
from evenload.rendezvous.settings import Endpoint, RendezvousConfig
from evenload.rendezvous.world import Machine, World


class LateMachines:
    """Takes machines in, one at a time, on the coordinator; used in the thread of its event loop."""

    def __init__(
        self, config: RendezvousConfig, monitor: CoordinatorMonitor, store_port: int, log: Callable[[str], None]
    ) -> None:
        self._config = config
        self._monitor = monitor
        self._store_port = store_port
        self._log = log
        self._one = asyncio.Lock()

    def why_closed(self) -> str:
        """Return why no machine can join now; empty: one can."""
        if self._monitor.num_machines < self._config.max_nodes:
            return ""
        return closed_reason(self._config, World(self._monitor.machines))

    async def take_in(self, late: LateMember) -> str:
        """Send a machine its number; return why it can't join, or nothing."""
        async with self._one:
            monitor, info = self._monitor, late.info
            monitor.drop(late.launch_id)
            if problem := self.why_closed():
                return problem
            if problem := await self._unreachable(late):
                return problem
            monitor.name_endpoint(str(Endpoint(late.connection.own_host, self._config.endpoint.port)))
            node = len(monitor.machines)
            name = info.label if info.host_name in self._names else info.host_name
            machine = Machine(name, info.address, info.interface, info.slots, info.endpoint)
            start = {"node_rank": node, "world": World((*monitor.machines, machine)), "store_port": self._store_port}
            late.connection.send("start", is_late=True, **start)
            count = len(info.slots)
            ranks = "1 rank" if count == 1 else f"{count} ranks"
            monitor.add(node, Peer(late.connection, name, ranks, late.clock_offset_s, late.launch_id), machine)
            return ""

    @property
    def _names(self) -> list[str]:
        return [self._own_name, *self._monitor.names]

    @property
    def _own_name(self) -> str:
        return self._monitor.machines[self._monitor.node].name

    async def _unreachable(self, late: LateMember) -> str:
        found: Sequence[tuple[str, ConnectFailure | None]] = [
            (self._own_name, await probe(late.target)),
            *await self._monitor.probe_from_all(late.target),
        ]
        lines = [f"{name} can't reach {late.info.label}: {failure.describe()}" for name, failure in found if failure]
        head = "not all machines of the run can reach it at the ports that gloo and NCCL pick:"
        return "\n  ".join([head, *lines]) if lines else ""
