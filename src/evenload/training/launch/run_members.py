"""The workers of a run, on this machine and on those it coordinates, and who of them is a member: carries out the decisions of
`MembershipDecider`.

A lost worker ends the run only where the others can't go on without it: before the first step, without registered state, or
when it was the last. Workers without a channel (`evenload.spawn`, the modes that compare ranks) never can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evenload.errors import LaunchError
from evenload.job.processes import cpu_s_of
from evenload.rendezvous.peer_monitor import (
    FailureCause,
    PeerEvent,
    PeerJoined,
    PeerLost,
    PeerMessage,
    PeerMonitor,
    cause_of_loss,
)
from evenload.training.launch.devices import RankDevice, parse_devices, read_host
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.failure import FailureReport
from evenload.training.launch.host_workers import HostWorkers, can_change
from evenload.training.launch.late_losses import LateLosses
from evenload.training.launch.membership_decider import (
    LOOP_ENDED,
    NOT_BEGUN,
    EndRun,
    EndWorker,
    Instruction,
    MembershipDecider,
    Notice,
    SendChange,
    StartWorker,
    WorkerPlace,
)
from evenload.training.launch.membership_messages import (
    Activity,
    Capable,
    Finished,
    Leaving,
    LostWorker,
    Message,
    Ready,
    Switched,
    Waits,
)
from evenload.training.launch.outside_workers import OutsideWorkers
from evenload.training.launch.process import WorkerProcess
from evenload.training.launch.remote_workers import RemoteMachines, RemoteWorker, place_of, places_of
from evenload.training.launch.restarts import cause_of
from evenload.training.launch.server_process import goes_on_without, may_lose, what_joiners_do
from evenload.training.launch.stalls import GIVEN_UP_S, StallMonitor

if TYPE_CHECKING:
    from evenload.rendezvous.world import World

_SILENCE_S = 5.0
"""A machine from which nothing comes for so long is lost, once all ranks train: their start keeps a machine busy for longer."""
_ANNOUNCE_S = 0.5
"""Between two looks for something to announce that no instruction came with."""


class RunMembers:
    def __init__(self, host: HostWorkers, peers: PeerMonitor, open_store: Callable[[], str], node: int = 0) -> None:
        """`open_store` returns the store's address, and opens it if it isn't yet; `node`: the number of this machine."""
        self._host = host
        self._node = node
        self._machines = RemoteMachines(peers, host.print_line)
        self._open_store = open_store
        self._workers: dict[str, WorkerProcess | RemoteWorker] = {}
        self._gone: set[str] = set()
        """Workers whose end has been dealt with: lost, left, or never admitted."""
        self._places: dict[str, WorkerPlace] = {}
        """Of the first workers."""
        self._decider: MembershipDecider | None = None
        self._specs: dict[int, WorkerSpec] = {}
        """Of this machine's places, by local rank: the spec of the first worker."""
        self._devices: dict[int, RankDevice] = {}
        self._due: list[tuple[float, StartWorker]] = []
        self._stalls = StallMonitor(lambda worker: cpu_s_of(getattr(self._workers.get(worker), "pid", 0)))
        self._reported_stalls: set[str] = set()
        self._next_step = 0
        self._has_begun = False
        self._announced: dict[str, Any] = {}
        self._announced_s = 0.0
        self._ends = False
        self._late = LateLosses(self._workers)
        self._outside = OutsideWorkers(self._workers, self._forget, self._act, self.where, self._print)
        self.end_cause: FailureCause | None = None
        """Set when too few are left."""

    def start(self, specs: Sequence[WorkerSpec], world: World | None = None) -> None:
        """Start the first workers of this machine; `world`: all machines, of which this is the first."""
        elastic = can_change(self._host.request, specs[0])
        self._late.goes_on = world is None
        if world is not None:
            self._places = dict(zip(specs[0].workers, places_of(world), strict=True))
        elif elastic:
            self._devices = dict(enumerate(parse_devices(self._host.request.devices, read_host())))
            self._places = {
                spec.worker: place_of(index, spec, self._devices[index]) for index, spec in enumerate(specs)
            }
        if elastic:
            self._specs = dict(enumerate(specs))
            request = self._host.request
            self._decider = MembershipDecider(self._places, specs[0].store, request.max_restarts, request.num_restarts)
        self._machines.take_over(len(self._places), {place.node for place in self._places.values()})
        for spec in specs:
            self._workers[spec.worker] = self._host.start(spec, with_channel=elastic)
        for place in [place for place in self._places.values() if place.node != 0]:
            spec = replace(specs[0], rank=place.index, local_rank=place.local_rank, device=place.device)
            self._workers[spec.worker] = self._machines.add(spec, place)

    @property
    def workers(self) -> list[WorkerProcess | RemoteWorker]:
        """The members, rank 0 first, and workers that have left but still run; not those that prepare to join."""
        members = self._decider.members if self._decider is not None else tuple(self._workers)
        outside = self._decider.joiners if self._decider is not None else ()
        names = dict.fromkeys((*members, *self._workers))
        return [
            self._workers[name]
            for name in names
            if name in self._workers and name not in self._gone and (name in members or name not in outside)
        ]

    @property
    def own_workers(self) -> list[WorkerProcess]:
        """Those of `workers` that run on this machine."""
        return [worker for worker in self.workers if isinstance(worker, WorkerProcess)]

    def rank_of(self, worker: str) -> int:
        return self._workers[worker].spec.rank if self._decider is None else self._decider.rank_of(worker)

    def has_left(self, worker: str) -> bool:
        """Return whether nobody expects anything of a worker any more: how it ends is no matter."""
        return self._decider is not None and worker not in self._decider.expected

    def describe(self) -> list[str]:
        """Describe each member in one line."""
        names = self._decider.members if self._decider is not None else ()
        return [f"rank {rank}: {self.where(name)}" for rank, name in enumerate(names)]

    @property
    def changes(self) -> bool:
        """True while a worker is on its way in or out, and when the run ends before it has arrived."""
        return bool(self._ends or self._due or (self._decider is not None and self._decider.changes))

    def poll(self) -> None:
        """Read messages, and see to workers that prepare to join, have left, or are due to start."""
        self._follow_machines()
        decider = self._decider
        if decider is None:
            return
        for name, process in list(self._workers.items()):
            if process.channel is None or name in self._gone:
                continue
            process.channel.flush()
            for message in process.channel.receive():
                self._receive(decider, message)
        self.end_cause = self.end_cause or self._late.end_cause(decider, have_ended=False)
        names = [name for name in self._workers if name not in self._gone]
        self._late.name_running(decider, [name for name in names if name not in decider.joiners], self._print)
        self._outside.poll(decider, names)
        if not self._has_begun and decider.why_not_without(()) != NOT_BEGUN:
            self._begin()
        elif may_lose(self._host.folder):
            self._machines.limit_silence(_SILENCE_S)
        now_s = time.monotonic()
        if now_s - self._announced_s >= _ANNOUNCE_S:
            self._announce(decider)
        if self._stalls.is_due(now_s):
            self._end_stalled(decider, now_s)
        due, self._due = self._due, [(due_s, start) for due_s, start in self._due if due_s > now_s]
        for start in (start for due_s, start in due if due_s <= now_s):
            if self._machines.is_lost(start.place.node):
                self._act(decider.request_leave(start.worker))
            elif start.worker in decider.joiners:
                self._start_joiner(decider, start)

    def _begin(self) -> None:
        """All ranks train."""
        self._has_begun = True
        self._machines.limit_silence(_SILENCE_S)

    def _announce(self, decider: MembershipDecider) -> None:
        """Let the other machines know what the next coordinator must, if it has changed; not before the run can go on."""
        self._announced_s = time.monotonic()
        state = {**decider.state(), "num_places": self._machines.num_places, "seated": sorted(self._machines.seated)}
        if self._has_begun and state != self._announced:
            self._announced = state
            self._machines.announce(state)

    def absorb(self, failures: Mapping[str, FailureReport]) -> str | None:
        """Go on without these members if that is possible; otherwise return what to add to the report of their failures."""
        decider = self._decider
        if decider is None or not failures:
            return ""
        joining = [name for name in failures if name in decider.joiners]  # its admission has not taken effect
        if not all(failure.lost or name in joining for name, failure in failures.items()):
            return ""
        if why := decider.why_not_without(tuple(failures)) or self._late.why_not(decider, failures):
            earlier = "".join(f"\nlost before: {loss.reason}" for loss in decider.losses)
            return earlier + ("" if why in (NOT_BEGUN, LOOP_ENDED) else f"\nthe run can't go on: {why}")
        self._late.note(decider, {name: cause_of(f, f.text(self.where(name))) for name, f in failures.items()})
        for name in failures:
            self._forget(name)
        losses = [LostWorker(name, f.text(self.where(name)), f.time_s) for name, f in failures.items()]
        self._act(decider.lost(losses, restart=all(failure.lost for failure in failures.values())))
        return None

    def ends_late(self) -> bool:
        """Return whether the run has failed, though all workers that are left have ended well."""
        if self._decider is not None and self.end_cause is None:
            self.end_cause = self._late.end_cause(self._decider, have_ended=True)
        return self.end_cause is not None

    def stop_joins(self, finished: str = "") -> None:
        """End the workers that prepare to join: the run is about to end, or the script of the worker `finished` has ended."""
        if self._decider is not None:
            self._ends = self._ends or self.changes
            self._act(self._decider.finished(finished, self._late.goes_on))
            self._due.clear()

    # -- messages -------------------------------------------------------------------------------------------------------

    def _follow_machines(self) -> None:
        for event in self._machines.poll():
            self._take_event(event)
        if (decider := self._decider) is not None and (why := decider.why_not_without(())) != NOT_BEGUN:
            places = self._machines.take_places() if not why else ()  # at the end they wait for the others
            self._act([instruction for place in places for instruction in decider.request_join(place)])

    def _take_event(self, event: PeerEvent) -> None:
        if isinstance(event, PeerLost):
            self._lose_machines([event])
        elif isinstance(event, PeerJoined):
            self._print(f"{event.machine.name} is here; {what_joiners_do(self._host.folder)}")
        elif isinstance(event, PeerMessage) and event.kind == "stop_joins":
            self.stop_joins()

    def _lose_machines(self, lost: Sequence[PeerLost], new_coordinator_s: float = 0.0) -> None:
        """Go on without machines and their ranks, or end the run; `new_coordinator_s`: when the last one was lost."""
        names = [name for one in lost for name in self._machines.lose(one.node) if name not in self._gone]
        self._gone.update(names)
        if goes_on_without(self._host.folder, [self._workers[name].spec.rank for name in names]):
            for one in lost:
                self._print(f"{one.name} is gone: {one.reason}; the run goes on without it")
            return
        decider = self._decider
        ends = names if decider is None else [name for name in names if name in decider.members]
        why = NOT_BEGUN if decider is None else decider.why_not_without(ends)
        if (ends or new_coordinator_s) and why:
            reason = "" if why == NOT_BEGUN else f"\nthe run can't go on: {why}"
            self.end_cause = replace(cause := cause_of_loss(lost[0]), text=cause.text + reason)
            return
        if decider is None:
            return
        for one in lost:
            self._print(f"{one.name} is gone: {one.reason}")
        nodes = [one.node for one in lost]
        self._due = [(due_s, start) for due_s, start in self._due if start.place.node not in nodes]
        for name in [name for name in decider.staying if decider.places[name].node in nodes and name not in names]:
            self._act(decider.request_leave(name))  # it was about to be restarted there
        texts = [f"rank {decider.rank_of(name)} ({self.where(name)}) is lost with its machine" for name in names]
        at_s = new_coordinator_s or time.time()
        losses = [LostWorker(name, text, at_s) for name, text in zip(names, texts, strict=True)]
        main = decider.members[0]
        self._act(decider.lost(losses, restart=False, new_coordinator=new_coordinator_s > 0))
        if main in names and self.end_cause is None:
            self._print(
                f"rank 0 is {self.where(decider.members[0])} from now on; records and checkpoints are written there"
            )

    def _receive(self, decider: MembershipDecider, message: Message) -> None:
        if isinstance(message, Capable):
            self._act(decider.capable(message.worker, message.why_not))
        elif isinstance(message, Ready):
            self._act(decider.ready(message.worker))
        elif isinstance(message, Switched):
            before = decider.pending
            instructions = decider.switched(message.worker, message.number)
            self._next_step = max(self._next_step, message.step)  # a rank that joins may not know it yet
            if before is not None and decider.pending is not before:
                self._print(before.text(self.where, self._next_step))
                self._announced_s = 0.0  # what the next coordinator must know has changed
            self._act(instructions)
        elif isinstance(message, Activity | Waits):
            self._stalls.take(message, time.monotonic())
        elif isinstance(message, Finished):
            self.stop_joins(message.worker)
        elif isinstance(message, Leaving):
            self._act(decider.ended(message.worker))

    def _end_stalled(self, decider: MembershipDecider, now_s: float) -> None:
        """Kill workers that are stopped, and members that stall the others, if these can go on without or start again."""
        here = [name for name in self._workers if name not in self._gone and not self._machines.is_quiet(name)]
        known = [name for name in here if self._workers[name].poll() is None]
        members = [name for name in decider.expected if name in known]
        stopped = [name for name in known if self._workers[name].is_stopped()]
        found = self._stalls.judge(members, stopped, now_s, decider.awaited)
        for name, reason in found.absent.items():
            self._print(f"rank {decider.rank_of(name)} ({self.where(name)}): {reason}; the other ranks wait")
        if found.deadlock_s and len(members) == len(decider.expected):
            text = self._stalls.describe_deadlock(members, self.where, found.deadlock_s)
            self.end_cause = self.end_cause or FailureCause(text, 1, time_s=time.time())
        if found.halted_s >= GIVEN_UP_S and any(name in here and name not in known for name in decider.expected):
            text = f"rank {decider.rank_of(members[0])} ({self.where(members[0])}) has been stopped (SIGSTOP) for "
            text += f"{found.halted_s:.0f} s, after another has ended"
            self.end_cause = self.end_cause or FailureCause(text, 1, time_s=time.time(), lost=True)
        losses: list[LostWorker] = []
        for name, reason in found.stalled.items():
            if name not in members:
                self._outside.end(decider, name, reason)
                continue
            text = f"rank {decider.rank_of(name)} ({self.where(name)}) does not respond: {reason}"
            names = [*(loss.worker for loss in losses), name]
            why = decider.why_not_without(names) or self._late.why_not(decider, names)
            if not why or self._can_start_again():
                losses.append(LostWorker(name, text, time.time()))
            elif found.is_too_long or (name in found.given_up and why != LOOP_ENDED):  # they may export for hours
                self.end_cause = self.end_cause or FailureCause(
                    f"{text}\nthe run can't go on: {why}", 1, time_s=time.time()
                )
            elif name not in self._reported_stalls:
                self._reported_stalls.add(name)
                self._print(f"{text}; the other ranks wait, because they can't go on without it: {why}")
        if losses:
            self._leave_out(decider, losses)

    def _leave_out(self, decider: MembershipDecider, losses: Sequence[LostWorker]) -> None:
        """Kill members, together, so that each is named by the rank that it had."""
        causes = {loss.worker: FailureCause(loss.reason, 1, time_s=loss.time_s, lost=True) for loss in losses}
        for name in causes:
            self._forget(name)
        self._late.note(decider, causes)
        if self._late.why_not(decider, [*causes]):
            self.end_cause = self.end_cause or causes[losses[0].worker]
        else:
            self._act(decider.lost(losses))

    def _can_start_again(self) -> bool:  # all ranks; those of several machines never do
        return False

    # -- processes ------------------------------------------------------------------------------------------------------

    def _start_joiner(self, decider: MembershipDecider, start: StartWorker) -> None:
        place, fields = start.place, decider.fields_of_joiner(start)
        if place.node == self._node:
            spec = replace(self._specs[place.local_rank], **fields, store=decider.store)
            try:
                self._workers[start.worker] = self._host.start(spec, with_channel=True)
            except LaunchError as error:  # later there may be room
                loss = LostWorker(start.worker, f"{place.device} can't be started: {error}", time.time())
                self._act(decider.lost([loss]))
            return
        spec = replace(self._specs[0], **fields, local_rank=place.local_rank, device=place.device)
        self._workers[start.worker] = self._machines.start(spec, place, fields)

    def _forget(self, name: str) -> None:
        """Kill a worker, if it still runs, whose end is dealt with."""
        self._gone.add(name)
        self._workers[name].kill()
        if self._workers[name].poll() is None:
            self._print(f"{self.where(name)}: the system does not end its process: it waits for a device or a disk")
        self._workers[name].close()

    def _act(self, instructions: Sequence[Instruction]) -> None:
        if self._decider is not None and any(isinstance(one, SendChange | StartWorker) for one in instructions):
            self._announce(self._decider)
        for instruction in instructions:
            match instruction:
                case SendChange(change, to):
                    self._host.outputs.set_ranks(change.workers)
                    self._stalls.begin_generation()
                    for name in to:
                        if name not in self._gone and (channel := self._workers[name].channel) is not None:
                            channel.send(change)
                case StartWorker():
                    self._due.append((time.monotonic() + instruction.delay_s, instruction))
                case EndWorker(name):
                    if name in self._workers:
                        self._forget(name)
                case EndRun(reason):
                    self.end_cause = FailureCause(reason, 1, time_s=time.time(), lost=True)
                case Notice(text):
                    self._print(text)

    def where(self, name: str) -> str:
        places = self._places if self._decider is None else self._decider.places
        return places[name].device if name in places else self._workers[name].spec.device

    def _print(self, text: str) -> None:
        self._host.print_line(text)
