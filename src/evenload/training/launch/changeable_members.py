"""`ChangeableMembers`: the workers of a run on one machine, which takes and gives back devices on request."""

from __future__ import annotations

from dataclasses import replace

from evenload.errors import ConfigError
from evenload.training.launch.devices import RankDevice, read_host
from evenload.training.launch.environment import WorkerSpec, at_device
from evenload.training.launch.membership_decider import MembershipDecider
from evenload.training.launch.remote_workers import place_of
from evenload.training.launch.request import LaunchRequest
from evenload.training.launch.restarts import can_start_again, write_events
from evenload.training.launch.run_control import read_run_folder
from evenload.training.launch.run_members import RunMembers


class ChangeableMembers(RunMembers):
    @property
    def staying(self) -> dict[str, WorkerSpec]:
        """The workers that train or will, and what each was started with. ConfigError: the members of this run can't change."""
        decider = self._changeable()
        return {name: self._specs[decider.places[name].local_rank] for name in decider.staying}

    @property
    def has_leavers(self) -> bool:
        """True while a worker that has left still runs."""
        return len(self.workers) > len(self._decider.members if self._decider is not None else self._workers)

    def poll(self) -> None:
        super().poll()
        if self._host.request.unwritten_events:
            rest = write_events(read_run_folder(self._host.folder), self._host.request.unwritten_events)
            self._host.request = replace(self._host.request, unwritten_events=rest)

    def for_restart(self) -> LaunchRequest:
        """Return the launch of the devices that are here now; its `num_restarts` is that of the place that has had most."""
        request, decider = self._host.request, self._decider
        if decider is None:
            return request
        request = replace(request, num_restarts=decider.num_restarts)
        first = [*range(len(self._places))]
        places = sorted(decider.places[name].index for name in decider.staying) or first
        indices = {gpu.uuid: str(gpu.index) for gpu in read_host().gpus}  # a queue changes which GPUs CUDA counts here
        places = [n for n in places if indices.keys() >= {*self._devices[n].uuids}] or places
        if places == first:
            return request
        ranks = []
        for device in (self._devices[index] for index in places):
            names = [name.removeprefix("cuda:") for name in device.devices or (device.device,)]
            ranks.append("+".join(indices.get(uuid, "") for uuid in device.uuids) or "+".join(names))
        speeds, shares = request.throttle, request.settings.get("balance")
        settings = dict(request.settings)
        if isinstance(shares, tuple | list):  # no device can have joined
            settings["balance"] = tuple(shares[index] for index in places)
        throttle = tuple(speeds[n] if n < len(speeds) else 1.0 for n in places) if speeds else ()
        return replace(request, devices=",".join(ranks), settings=settings, throttle=throttle)

    def _can_start_again(self) -> bool:
        used = self._decider.num_restarts if self._decider is not None else 0
        return can_start_again(self._host.request, used, read_run_folder(self._host.folder), self._host.began_s)

    def why_not_change(self) -> str:
        """Return why the members of this run can't change now; empty if they can."""
        if self._decider is None:
            return "it runs in one process (strategy dp), or compares its ranks"
        return self._decider.why_not_without(())

    def device_of(self, name: str) -> RankDevice:
        return self._devices[self._changeable().places[name].index]

    def add(self, device: RankDevice, planned: WorkerSpec) -> str:
        """Start a worker on a device, which joins at the end of a step; return its name."""
        decider, index = self._changeable(), len(self._specs)
        decider.store = self._open_store()
        used = {core for process in self.own_workers for core in process.spec.cores}
        self._specs[index] = at_device(replace(self._specs[0], throttle={}, local_rank=index), planned, used)
        self._devices[index] = device
        before = set(decider.places)
        self._act(decider.request_join(place_of(index, self._specs[index], device)))
        return next(name for name in decider.places if name not in before)

    def remove(self, name: str) -> None:
        """Let a worker leave at the end of a step."""
        self._act(self._changeable().request_leave(name))

    def _changeable(self) -> MembershipDecider:
        if self._decider is None:
            raise ConfigError(f"the devices of this run can't change: {self.why_not_change()}")
        if why := self.why_not_change():
            raise ConfigError(f"the devices of this run can't change now: {why}")
        return self._decider
