"""Devices that a queue gives this run, or takes from it, while it is in progress: the program's part of `evenload.job.devices`.

Each device of the queue has the same number of ranks. Those on devices that are taken leave at the end of a step; new ones start
on devices that are given, and join. The reply follows when the processes that left have ended: their devices are free then.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenload import hardware
from evenload.errors import ConfigError, EvenloadError
from evenload.job.client import contract
from evenload.job.devices import CHANGED, READY, REFUSED, GivenDevice, GivenDevices, read_given, write_reply
from evenload.job.processes import all_stats, descendants
from evenload.job.protocol import RunnerContract
from evenload.training.launch.changeable_members import ChangeableMembers
from evenload.training.launch.devices import HostDevices, RankDevice, parse_devices, plan_workers, read_host
from evenload.training.launch.membership_decider import NOT_BEGUN

_STARTED_BY_ANOTHER = (
    "another program, such as a shell script, started evenload run, and could start others on devices that are given back; "
    "submit evenload run itself, or write exec before it"
)


class QueueDevices:
    def __init__(self, contract: RunnerContract, given: GivenDevices, settings: Mapping[str, Any]) -> None:
        self._contract, self._given, self._settings = contract, given, settings
        self._path = Path(contract.devices_file)
        # The runner starts its program as the leader of a session.
        self._why_not = "" if os.getsid(0) == os.getpid() else _STARTED_BY_ANOTHER
        self._is_announced = False
        self._device_of: dict[int, str] = {}
        """Index of a worker's place → the queue's device."""
        self._seen: tuple[int, int] = (0, 0)
        """The file of the last request."""
        self._requested: GivenDevices | None = None
        """Until the change has taken effect."""
        self._requested_s = 0.0

    @classmethod
    def of_this_program(cls, settings: Mapping[str, Any]) -> QueueDevices | None:
        """Return None without a queue, and for a job with a fixed number of devices."""
        found = _own()
        return None if found is None else cls(*found, settings)

    def poll(self, members: ChangeableMembers) -> None:
        """Announce what the run can do once it trains; then begin requested changes, and reply when they have taken effect."""
        if self._requested is not None:
            self._finish(members, self._requested)
        elif not self._is_announced:
            self._announce(members)
        elif not self._why_not and (given := self._next()) is not None:
            try:
                self._begin(members, given)
            except EvenloadError as error:
                self._reply(given.number, REFUSED, str(error))

    def _announce(self, members: ChangeableMembers) -> None:
        why_not = self._why_not or members.why_not_change()
        if why_not == NOT_BEGUN:
            return
        try:
            if not why_not:
                self._device_of = self._assigned(members)
        except ConfigError as error:
            why_not = str(error)
        self._why_not = why_not
        self._is_announced = self._reply(0, REFUSED if why_not else READY, why_not)

    def _assigned(self, members: ChangeableMembers) -> dict[int, str]:
        """Return the device of each worker's place. ConfigError: the number of ranks doesn't follow that of the devices."""
        if isinstance(balance := self._settings.get("balance"), tuple | list):
            raise ConfigError(f"its shares are fixed: --balance {','.join(map(str, balance))}")
        found: dict[int, str] = {}
        ids, slots = {device.id for device in self._given.devices}, [d for d in self._given.devices if d.cores]
        ranks = {spec.local_rank: (members.device_of(name), spec) for name, spec in members.staying.items()}
        on_cores = [spec for device, spec in ranks.values() if not device.uuids and len(slots) == len(ids)]
        for index, (device, _) in ranks.items():
            if len(device.devices) > 1:
                raise ConfigError(f"a rank of it has several devices ({'+'.join(device.devices)})")
            if device.uuids and device.uuids[0] in ids:
                found[index] = device.uuids[0]
        for number, spec in enumerate(on_cores):
            slot = slots[number * len(slots) // len(on_cores)]
            if not {*spec.cores} <= {*slot.cores}:
                raise ConfigError(
                    f"its ranks are on other cores than its devices: rank {number} is not on {slot.id} alone"
                )
            found[spec.local_rank] = slot.id
        nums = Counter(found.values())
        if len({nums[name] for name in ids}) > 1 or not nums:
            on = ", ".join(f"{nums[device.id]} on {device.id}" for device in self._given.devices)
            raise ConfigError(f"its devices do not have the same number of ranks: {on}")
        return found

    def _next(self) -> GivenDevices | None:
        """Return the devices of a new request."""
        with suppress(OSError):
            stat = self._path.stat()
            if (stat.st_ino, stat.st_mtime_ns) != self._seen and (given := read_given(self._path)) is not None:
                self._seen = stat.st_ino, stat.st_mtime_ns
                return given if given.number > self._given.number else None
        return None

    def _begin(self, members: ChangeableMembers, given: GivenDevices) -> None:
        before, wanted = {device.id for device in self._given.devices}, {device.id for device in given.devices}
        staying = members.staying
        leaving = [
            name for name, spec in staying.items() if self._device_of.get(spec.local_rank, "") in before - wanted
        ]
        kept = [members.device_of(name) for name in staying if name not in leaving]
        num_each = len(self._device_of) // len(before)
        _confine(given.devices, [worker.pid for worker in members.own_workers if not worker.spec.cores])
        host = read_host()
        for new in (device for device in given.devices if device.id not in before):
            rank_devices, own_host = _ranks_on(new, num_each, host)
            beside = [] if new.cores else kept
            specs = plan_workers([*beside, *rank_devices], own_host)[len(beside) :]
            for device, spec in zip(rank_devices, specs, strict=True):
                name = members.add(device, spec)
                self._device_of[members.staying[name].local_rank] = new.id
        for name in leaving:
            members.remove(name)
        self._requested, self._requested_s = given, time.monotonic()

    def _finish(self, members: ChangeableMembers, given: GivenDevices) -> None:
        if members.changes or members.has_leavers:
            return
        wanted, why_not = {device.id for device in given.devices}, members.why_not_change()
        if not why_not:
            places = {spec.local_rank for spec in members.staying.values()}
            expected = {index: name for index, name in self._device_of.items() if name in wanted}
            without = sorted({name for index, name in expected.items() if index not in places})
            why_not = f"no rank could join on {', '.join(without)}" if without else ""
            self._device_of = expected
        took_s = time.monotonic() - self._requested_s
        if self._reply(given.number, REFUSED if why_not else CHANGED, why_not, took_s):
            self._given, self._requested, self._why_not = given, None, why_not

    def _reply(self, number: int, state: str, reason: str = "", seconds: float = 0.0) -> bool:
        """Write a reply; return False where the disk has no room, so that the next poll tries again."""
        try:
            write_reply(self._contract, number, state, reason, seconds)
        except OSError:
            return False
        return True


def default_devices() -> str:
    """Return ``-d`` where none was given: in a job of several slots of cores, whose number may change, one rank on each."""
    found = _own()
    slots = [device for device in found[1].devices if device.cores] if found is not None else []
    return (
        f"cpu:{len(slots)}" if len(slots) > 1 and found is not None and len(slots) == len(found[1].devices) else "auto"
    )


def _own() -> tuple[RunnerContract, GivenDevices] | None:
    try:
        own = contract()
    except ConfigError:
        return None  # the ranks report it
    given = read_given(Path(own.devices_file)) if own is not None and own.devices_file else None
    return (own, given) if own is not None and given is not None else None


def _ranks_on(device: GivenDevice, num: int, host: HostDevices) -> tuple[tuple[RankDevice, ...], HostDevices]:
    """Return `num` ranks on a device of the queue, and what they may use of this machine."""
    if device.cores:
        own = replace(host, gpus=(), cores=device.cores, cpu=hardware.cpu(device.cores))
        return parse_devices(f"cpu:{num}", own), own
    index = next((gpu.index for gpu in host.gpus if gpu.uuid == device.id), None)
    if index is None:
        raise ConfigError(f"there is no GPU {device.id} here; here are: {host.describe()}")
    return parse_devices(str(index), host) * num, host


def _confine(devices: Iterable[GivenDevice], unbound: Iterable[int]) -> None:
    """Limit this process, and workers that are bound to no cores, to these devices; ranks that start inherit it."""
    if gpus := [device.id for device in devices if not device.cores]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return
    cores, pids = {core for device in devices for core in device.cores}, {*unbound}
    for pid in (os.getpid(), *pids, *descendants(pids, all_stats())):
        with suppress(OSError):  # it has ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), cores)
