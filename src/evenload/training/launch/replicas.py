"""Devices of the replicas of one process (strategy ``dp``), from the launcher or found on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError
from evenload.training.launch.devices import HostDevices, RankDevice, parse_devices, plan_workers, read_host
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.throttle import ThrottleController

STRATEGY = "dp"


@dataclass(frozen=True)
class ReplicaDevice:
    device: str
    """``cuda:N`` or ``cpu``."""
    name: str = ""
    cores: tuple[int, ...] = ()
    """CPU cores its thread is bound to; empty: unbound."""
    num_threads: int = 0
    """Threads for torch's own operators; 0 leaves torch's default."""
    factor: float = 1.0
    """Relative speed to which it is throttled."""


def as_one_worker(
    workers: Sequence[WorkerSpec], settings: Mapping[str, Any], *, several_machines: bool = False
) -> tuple[WorkerSpec, ...]:
    """Return the workers of a launch; under strategy ``dp`` one worker with the devices of all.

    ConfigError: several machines, a GPU named twice, a rank of several devices, or a mode that compares processes.
    """
    if settings.get("strategy") != STRATEGY:
        return tuple(workers)
    spelled = f"--strategy {STRATEGY}"
    if several_machines:
        raise ConfigError(
            f"{spelled} is one process on one machine; leave --nodes and --host out, or use --strategy ddp"
        )
    for worker in workers:
        if worker.devices:
            apart = ",".join(device.removeprefix("cuda:") for device in worker.devices)
            raise ConfigError(
                f"{spelled} gives each device a whole replica, but {'+'.join(worker.devices)} is one rank with several; name "
                f"them apart: -d {apart}"
            )
    uuids = [worker.visible_devices for worker in workers if worker.visible_devices]
    if len(uuids) > 1 and any(uuid.startswith("MIG-") for uuid in uuids):
        raise ConfigError(
            f"{spelled} is one process, and CUDA shows a process only one part of a GPU (MIG); use --strategy ddp"
        )
    # Workers that see one GPU each call it cuda:0; one process sees all of them.
    numbers = [f"cuda:{uuids.index(w.visible_devices)}" if w.visible_devices else w.device for w in workers]
    _check_distinct(numbers, "-d")
    check_mode(workers[0].mode, spelled)
    if len(workers) == 1:
        return tuple(workers)
    devices = tuple(
        {"device": number, "name": w.device_names[w.rank], "cores": list(w.cores), "num_threads": w.num_threads}
        for number, w in zip(numbers, workers, strict=True)
    )
    first = workers[0]
    return (
        replace(
            first,
            world_size=1,
            workers=first.workers[:1],
            device=numbers[0],
            visible_devices=",".join(uuids),
            backend="gloo",
            cores=(),
            num_threads=max(1, sum(w.num_threads for w in workers if w.device == "cpu")),
            replicas=devices,
        ),
    )


def replica_devices(spec: WorkerSpec, spelled: str) -> tuple[ReplicaDevice, ...]:
    """Return the devices of this process's replicas; ConfigError if there are other ranks.

    ``spelled`` is the setting ``strategy`` as the user wrote it.
    """
    check_mode(spec.mode, spelled)
    if spec.world_size > 1:
        how = {
            "evenload": "evenload run started {n} ranks; set it there: evenload run --strategy dp ..., or remove it from the "
            "script",
            "torchrun": "torchrun started {n} ranks; start the script with evenload run --strategy dp, or with plain python",
        }.get(spec.origin, "there are {n} ranks; start one, or remove it from the script")
        raise ConfigError(
            f"{spelled}: dp is one process that owns all its devices, but {how.format(n=spec.world_size)}"
        )
    if spec.replicas:
        throttle = spec.throttle.get("factors") or [1.0] * len(spec.replicas)
        return tuple(
            ReplicaDevice(
                device["device"],
                device.get("name", device["device"]),
                tuple(device.get("cores", ())),
                int(device.get("num_threads", 0)),
                float(factor),
            )
            for device, factor in zip(spec.replicas, throttle, strict=True)
        )
    host = read_host()
    if spec.device != "auto":
        return (ReplicaDevice(spec.device, spec.device),)
    return plan_replicas([item.device for item in parse_devices("auto", host)], host)


def plan_replicas(devices: Sequence[str], host: HostDevices | None = None) -> tuple[ReplicaDevice, ...]:
    """Return replicas on these devices of one process, with the cores and threads that ranks would have.

    ConfigError: a GPU is named twice.
    """
    host = host or read_host()
    _check_distinct(devices, "devices")
    workers = plan_workers([RankDevice(device, _name(device, host)) for device in devices], host)
    return tuple(
        ReplicaDevice(w.device, w.device_names[w.rank], w.cores if len(workers) > 1 else (), w.num_threads)
        for w in workers
    )


def check_mode(mode: str, spelled: str) -> None:
    """Refuse a mode that compares ranks with each other, by ConfigError."""
    if mode == "verify":
        raise ConfigError(
            f"{spelled}: evenload verify compares ranks with one process, and dp has no ranks; verify the script with "
            "strategy='ddp' on the same devices, which splits a batch in the same way"
        )
    if mode == "measure":
        raise ConfigError(
            f"{spelled}: a measurement also runs each rank alone, and dp has no ranks; use strategy='ddp'"
        )


def _check_distinct(devices: Sequence[str], what: str) -> None:
    twice = sorted({device for device in devices if device != "cpu" and devices.count(device) > 1})
    if twice:
        raise ConfigError(
            f"{what} {','.join(devices)}: {', '.join(twice)} is named twice; two replicas in one process would only share "
            "that GPU: name it once (cpu may be named several times)"
        )


def _name(device: str, host: HostDevices) -> str:
    if device == "cpu":
        return host.cpu.name
    index = int(device.partition(":")[2] or 0)
    return next((gpu.name for gpu in host.gpus if gpu.index == index), device)


def make_throttle(
    folder: Path, factors: Sequence[float], specs: Sequence[WorkerSpec], num_cores: Sequence[float]
) -> ThrottleController:
    """Return the throttle of a launch; replicas of one process share its control group, so they repeat computation."""
    devices = specs[0].replicas
    if not devices:
        return ThrottleController(folder, factors, num_cores, [spec.device for spec in specs])
    return ThrottleController(
        folder, factors, [1.0] * len(devices), [device["device"] for device in devices], use_quota=False
    )


def throttle_of(throttle: ThrottleController, spec: WorkerSpec) -> dict[str, Any]:
    if not spec.replicas:
        return throttle.spec_of(spec.local_rank)
    return {"factors": [throttle.spec_of(index)["factor"] for index in range(len(spec.replicas))], "means": "compute"}


def num_parts(workers: Sequence[WorkerSpec]) -> int:
    return sum(len(worker.replicas) or 1 for worker in workers)
