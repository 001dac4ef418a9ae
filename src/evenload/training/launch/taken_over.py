"""`TakenOverMembers`: the workers of a run on the machine that takes over when the coordinator is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from evenload.rendezvous.peer_monitor import PeerEvent, PeerJoined, PeerLost, PeerMessage, PeerMonitor, Takeover
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.host_workers import HostWorkers
from evenload.training.launch.membership_decider import MembershipDecider, StartWorker
from evenload.training.launch.membership_messages import Finished, from_line
from evenload.training.launch.run_members import RunMembers


class TakenOverMembers(RunMembers):
    """Decides nothing until each machine is lost, or has reported what its workers have said and which of them still run."""

    def __init__(
        self,
        host: HostWorkers,
        peers: PeerMonitor,
        open_store: Callable[[], str],
        specs: Sequence[WorkerSpec],
        takeover: Takeover,
        said: Sequence[str] = (),
    ) -> None:
        """`specs`: of this machine's ranks, by local rank; `said`: `RelayedMembers.said`."""
        state = takeover.state
        super().__init__(host, peers, open_store, state.coordinator)
        self._decider = self._restored = decider = MembershipDecider.of_state(state.members, open_store())
        self._specs = dict(enumerate(specs))
        self._lost, self._lost_s = [*takeover.lost], takeover.lost_s
        self._awaited = {*state.present} - {self._node}
        self._said = [from_line(line) for line in said]
        self._resumed = False
        self._started = {*host.by_worker}
        """Workers that their machines have started."""
        self._begin()
        self._machines.take_over(state.members["num_places"], state.members["seated"])
        for name, place in decider.places.items():
            if place.node == self._node and name in host.by_worker:
                self._workers[name] = host.by_worker[name]
            elif place.node != self._node:
                spec = replace(specs[0], rank=0, world_size=1, workers=(name,), device=place.device)
                self._workers[name] = self._machines.add(spec, place)
        for name in {*host.by_worker} - {*decider.places}:
            host.by_worker[name].kill()
        for node in state.present:
            self._machines.join(PeerJoined(node, state.machines[node]))
        self._print(
            f"this machine coordinates the run from now on; further ones join it with --host {takeover.endpoint}"
        )

    def poll(self) -> None:
        if self._awaited:
            for event in self._machines.poll():  # nobody joins yet: what has been started is not known
                self._take_event(event)
        elif not self._resumed:
            self._resumed = True
            self._resume()
        else:
            super().poll()

    def _take_event(self, event: PeerEvent) -> None:
        if isinstance(event, PeerMessage) and event.kind == "reported":
            self._awaited.discard(event.node)
            self._started.update(map(str, event.content["workers"]))
            self._machines.end_unknown(event.node, event.content["workers"])
        elif isinstance(event, PeerLost) and not self._resumed:
            self._awaited.discard(event.node)
            self._lost.append(event)
        else:
            super()._take_event(event)

    def _resume(self) -> None:
        """Go on without the lost machines, and start the joiners that the last coordinator could not start any more."""
        decider = self._restored
        unstarted = [name for name in decider.joiners if name not in self._started]
        messages = self._said
        for process in self._workers.values():
            messages += [] if process.channel is None else process.channel.receive()
        for message in messages:
            if isinstance(message, Finished):  # nobody goes on without a rank whose loop has ended
                self.stop_joins()
        self._lose_machines(self._lost, new_coordinator_s=self._lost_s)
        for message in messages if self.end_cause is None else ():
            if not isinstance(message, Finished):
                self._receive(decider, message)
        self._act([StartWorker(name, decider.places[name]) for name in unstarted if name in decider.joiners])
