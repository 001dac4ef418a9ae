"""Which devices a launch uses, and what each of its workers gets: pure planning, nothing is started here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenload.balance.values import ComputeDevice
from evenload.errors import ConfigError
from evenload.training.launch.environment import WorkerSpec

_EXPECTED = (
    "expected auto, all, cpu, cpu:3 (three CPU ranks), GPU indices such as 0,2, a mix such as 0,cpu, or 0+1 (one rank with two "
    "devices, over which evenload.place cuts a model)"
)


@dataclass(frozen=True)
class Host:
    """What one machine has for the workers."""

    gpus: tuple[ComputeDevice, ...]
    cpu: ComputeDevice
    cores: tuple[int, ...]
    """The cores this process may use."""
    quota_cores: float | None = None
    """How many cores' time this process may use, where that is limited."""

    @property
    def num_cores(self) -> float:
        """How many cores' time there is; a fraction under a quota."""
        return float(len(self.cores)) if self.quota_cores is None else min(self.quota_cores, float(len(self.cores)))

    def describe(self) -> str:
        """What is here, for an error."""
        gpus = "no GPU" if not self.gpus else ", ".join(f"{gpu.index} ({gpu.name})" for gpu in self.gpus)
        return f"{gpus}; cpu ({len(self.cores)} cores)"


@dataclass(frozen=True)
class Place:
    """Where one rank computes."""

    device: str
    """``cuda:N`` or ``cpu``."""
    name: str
    """What a person calls it."""
    devices: tuple[str, ...] = ()
    """All devices of the rank, `device` first, where it has several."""


def read_host() -> Host:
    """Reads what is here (the devices, the cores, the quota)."""
    from evenload import hardware

    return Host(hardware.gpus(), hardware.cpu(), tuple(hardware.usable_cores()), hardware.cpu_quota())


def parse_devices(text: str, host: Host) -> tuple[Place, ...]:
    """The places that ``-d`` names, one for each rank.

    ``auto`` is every GPU, or one CPU rank with all cores where there is none; ``all`` is every GPU and one CPU rank.
    A GPU named twice gets two ranks; ``0+1`` is one rank with two devices.

    Raises:
        ConfigError: an unknown device; the message lists what is here.
    """
    gpus = tuple(_gpu_place(gpu) for gpu in host.gpus)
    if text == "auto":
        return gpus or (_cpu_place(host),)
    if text == "all":
        return (*gpus, _cpu_place(host))
    places: list[Place] = []
    for item in text.split(","):
        if "+" in item:
            places.append(_group([_parse_item(text, part, host) for part in item.split("+")], text, item))
        else:
            places += _parse_item(text, item, host)
    return tuple(places)


def _parse_item(text: str, item: str, host: Host) -> list[Place]:
    """The ranks that one item of ``-d`` names."""
    kind, _, number = item.strip().partition(":")
    if kind == "cpu" and (not number or number.isdecimal()):
        count = int(number or 1)
        if count < 1:
            raise ConfigError(f"-d {text}: {item} is no rank at all; {_EXPECTED}")
        return [_cpu_place(host)] * count
    if (kind.isdecimal() and not number) or (kind in ("cuda", "gpu") and number.isdecimal()):
        index = int(number or kind)
        if index >= len(host.gpus):
            raise ConfigError(f"-d {text}: there is no GPU {index} here; here are: {host.describe()}")
        return [_gpu_place(host.gpus[index])]
    raise ConfigError(f"-d {text}: {item!r} is no device; {_EXPECTED}; here are: {host.describe()}")


def _group(parts: list[list[Place]], text: str, item: str) -> Place:
    """One rank with several devices; its batches come to the first."""
    for part in parts:
        if len(part) > 1:
            raise ConfigError(
                f"-d {text}: {item} is one rank with several devices, in which each is named for itself; write cpu+cpu in "
                "place of cpu:2"
            )
    devices = [part[0] for part in parts]
    names = Counter(place.name for place in devices)
    return Place(
        devices[0].device,
        " + ".join(f"{count} × {name}" if count > 1 else name for name, count in names.items()),
        tuple(place.device for place in devices),
    )


def plan_workers(
    places: Sequence[Place],
    host: Host,
    settings: Mapping[str, Any] | None = None,
    mode: str = "train",
    options: Mapping[str, Any] | None = None,
) -> tuple[WorkerSpec, ...]:
    """The workers of one launch on one host, by rank; store, folder and throttle are still empty.

    CPU ranks are bound to cores of their own where there are enough; beside GPUs they leave one core for each GPU rank.
    GPU ranks are not bound. Under a CPU quota nobody is bound, because the quota isn't tied to cores.

    Raises:
        ConfigError: ``settings`` fix the shares of another number of ranks.
    """
    settings = dict(settings or {})
    shares = settings.get("balance")
    if isinstance(shares, tuple | list) and len(shares) != len(places):
        raise ConfigError(
            f"--balance {','.join(map(str, shares))}: {len(shares)} shares for {len(places)} ranks "
            f"({', '.join(place.device for place in places)}); give one share for each rank"
        )
    cores = _cores_by_rank(places, host)
    threads = _threads_by_rank(places, host, cores)
    backend = _backend(places)
    names = tuple(_name(place, cores[rank]) for rank, place in enumerate(places))
    return tuple(
        WorkerSpec(
            rank=rank,
            local_rank=rank,
            world_size=len(places),
            workers=tuple(f"worker-{index}" for index in range(len(places))),
            device=place.device,
            devices=place.devices,
            device_names=names,
            backend=backend,
            cores=cores[rank],
            num_threads=threads[rank],
            origin="evenload",
            mode=mode,
            settings=settings,
            options=dict(options or {}),
        )
        for rank, place in enumerate(places)
    )


def own_cores(workers: Sequence[WorkerSpec], host: Host) -> tuple[float, ...]:
    """How many cores' time each rank has to itself; a fraction where ranks share cores."""
    num_unbound = sum(1 for worker in workers if not worker.cores)
    left = host.num_cores - sum(len(worker.cores) for worker in workers)
    return tuple(float(len(worker.cores)) if worker.cores else left / num_unbound for worker in workers)


def describe_workers(workers: Sequence[WorkerSpec]) -> list[str]:
    """One line for each worker: its devices, cores, threads and backend."""
    if workers[0].replicas:
        return _describe_replicas(workers[0])
    lines = []
    width = max(len(worker.device_names[worker.rank]) for worker in workers)
    for worker in workers:
        threads = f"{worker.num_threads} thread" + ("s" if worker.num_threads != 1 else "")
        name = worker.device_names[worker.rank]
        device = "+".join(worker.devices) or worker.device
        line = f"rank {worker.rank}: {device:<6} {name:<{width}}  {threads}, {worker.backend}"
        if worker.throttle:
            line += f", throttled to {worker.throttle['factor']:g} of its speed"
        lines.append(line)
    return lines


def _describe_replicas(worker: WorkerSpec) -> list[str]:
    """One line for each replica of a process."""
    width = max(len(place["name"]) for place in worker.replicas)
    lines = [f"one process, {len(worker.replicas)} replicas (strategy dp)"]
    for index, place in enumerate(worker.replicas):
        threads = f"{place['num_threads']} thread" + ("s" if place["num_threads"] != 1 else "")
        line = f"rank {index}: {place['device']:<6} {place['name']:<{width}}  {threads}"
        if worker.throttle:
            line += f", throttled to {worker.throttle['factors'][index]:g} of its speed"
        lines.append(line)
    return lines


def _gpu_place(gpu: ComputeDevice) -> Place:
    return Place(f"cuda:{gpu.index}", gpu.name)


def _cpu_place(host: Host) -> Place:
    return Place("cpu", host.cpu.name)


def _name(place: Place, cores: tuple[int, ...]) -> str:
    """The CPU's name with the cores of this rank in place of all."""
    if set(place.devices or (place.device,)) != {"cpu"} or not cores:
        return place.name
    runs = f"{cores[0]}-{cores[-1]}" if cores[-1] - cores[0] + 1 == len(cores) > 1 else ",".join(map(str, cores))
    name = f"CPU (core{'s' if len(cores) > 1 else ''} {runs})"
    return f"{len(place.devices)} × {name}" if place.devices else name


def _backend(places: Sequence[Place]) -> str:
    """NCCL wants one GPU of its own for each rank."""
    counts = Counter(place.device for place in places)
    one_each = all(count == 1 for count in counts.values()) and not any(place.devices for place in places)
    return "nccl" if "cpu" not in counts and one_each else "gloo"


def _cores_by_rank(places: Sequence[Place], host: Host) -> list[tuple[int, ...]]:
    bound: list[tuple[int, ...]] = [()] * len(places)
    cpu_ranks = [rank for rank, place in enumerate(places) if place.device == "cpu"]
    num_gpu_ranks = len(places) - len(cpu_ranks)
    cores = host.cores
    if host.num_cores < len(cores):
        return bound
    if len(cores) >= len(cpu_ranks) + num_gpu_ranks:
        cores = cores[num_gpu_ranks:]
    if len(cores) < len(cpu_ranks):
        return bound
    for index, rank in enumerate(cpu_ranks):
        low = index * len(cores) // len(cpu_ranks)
        high = (index + 1) * len(cores) // len(cpu_ranks)
        bound[rank] = cores[low:high]
    return bound


def _threads_by_rank(places: Sequence[Place], host: Host, cores: Sequence[tuple[int, ...]]) -> list[int]:
    num_bound = sum(len(own) for own in cores)
    num_unbound_ranks = sum(1 for own in cores if not own)
    left = max(0.0, host.num_cores - num_bound)
    even = max(1, math.floor(left / num_unbound_ranks)) if num_unbound_ranks else 1
    return [len(own) if own else even for own in cores]
