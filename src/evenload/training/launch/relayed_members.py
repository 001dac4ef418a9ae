"""`RelayedMembers`: the workers of a machine on which another one, the coordinator, decides (several_machines.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from evenload.errors import LaunchError
from evenload.rendezvous.peer_monitor import COORDINATOR, CoordinatorChanged, PeerMessage, PeerMonitor
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.failure import FailureReport
from evenload.training.launch.host_workers import HostWorkers, can_change
from evenload.training.launch.membership_messages import Finished, Leaving, MembershipChange, Ready, from_line, to_line
from evenload.training.launch.process import WorkerProcess
from evenload.training.launch.remote_workers import UNREADABLE, state_content

if TYPE_CHECKING:
    from evenload.rendezvous.world import World


class RelayedMembers:
    def __init__(self, host: HostWorkers, peers: PeerMonitor, store: str, is_late: bool) -> None:
        """`store`: the store's address, as this machine reaches it; `is_late`: the run is in progress."""
        self._host = host
        self._peers = peers
        self._store = store
        self._is_late = is_late
        self.specs: Sequence[WorkerSpec] = ()
        """Of the first workers of this machine, by local rank."""
        self._ranks: tuple[str, ...] = ()
        self._reported: dict[str, tuple[bool, int | None, bool]] = {}
        """Of each worker: its failure, exit code and stop, as the coordinator knows them."""
        self.said: dict[tuple[str, str], str] = {}
        """By worker and kind: messages that another coordinator must receive as well."""

    def start(self, specs: Sequence[WorkerSpec], world: World | None) -> None:
        """Start the first workers of this machine, unless the run is in progress: then the coordinator says when."""
        self.specs, self._ranks = specs, () if self._is_late else specs[0].workers
        for spec in specs if not self._is_late else ():
            self._host.start(spec, with_channel=can_change(self._host.request, spec))

    @property
    def own_workers(self) -> list[WorkerProcess]:
        """The members that run here."""
        return [
            worker for name, worker in self._host.by_worker.items() if name in self._ranks and worker.poll() is None
        ]

    def rank_of(self, worker: str) -> int:
        return self._ranks.index(worker) if worker in self._ranks else len(self._ranks)

    def poll(self) -> None:
        """Relay messages, report what has become of the workers, and do what the coordinator says."""
        for event in self._peers.received():
            if isinstance(event, CoordinatorChanged):
                self._change_coordinator(event)
            elif isinstance(event, PeerMessage):
                try:
                    self._obey(event)
                except UNREADABLE as error:
                    self._host.print_line(f"a message of the coordinator can't be read: {error!r}")
        self._report()

    def _report(self) -> None:
        for name, process in list(self._host.by_worker.items()):
            self._relay(process)
            failure, code, is_stopped = process.read_failure(), process.poll(), process.is_stopped()
            if failure is None and code is not None:
                failure = process.read_failure()  # it may have written it and exited after the first look
            now = (failure is not None, code, is_stopped and code is None)
            if now != self._reported.get(name, (False, None, False)):
                self._reported[name] = now
                content = state_content(name, code, failure, process.ended_s, now[2])
                self._peers.send(COORDINATOR, "worker_state", **content)

    def stop_joins(self) -> None:
        self._peers.send(COORDINATOR, "stop_joins")

    def _relay(self, process: WorkerProcess) -> None:
        if process.channel is None or process.channel.ended:
            return
        process.channel.flush()
        for message in process.channel.receive():
            if isinstance(message, Ready | Finished | Leaving):
                self.said[process.spec.worker, type(message).__name__] = to_line(message)
            self._peers.send(COORDINATOR, "from_worker", worker=process.spec.worker, line=to_line(message))

    def _change_coordinator(self, event: CoordinatorChanged) -> None:
        """Report to the machine that coordinates from now on what it may not know."""
        self._host.print_line(f"{event.name} coordinates the run from now on")
        self._store = event.store
        self._reported.clear()
        self._report()
        for (worker, _), line in self.said.items():
            self._peers.send(COORDINATOR, "from_worker", worker=worker, line=line)
        self._peers.send(COORDINATOR, "reported", workers=[*self._host.by_worker])

    def _obey(self, message: PeerMessage) -> None:
        content = message.content
        process = self._host.by_worker.get(content.get("worker", ""))
        match message.kind:
            case "start_worker":
                fields = content["fields"] | {key: tuple(content["fields"][key]) for key in ("workers", "device_names")}
                base = self.specs[content["local_rank"]]
                self._start(replace(base, **fields, store=self._store))
            case "to_worker" if process is not None and process.channel is not None:
                change = from_line(content["line"])
                if isinstance(change, MembershipChange):
                    change = replace(change, store=self._store)
                    self._ranks = change.workers
                    self._host.outputs.set_ranks(change.workers)
                process.channel.send(change)
            case "kill_worker" if process is not None:
                process.kill()
                process.close()

    def _start(self, spec: WorkerSpec) -> None:
        try:
            self._host.start(spec, with_channel=True)
        except LaunchError as error:  # the coordinator decides whether to try again
            failure = FailureReport(spec.rank, f"it can't be started: {error}", "", lost=True, time_s=time.time())
            self._peers.send(COORDINATOR, "worker_state", **state_content(spec.worker, 1, failure, 0.0, False))
