"""The coordinator is lost: the other machines agree on the one that takes over, the lowest that the others reach.

Each machine connects to all with lower numbers, waits at the lowest that answers, and hands it the newest `RunState` that it has.
One that reaches no lower machine waits for the others itself. It takes over once all are there, or after a while, if the machines
there may go on without the rest (run_state.py, Note [Majority]). Everyone else ends its ranks and joins again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from evenload.rendezvous import run_state
from evenload.rendezvous.address import Address, listen_at
from evenload.rendezvous.connection import CONNECT_S, Connection, connect_to, printable, refuses
from evenload.rendezvous.coordinator import Coordinator
from evenload.rendezvous.coordinator_monitor import CoordinatorMonitor
from evenload.rendezvous.elsewhere import look_for_launches
from evenload.rendezvous.event_loop import EventLoopThread
from evenload.rendezvous.host_info import HostInfo
from evenload.rendezvous.late_machines import LateMachines
from evenload.rendezvous.member import LAUNCH_ID
from evenload.rendezvous.peer_monitor import Peer, PeerLost, Takeover
from evenload.rendezvous.run_state import RunState
from evenload.rendezvous.settings import Endpoint, RendezvousConfig
from evenload.rendezvous.standby import Standby

_AGREE_S = 30.0
_TOGETHER_S = 6.0
"""Time in which the others come to the one that takes over: they find the loss within a second or two of each other, and some
first try machines that are silent."""
_LOOK_S = 0.3
_ASK_S = 0.5


@dataclass(frozen=True)
class Followed:
    """Another machine is the coordinator."""

    connection: Connection
    name: str
    store_port: int
    state: RunState


@dataclass(frozen=True)
class _Loss:
    """Of the last coordinator, as this machine noticed it."""

    reason: str
    is_silent: bool
    """It may have gone on."""
    time_s: float
    """Since the epoch."""


@dataclass(frozen=True)
class Candidate:
    """This machine as one that may take over; used in the thread of ``loop``."""

    loop: EventLoopThread
    node: int
    config: RendezvousConfig
    host: tuple[Address, ...]
    """The addresses of HOST."""
    info: HostInfo
    standby: Standby
    store_port: int
    """Of the store that its supervisor serves."""
    log: Callable[[str], None]

    async def find_coordinator(self, state: RunState, lost: PeerLost) -> Followed | Takeover | str:
        """Return the next coordinator, or why the run can't go on here; `lost`: the last one."""
        began_s, loss = time.monotonic(), _Loss(lost.reason, lost.is_silent, time.time())
        while time.monotonic() - began_s < _AGREE_S:
            ended: set[int] = set()
            if not lost.is_silent and await refuses(state.machines[state.coordinator].endpoint):
                ended.add(state.coordinator)
            lowest = await self._connect_to_lowest(state, ended)
            if lowest is None:
                return await self._gather(state, ended, loss)
            found = await self._follow(lowest, state, ended)
            if found is not None:
                return found
        return "no other machine took over"

    async def _connect_to_lowest(self, state: RunState, ended: set[int]) -> Connection | None:
        lower = sorted(node for node in state.present if node < self.node and node != state.coordinator)
        tried = await asyncio.gather(*(connect_to(state.machines[node].endpoint, CONNECT_S) for node in lower))
        found = []
        for node, outcome in zip(lower, tried, strict=True):
            if isinstance(outcome, Connection):
                found.append(outcome)
            elif outcome.kind == "refused":
                ended.add(node)
        for other in found[1:]:
            other.close()
        return found[0] if found else None

    async def _follow(self, connection: Connection, state: RunState, ended: set[int]) -> Followed | str | None:
        """Wait at another machine until it takes over; None: it is lost as well."""
        connection.send(
            "hello",
            what="takeover",
            node=self.node,
            state=state,
            ended=sorted(ended),
            time_s=time.time(),
            launch_id=LAUNCH_ID,
        )
        connection.start_heartbeats()
        with suppress(Exception):  # too late, or a message that another version, or another program, has sent
            async with asyncio.timeout(_AGREE_S):
                async for message in connection.messages():
                    if message["kind"] == "coordinate":
                        state = run_state.from_message(message["state"])
                        name = state.machines[state.coordinator].name
                        return Followed(connection, name, int(message["store_port"]), state)
                    if message["kind"] == "refuse":
                        connection.close()
                        return printable(message.get("text"))
        connection.close()
        return None

    async def _gather(self, state: RunState, ended: set[int], loss: _Loss) -> Takeover | str:
        """Wait for the other machines, and take over if that is allowed."""
        began_s = time.monotonic()
        while True:
            supporters = self.standby.supporters
            state = max((state, *(one.state for one in supporters.values())), key=lambda one: one.version)
            ended.update(*(one.ended for one in supporters.values()))
            here = {self.node, *supporters}
            missing = sorted({*state.present} - here - ended - {state.coordinator})
            is_late = time.monotonic() - began_s >= _TOGETHER_S
            if state.may_go_on(here, ended) and (is_late or not missing):
                asked = {*missing, state.coordinator} - ended
                answers = await asyncio.gather(*(_has_gone_on(state.machines[node].endpoint) for node in asked))
                if text := next(filter(None, answers), ""):
                    await self.standby.refuse_all(text)
                    return text
                return await self._take_over(state, ended, loss)
            unknown = missing if loss.is_silent else sorted({*missing, state.coordinator} - ended)
            if is_late or not unknown:
                text = f"only {len(here)} of its {len(state.present)} machines reach each other: too few to go on"
                await self.standby.refuse_all(text)
                return text
            await self.standby.wait(_LOOK_S)
            outcomes = await asyncio.gather(*(refuses(state.machines[node].endpoint) for node in unknown))
            ended.update(node for node, is_refused in zip(unknown, outcomes, strict=True) if is_refused)

    async def _take_over(self, before: RunState, ended: set[int], loss: _Loss) -> Takeover:
        listener, supporters = await self.standby.hand_over()
        voters = (self.node, *sorted(supporters))
        state = replace(before, version=before.version + 1, voters=(*before.voters, voters))
        listeners, endpoint = [listener], state.machines[self.node].endpoint
        try:  # HOST's port, which people know
            listeners.append(listen_at(self.info.address, self.config.endpoint.port))
            endpoint = str(Endpoint(self.info.address, self.config.endpoint.port))
        except OSError:  # another run has it
            pass
        info = replace(self.info, endpoint=endpoint)
        coordinator = Coordinator(self.config, info, listeners, self.log)
        await coordinator.start()
        peers = {}
        for node, one in supporters.items():
            count = len(state.machines[node].slots)
            ranks = "1 rank" if count == 1 else f"{count} ranks"
            peers[node] = Peer(one.connection, state.machines[node].name, ranks, one.clock_offset_s, one.launch_id)
            one.connection.send("coordinate", store_port=self.store_port, state=state)
        monitor = CoordinatorMonitor(self.loop, state, peers, coordinator.close, ended)
        late = LateMachines(self.config, monitor, self.store_port, self.log)
        coordinator.run_in_progress(late.why_closed, late.take_in)
        monitor.keep(look_for_launches(self.host, info))
        workers = [place["node"] for place in before.members.get("places", {}).values()]  # of excluded machines, too
        lost = tuple(
            PeerLost(
                node, state.machines[node].name, loss.reason if node == before.coordinator else "it does not answer"
            )
            for node in dict.fromkeys((*before.present, *workers))
            if node not in voters
        )
        return Takeover(monitor, state, lost, loss.time_s, endpoint)


async def _has_gone_on(endpoint: str) -> str:
    """Ask a machine whether it coordinates the run, without this one, which may have slept; return what it says if so."""
    found = await connect_to(endpoint, _ASK_S)
    if not isinstance(found, Connection):
        return ""
    found.silence_s = _ASK_S
    found.send("hello", what="gone_on")
    answer = await found.receive()
    found.close()
    return printable(answer.get("text")) if answer is not None and answer["kind"] == "refuse" else ""
