"""`MemberMonitor`: the coordinator, seen from a member, and the machine that follows it when it is lost (takeover.py)."""

from __future__ import annotations

import asyncio
from typing import Any

from evenload.rendezvous import run_state
from evenload.rendezvous.connection import Connection, Message
from evenload.rendezvous.event_loop import EventLoopThread
from evenload.rendezvous.peer_monitor import (
    COORDINATOR,
    STARTING_SILENCE_S,
    ConnectedMonitor,
    CoordinatorChanged,
    FailureCause,
    PeerLost,
    PeerMessage,
    Takeover,
    cause_from_message,
    shortened,
)
from evenload.rendezvous.reachability import ProbeTarget, probe
from evenload.rendezvous.run_state import RunState
from evenload.rendezvous.settings import Endpoint
from evenload.rendezvous.takeover import Candidate, Followed


class MemberMonitor(ConnectedMonitor):
    """A member's monitor, created in the thread of ``loop``, which it closes."""

    coordinates = False

    def __init__(
        self, loop: EventLoopThread, connection: Connection, coordinator_name: str, candidate: Candidate | None = None
    ) -> None:
        """``candidate``: this machine as the next coordinator; None: the run ends with this one."""
        super().__init__(loop)
        self._connection = connection
        connection.silence_s = STARTING_SILENCE_S
        self._coordinator_name = coordinator_name
        self._candidate = candidate
        self._state: RunState | None = None
        self._lost: PeerLost | None = None
        self._takeover: Takeover | None = None
        self._receiving = [asyncio.create_task(self._receive())]

    @property
    def cut_off(self) -> PeerLost | None:
        return self._lost

    @property
    def endpoints(self) -> tuple[str, ...]:
        if self._state is None or self._candidate is None:
            return ()
        own = self._candidate.node
        return tuple(self._state.machines[node].endpoint for node in self._state.present if node != own)

    @property
    def takeover(self) -> Takeover | None:
        return self._takeover

    def send(self, node: int, kind: str, **content: Any) -> None:
        self._loop.call_soon(lambda: self._connection.send(kind, **content))

    def report_ended(self, exit_code: int) -> None:
        """Do nothing: the coordinator knows which ranks have ended."""

    def end_run(self, cause: FailureCause) -> None:
        if self.end_cause is None:
            self.end_cause = cause
            self.send(COORDINATOR, "stop", cause=shortened(cause))

    async def _receive(self) -> None:
        has_coordinator = True
        while has_coordinator:
            async for message in self._connection.messages():
                try:
                    self._obey(message)
                except Exception:  # any is possible in a message that another version, or another program, has sent
                    self._connection.give_up()
            has_coordinator = self.end_code is None and self.end_cause is None and await self._follow_another()

    def _obey(self, message: Message) -> None:
        match message["kind"]:
            case "done":
                self.end_code = int(message["exit_code"])
            case "end":
                self.end_cause = self.end_cause or cause_from_message(message)
            case "silence":
                self._connection.silence_s = float(message["seconds"])
            case "state":
                self._take(run_state.from_message(message))
            case "probe":
                self._receiving.append(asyncio.create_task(self._probe(ProbeTarget(**message["target"]))))
            case kind:
                self._events.append(PeerMessage(COORDINATOR, kind, message))

    def _take(self, state: RunState) -> None:
        self._state = state
        if self._candidate is not None:
            self._candidate.standby.coordinator = state.machines[state.coordinator].endpoint
        self._connection.send("has_state", version=state.version)

    async def _follow_another(self) -> bool:
        """Return whether another machine is the coordinator now; otherwise this one is, or the run can't go on here."""
        name, old = f"{self._coordinator_name}, the coordinator,", self._connection
        lost = PeerLost(COORDINATOR, name, old.lost, old.is_silent)
        if self._state is None or self._candidate is None:
            self._lost = lost
            return False
        old.close()
        self._candidate.log(f"{name} is gone: {lost.reason}; the other machines agree on the one that takes over")
        found = await self._candidate.find_coordinator(self._state, lost)
        if isinstance(found, Followed):
            self._connection, self._coordinator_name = found.connection, found.name
            self._take(found.state)
            self._events.append(
                CoordinatorChanged(found.name, str(Endpoint(found.connection.peer.host, found.store_port)))
            )
            return True
        if isinstance(found, Takeover):
            self._takeover = found
        else:
            self._lost = PeerLost(COORDINATOR, name, f"{lost.reason}, and {found}", is_silent=True)
        return False

    async def _probe(self, target: ProbeTarget) -> None:
        self._connection.send("probed", failure=await probe(target))

    async def _finish(self) -> None:
        await super()._finish()
        if self._takeover is not None:  # it ends before its supervisor knows of it
            self._takeover.monitor.end_cause = self.end_cause
            await self._takeover.monitor._finish()
        elif self._candidate is not None:
            self._candidate.standby.close()
        await self._connection.finish(0.5)
