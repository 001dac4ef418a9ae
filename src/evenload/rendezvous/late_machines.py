"""Machines that join a run in progress: one that is typed later, or one that comes back after its network was down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from evenload.rendezvous.connection import ConnectFailure
from evenload.rendezvous.coordinator import LateMember, closed_reason
from evenload.rendezvous.peer_monitor import CoordinatorMonitor, Peer
from evenload.rendezvous.reachability import probe
from evenload.rendezvous.settings import RendezvousConfig
from evenload.rendezvous.world import Machine, World


class LateMachines:
    """Takes machines in, one at a time, on the coordinator; used in the thread of its event loop."""

    def __init__(
        self,
        config: RendezvousConfig,
        world: World,
        monitor: CoordinatorMonitor,
        store_port: int,
        log: Callable[[str], None],
    ) -> None:
        self._config = config
        self._world = world
        """All machines that ever took part, by node rank: no number is given twice."""
        self._monitor = monitor
        self._store_port = store_port
        self._log = log
        self._one = asyncio.Lock()

    def why_closed(self) -> str:
        """Return why no machine can join now; empty: one can."""
        if self._monitor.num_machines < self._config.max_nodes:
            return ""
        return closed_reason(self._config, self._world)

    async def take_in(self, late: LateMember) -> str:
        """Send a machine its number; return why it can't join, or nothing."""
        async with self._one:
            monitor, info = self._monitor, late.info
            monitor.drop(late.launch_id)
            if problem := self.why_closed():
                return problem
            if problem := await self._unreachable(late):
                return problem
            node = len(self._world.machines)
            name = info.label if info.host_name in monitor.names else info.host_name
            machine = Machine(name, info.address, info.interface, info.slots)
            self._world = replace(self._world, machines=(*self._world.machines, machine))
            late.connection.send("start", node_rank=node, world=self._world, store_port=self._store_port, is_late=True)
            count = len(info.slots)
            ranks = "1 rank" if count == 1 else f"{count} ranks"
            monitor.add(node, Peer(late.connection, name, ranks, late.clock_offset_s, late.launch_id), machine)
            return ""

    async def _unreachable(self, late: LateMember) -> str:
        found: Sequence[tuple[str, ConnectFailure | None]] = [
            (self._world.machines[0].name, await probe(late.target)),
            *await self._monitor.probe_from_all(late.target),
        ]
        lines = [f"{name} can't reach {late.info.label}: {failure.describe()}" for name, failure in found if failure]
        head = "not all machines of the run can reach it at the ports that gloo and NCCL pick:"
        return "\n  ".join([head, *lines]) if lines else ""
