"""`CoordinatorMonitor`: the members, seen from the coordinator, and what they must know to go on without it (run_state.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from evenload.rendezvous.connection import ConnectFailure, Message, refuses, to_line
from evenload.rendezvous.event_loop import EventLoopThread
from evenload.rendezvous.peer_monitor import (
    STARTING_SILENCE_S,
    ConnectedMonitor,
    FailureCause,
    Peer,
    PeerJoined,
    PeerLost,
    PeerMessage,
    cause_from_message,
    shortened,
)
from evenload.rendezvous.reachability import PROBE_S, ProbeTarget, failure_from_message
from evenload.rendezvous.run_state import RunState
from evenload.rendezvous.world import Machine

_QUIET_S = 2.0
"""A machine that sent nothing for so long may be lost: nothing is concluded about its ranks until that is decided."""


class CoordinatorMonitor(ConnectedMonitor):
    """The coordinator's monitor, created in the thread of ``loop``, which it closes."""

    def __init__(
        self,
        loop: EventLoopThread,
        state: RunState,
        peers: Mapping[int, Peer],
        close_port: Callable[[], Awaitable[None]],
        ended: Collection[int] = (),
    ) -> None:
        """``close_port`` closes the rendezvous port, where later machines join or are refused.

        ``state``: of this machine as the coordinator; ``ended``: machines of it whose supervisors have certainly ended.
        """
        super().__init__(loop)
        self._node = state.coordinator
        self._state = state
        self._peers = dict(peers)
        self._lost = {*range(len(state.machines))} - {self._node, *peers}
        self._ended = {*ended}
        self._unconfirmed: list[PeerLost] = []
        """Lost machines without which the others do not go on yet: see Note [Majority]."""
        self._received: dict[int, int] = {}
        """By machine, the newest version of the state that it has."""
        self._cut_off: PeerLost | None = None
        self._close_port = close_port
        self._silence_s: float | None = None
        self._probes: dict[int, asyncio.Future[ConnectFailure | None]] = {}
        for peer in self._peers.values():
            peer.connection.silence_s = STARTING_SILENCE_S
        self._receiving = [asyncio.create_task(self._receive(node, peer)) for node, peer in self._peers.items()]

    @property
    def cut_off(self) -> PeerLost | None:
        return self._cut_off

    @property
    def endpoints(self) -> tuple[str, ...]:
        others = (node for node in self._state.voters[0] if node != self._node)
        return tuple(self._state.machines[node].endpoint for node in others) if self._state.members else ()

    def send(self, node: int, kind: str, **content: Any) -> None:
        if (peer := self._peers.get(node)) is not None:
            self._loop.call_soon(lambda: peer.connection.send(kind, **content))

    def announce(self, members: Mapping[str, Any]) -> None:
        self._loop.call_soon(lambda: self._publish(replace(self._state, members=members)))

    def is_quiet(self, node: int) -> bool:
        peer = self._peers.get(node)
        return peer is not None and time.monotonic() - peer.connection.received_s > _QUIET_S

    def limit_silence(self, seconds: float) -> None:
        def limit() -> None:
            self._silence_s = seconds
            for peer in self._peers.values():
                _limit_silence(peer, seconds)

        self._loop.call_soon(limit)

    def report_ended(self, exit_code: int) -> None:
        if self.end_code is None:
            self.end_code = exit_code
            self._loop.call_soon(lambda: self._send_all("done", exit_code=exit_code))

    def end_run(self, cause: FailureCause) -> None:
        if self.end_cause is None:
            self.end_cause = cause
            if self._cut_off is None:  # otherwise the others have gone on
                self._loop.call_soon(lambda: self._send_all("end", cause=shortened(cause)))

    # in the thread of the loop, for machines that join later

    def keep(self, task: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until the run ends."""
        self._receiving.append(asyncio.create_task(task))

    @property
    def node(self) -> int:
        """The number of this machine."""
        return self._node

    @property
    def machines(self) -> tuple[Machine, ...]:
        """All machines that ever took part, by number: no number is given twice."""
        return self._state.machines

    @property
    def num_machines(self) -> int:
        return 1 + len(self._present)

    @property
    def names(self) -> list[str]:
        """The names of the members that are not lost."""
        return [self._peers[node].name for node in self._present]

    def name_endpoint(self, endpoint: str) -> None:
        """Set where this machine is reached, from a connection to it, where all its addresses are open and none is known yet."""
        own = self._state.machines[self._node]
        if not own.endpoint:
            machines = (replace(own, endpoint=endpoint) if one is own else one for one in self._state.machines)
            self._state = replace(self._state, machines=tuple(machines))

    def add(self, node: int, peer: Peer, machine: Machine) -> None:
        self._peers[node] = peer
        self._events.append(PeerJoined(node, machine))
        if self._silence_s is not None:
            _limit_silence(peer, self._silence_s)
        self._receiving.append(asyncio.create_task(self._receive(node, peer)))
        self._publish_voters(machine)

    def drop(self, launch_id: str) -> None:
        """Lose the old connection of a machine that connects again, at once."""
        for node, peer in self._peers.items():
            if launch_id and peer.launch_id == launch_id and node not in self._lost:
                peer.connection.lost = "it connected again"
                self._ended.add(node)  # it has ended its ranks
                self._exclude(node, peer)
                peer.connection.close()

    async def probe_from_all(self, target: ProbeTarget) -> list[tuple[str, ConnectFailure | None]]:
        """Let all members probe a machine; return the names of those that answered in time, and the outcomes."""
        asked = {node: self._peers[node] for node in self._present}
        self._probes = {node: asyncio.get_running_loop().create_future() for node in asked}
        for peer in asked.values():
            peer.connection.send("probe", target=target)
        if asked:
            await asyncio.wait(self._probes.values(), timeout=PROBE_S + 1.0)
        return [(asked[node].name, answer.result()) for node, answer in self._probes.items() if answer.done()]

    # receiving

    async def _receive(self, node: int, peer: Peer) -> None:
        async for message in peer.connection.messages():
            try:
                self._take(node, peer, message)
            except Exception:  # any is possible in a message that another version, or another program, has sent
                peer.connection.give_up()
        endpoint = self._state.machines[node].endpoint
        if node in self._lost:  # it has connected again
            return
        if self._state.members and not peer.connection.is_silent and await refuses(endpoint):
            self._ended.add(node)
        if node not in self._lost and self.end_code is None:
            self._exclude(node, peer)

    def _take(self, node: int, peer: Peer, message: Message) -> None:
        match message["kind"]:
            case "probed":
                if (probing := self._probes.get(node)) is not None and not probing.done():
                    probing.set_result(failure_from_message(message["failure"]))
            case "stop":
                if (cause := cause_from_message(message)) is not None:
                    self.end_run(replace(cause, time_s=cause.time_s - peer.clock_offset_s))
            case "has_state":
                self._received[node] = int(message["version"])
                self._judge()
            case kind:
                if isinstance(message.get("time_s"), int | float):
                    message["time_s"] -= peer.clock_offset_s
                self._events.append(PeerMessage(node, kind, message))

    def _exclude(self, node: int, peer: Peer) -> None:
        self._lost.add(node)
        lost = PeerLost(node, f"{peer.name} ({peer.ranks})", peer.connection.lost)
        if self._state.members:
            self._unconfirmed.append(lost)
        else:
            self._events.append(lost)
        self._publish_voters()

    # what the others must know

    @property
    def _present(self) -> list[int]:
        return [node for node in self._peers if node not in self._lost]

    def _publish_voters(self, *joined: Machine) -> None:
        voters = (self._node, *self._present)
        machines = (*self._state.machines, *joined)
        before = self._state.voters if self._state.members else ()  # nobody else can go on before it is announced
        self._publish(replace(self._state, machines=machines, voters=(*before, voters)))

    def _publish(self, state: RunState) -> None:
        self._state = replace(state, version=state.version + 1).without_former()
        if self._state.members and self._cut_off is None:
            self._send_all("state", **vars(self._state))
            self._judge()

    def _judge(self) -> None:
        """Go on without lost machines once that is confirmed, or stop where too many are lost."""
        state, here = self._state, {self._node, *self._present}
        if self._cut_off is not None or not (self._unconfirmed or len(state.voters) > 1):
            return
        if not state.may_go_on(here, self._ended):
            names = f"contact with {' and '.join(lost.name for lost in self._unconfirmed)}"
            self._cut_off = PeerLost(self._node, names, self._unconfirmed[-1].reason, is_silent=True)
            return
        confirmed = {node for node in here if self._received.get(node, 0) >= state.version} | {self._node}
        if state.may_go_on(confirmed, self._ended):
            self._events.extend(self._unconfirmed)
            self._unconfirmed.clear()
            self._publish(replace(state, voters=state.voters[-1:]))

    def _send_all(self, kind: str, **content: Any) -> None:
        line = to_line(kind, content)
        for peer in self._peers.values():
            peer.connection.send_line(line)

    async def _finish(self) -> None:
        if self.end_code is None and self.end_cause is None and self._cut_off is None:
            self._send_all("end", cause=FailureCause("the coordinator's supervisor ended without a known cause"))
        await super()._finish()
        await self._close_port()
        if self._cut_off is None:
            await asyncio.gather(*(peer.connection.finish() for peer in self._peers.values()))
        for peer in self._peers.values():
            peer.connection.close()


def _limit_silence(peer: Peer, seconds: float) -> None:
    peer.connection.silence_s = seconds
    peer.connection.send("silence", seconds=seconds)
