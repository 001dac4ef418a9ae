"""`RemoteWorker`: a worker of another machine, for the coordinator's supervisor, which decides on the workers of all machines.

Its own supervisor (relayed_members.py) starts, monitors and kills it. Their messages, through `PeerMonitor`::

    coordinator  start_worker  local_rank, and the `WorkerSpec` fields of one that joins
                 to_worker     a message about the membership
                 kill_worker
    member       from_worker   a message about the membership
                 worker_state  exit code, failure report, and whether the process is stopped
                 stop_joins    the run is about to end
                 reported      to another coordinator: all that its workers have reported, and which it started
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evenload.errors import EvenloadError
from evenload.rendezvous.connection import printable
from evenload.rendezvous.peer_monitor import PeerEvent, PeerJoined, PeerMessage, PeerMonitor
from evenload.training.launch.devices import RankDevice
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.failure import FailureReport
from evenload.training.launch.membership_decider import WorkerPlace
from evenload.training.launch.membership_messages import Message, from_line, to_line

if TYPE_CHECKING:  # a run on one machine does not import it
    from evenload.rendezvous.world import Machine, World

UNREADABLE = (EvenloadError, ValueError, KeyError, TypeError)
"""Errors of a message that another version, or another program, has sent."""


def places_of(world: World) -> list[WorkerPlace]:
    """Return the place of each rank, as the run begins."""
    ranks = [(node, index) for node, machine in enumerate(world.machines) for index in range(len(machine.slots))]
    return [place_on(world.machines[node], node, local_rank, rank) for rank, (node, local_rank) in enumerate(ranks)]


def place_on(machine: Machine, node: int, local_rank: int, index: int) -> WorkerPlace:
    slot = machine.slots[local_rank]
    device = f"{slot.device} on {machine.name}"
    return WorkerPlace(index, device, f"{machine.name} {slot.name}", slot.inner_backend, node, local_rank)


def place_of(index: int, spec: WorkerSpec, device: RankDevice) -> WorkerPlace:
    """Return the place of a device of a run on one machine."""
    return WorkerPlace(
        index,
        "+".join(device.devices) or device.device,
        spec.device_names[spec.rank],
        spec.inner_backend,
        local_rank=index,
    )


class RemoteWorker:
    """A worker of another machine, with the parts of `WorkerProcess` that decisions need."""

    def __init__(self, spec: WorkerSpec, node: int, send: Callable[..., None]) -> None:
        """`send`: `PeerMonitor.send`."""
        self.spec = spec
        self.node = node
        self.code: int | None = None
        self.ended_s = 0.0
        self.channel = self
        self._send = send
        self._failure: FailureReport | None = None
        self._is_stopped = False
        self._inbox: list[Message] = []

    def poll(self) -> int | None:
        return self.code

    def read_failure(self) -> FailureReport | None:
        return self._failure

    def is_stopped(self) -> bool:
        return self._is_stopped

    def kill(self) -> None:
        if self.code is None:
            self._send(self.node, "kill_worker", worker=self.spec.worker)
            self.lose()

    def lose(self) -> None:
        """Take it as killed: its machine is gone."""
        if self.code is None:
            self.code, self.ended_s = -signal.SIGKILL, time.time()

    def close(self) -> None:
        """Do nothing: its own supervisor has the channel."""

    def send(self, message: Message) -> None:
        self._send(self.node, "to_worker", worker=self.spec.worker, line=to_line(message))

    def flush(self) -> None:
        """Do nothing: `send` never waits."""

    def receive(self) -> list[Message]:
        messages, self._inbox = self._inbox, []
        return messages

    def take(self, message: PeerMessage) -> None:
        """Take what its supervisor reports; EvenloadError, ValueError, KeyError or TypeError if it can't be read."""
        content = message.content
        if message.kind == "from_worker":
            self._inbox.append(from_line(content["line"]))
        elif message.kind == "worker_state" and self.code is None:
            failure, code = content["failure"], content["code"]
            if failure is not None:
                self._failure = FailureReport(**{**failure, "time_s": float(content["time_s"])})
            self._is_stopped = bool(content["is_stopped"])
            if code is not None:
                self.code, self.ended_s = int(code), float(content["time_s"])


class RemoteMachines:
    """The other machines' workers, seen from the coordinator."""

    def __init__(self, peers: PeerMonitor, print_line: Callable[[str], None]) -> None:
        self._peers = peers
        self._print_line = print_line
        self._workers: dict[str, RemoteWorker] = {}
        self.num_places = 0
        """Places of all machines so far, whose indices are given once."""
        self.seated: set[int] = set()
        """The machines that have places."""
        self._joining: list[PeerJoined] = []
        """Machines that have come since the run began, until all ranks train."""
        self._lost: set[int] = set()
        self.announce = peers.announce
        self._limits_silence = False

    def limit_silence(self, seconds: float) -> None:
        """See `PeerMonitor.limit_silence`; once."""
        if not self._limits_silence:
            self._limits_silence = True
            self._peers.limit_silence(seconds)

    def add(self, spec: WorkerSpec, place: WorkerPlace) -> RemoteWorker:
        """Follow a worker that its machine starts by itself, as the run begins."""
        worker = self._workers[spec.worker] = RemoteWorker(spec, place.node, self._peers.send)
        return worker

    def start(self, spec: WorkerSpec, place: WorkerPlace, fields: Mapping[str, Any]) -> RemoteWorker:
        """Start a worker that joins; `fields` are those of its `WorkerSpec` that its machine does not know."""
        self._peers.send(place.node, "start_worker", local_rank=place.local_rank, fields=fields)
        return self.add(spec, place)

    def poll(self) -> list[PeerEvent]:
        """Take what the machines report about their workers; return the rest."""
        rest: list[PeerEvent] = []
        for event in self._peers.received():
            worker = self._workers.get(event.content.get("worker", "")) if isinstance(event, PeerMessage) else None
            if isinstance(event, PeerJoined):
                self.join(event)
            if worker is None or not isinstance(event, PeerMessage):
                rest.append(event)
                continue
            try:
                worker.take(event)
            except UNREADABLE as error:
                self._print_line(f"a message about {worker.spec.device} can't be read: {error!r}")
        return rest

    def take_over(self, num_places: int, seated: Iterable[int]) -> None:
        """Begin with so many places, of these machines."""
        self.num_places, self.seated = num_places, {*seated}

    def join(self, event: PeerJoined) -> None:
        """Give a machine places at the next `take_places`, if it has none."""
        if event.node not in self.seated:
            self._joining.append(event)

    def take_places(self) -> list[WorkerPlace]:
        """Return the devices of machines that have come since the last call."""
        joining, self._joining = self._joining, []
        self.seated.update(event.node for event in joining)
        found = [(event, local_rank) for event in joining for local_rank in range(len(event.machine.slots))]
        first, self.num_places = self.num_places, self.num_places + len(found)
        return [place_on(e.machine, e.node, local_rank, first + n) for n, (e, local_rank) in enumerate(found)]

    def lose(self, node: int) -> list[str]:
        """Take a machine as lost; return its workers that had not ended."""
        self._lost.add(node)
        self._joining = [event for event in self._joining if event.node != node]
        alive = [worker for worker in self._workers.values() if worker.node == node and worker.code is None]
        for worker in alive:
            worker.lose()
        return [worker.spec.worker for worker in alive]

    def end_unknown(self, node: int, workers: Sequence[str]) -> None:
        """Kill those of a machine's workers that are not known here: the last coordinator meant to, or had not announced them."""
        for name in workers:
            if name not in self._workers:
                self._peers.send(node, "kill_worker", worker=name)

    def is_lost(self, node: int) -> bool:
        return node in self._lost

    def is_quiet(self, name: str) -> bool:
        """Return True for a worker whose machine may be lost."""
        worker = self._workers.get(name)
        return worker is not None and self._peers.is_quiet(worker.node)


def state_content(
    worker: str, code: int | None, failure: FailureReport | None, ended_s: float, is_stopped: bool
) -> dict[str, Any]:
    """Return the content of ``worker_state``."""
    short = None if failure is None else replace(failure, traceback=printable(failure.traceback))
    return {
        "worker": worker,
        "code": code,
        "failure": None if short is None else dataclasses.asdict(replace(short, message=printable(short.message))),
        "time_s": failure.time_s if failure is not None else ended_s,
        "is_stopped": is_stopped,
    }
