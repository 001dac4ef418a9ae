"""Devices, cores and threads of the workers of a launch; pure planning."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenload.balance.values import ComputeDevice
from evenload.errors import ConfigError
from evenload.rendezvous.rank_backends import common_backend, used_backends
from evenload.training.launch.environment import WorkerSpec

_MOST_PER_CORE = 64
"""CPU ranks on a core; one takes about 200 MB of memory."""
_EXPECTED = (
    "expected auto, all, cpu, cpu:3 (three CPU ranks), GPU indices such as 0,2, a mix such as 0,cpu, or 0+1 (one rank with two "
    "devices, over which evenload.place cuts a model)"
)


@dataclass(frozen=True)
class HostDevices:
    """GPUs, cores and CPU quota of one machine."""

    gpus: tuple[ComputeDevice, ...]
    cpu: ComputeDevice
    cores: tuple[int, ...]
    """Those that this process may use."""
    quota_cores: float | None = None
    """CPU quota of this process in cores; None: unlimited."""
    problems: tuple[str, ...] = ()
    """Problems of GPUs that are left out, or of the search for them."""

    @property
    def num_cores(self) -> float:
        """Usable CPU time in cores; a fraction under a quota."""
        return float(len(self.cores)) if self.quota_cores is None else min(self.quota_cores, float(len(self.cores)))

    def describe(self) -> str:
        gpus = "no GPU" if not self.gpus else ", ".join(f"{gpu.index} ({gpu.name})" for gpu in self.gpus)
        return f"{gpus}; cpu ({len(self.cores)} cores)"


@dataclass(frozen=True)
class RankDevice:
    """Device, or several, of one rank."""

    device: str
    """``cuda:N`` or ``cpu``."""
    name: str
    devices: tuple[str, ...] = ()
    """All devices of a rank with several, `device` first; otherwise empty."""
    uuids: tuple[str, ...] = ()
    """`ComputeDevice.uuid` of each device, where a GPU has one."""
    is_part: bool = False
    """A part of a GPU (MIG)."""


def read_host() -> HostDevices:
    from evenload import hardware

    gpus, problems = hardware.find_gpus()
    return HostDevices(gpus, hardware.cpu(), tuple(hardware.usable_cores()), hardware.cpu_quota(), problems)


def parse_devices(text: str, host: HostDevices) -> tuple[RankDevice, ...]:
    """Return the device of each rank that ``-d`` names; ConfigError for an unknown one.

    ``auto`` means every GPU, or one CPU rank with all cores where there is none; ``all`` means every GPU and one CPU rank.
    A GPU named twice has two ranks; ``0+1`` is one rank with two devices.
    """
    gpus = tuple(_gpu_device(gpu) for gpu in host.gpus)
    if text == "auto":
        return gpus or (_cpu_device(host),)
    if text == "all":
        return (*gpus, _cpu_device(host))
    rank_devices: list[RankDevice] = []
    for item in text.split(","):
        if "+" in item:
            rank_devices.append(_group([_parse_item(text, part, host) for part in item.split("+")], text, item))
        else:
            rank_devices += _parse_item(text, item, host)
    return tuple(rank_devices)


def _parse_item(text: str, item: str, host: HostDevices) -> list[RankDevice]:
    kind, _, number = item.strip().partition(":")
    if kind == "cpu" and (not number or number.isdecimal()):
        count = int(number or 1)
        if count < 1:
            raise ConfigError(f"-d {text}: {item} has no ranks; {_EXPECTED}")
        if count > (most := _MOST_PER_CORE * len(host.cores)):
            raise ConfigError(
                f"-d {text}: {count} ranks are more than the {most} that fit; here are: {host.describe()}"
            )
        return [_cpu_device(host)] * count
    if (kind.isdecimal() and not number) or (kind in ("cuda", "gpu") and number.isdecimal()):
        index = int(number or kind)
        for gpu in host.gpus:
            if gpu.index == index:
                return [_gpu_device(gpu)]
        raise ConfigError(
            f"-d {text}: "
            + "; ".join([f"there is no GPU {index} here", *host.problems, f"here are: {host.describe()}"])
            + f" (-d names devices; {f'{index} ranks on the CPU are cpu:{index}' if index > 1 else 'the CPU is cpu'})"
        )
    if kind in ("cuda", "gpu"):
        raise ConfigError(
            f"-d {text}: leave -d out for all GPUs, or name some of them: -d 0,1; here are: {host.describe()}"
        )
    raise ConfigError(f"-d {text}: {item!r} is not a device; {_EXPECTED}; here are: {host.describe()}")


def _group(parts: list[list[RankDevice]], text: str, item: str) -> RankDevice:
    # Batches of a rank with several devices are moved to the first.
    for part in parts:
        if len(part) > 1:
            raise ConfigError(
                f"-d {text}: {item} is one rank with several devices, each of which must be named; write cpu+cpu in place of "
                "cpu:2"
            )
    devices = [part[0] for part in parts]
    if len(devices) > 1 and any(rank_device.is_part for rank_device in devices):
        raise ConfigError(
            f"-d {text}: {item} is one rank with several devices, but CUDA shows a process only one part of a GPU (MIG); write "
            f"{item.replace('+', ',')} for one rank each"
        )
    names = Counter(rank_device.name for rank_device in devices)
    return RankDevice(
        devices[0].device,
        " + ".join(f"{count} × {name}" if count > 1 else name for name, count in names.items()),
        tuple(rank_device.device for rank_device in devices),
        tuple(uuid for rank_device in devices for uuid in rank_device.uuids),
    )


def plan_workers(
    rank_devices: Sequence[RankDevice],
    host: HostDevices,
    settings: Mapping[str, Any] | None = None,
    mode: str = "train",
    options: Mapping[str, Any] | None = None,
) -> tuple[WorkerSpec, ...]:
    """Return the workers of a launch on one host, by rank; store, folder and throttle are still empty.

    CPU ranks are bound to separate cores if there are enough. GPU ranks are not bound; half of the cores are left to them, up to
    four for each, and at least two where each CPU rank still gets one.
    Under a CPU quota no rank is bound, because a quota is not tied to cores. ConfigError: ``settings`` fix the shares of
    another number of ranks.
    """
    settings = dict(settings or {})
    shares = settings.get("balance")
    if isinstance(shares, tuple | list) and len(shares) != len(rank_devices):
        raise ConfigError(
            f"--balance {','.join(map(str, shares))}: {len(shares)} shares for {len(rank_devices)} ranks "
            f"({', '.join(rank_device.device for rank_device in rank_devices)}); give one share for each rank"
        )
    cores = _cores_by_rank(rank_devices, host)
    threads = _threads_by_rank(rank_devices, host, cores)
    inner = _inner_backends(rank_devices)
    own = [own_numbers(rank_device) for rank_device in rank_devices]
    names = tuple(_name(rank_device, cores[rank]) for rank, rank_device in enumerate(rank_devices))
    return tuple(
        WorkerSpec(
            rank=rank,
            local_rank=rank,
            world_size=len(rank_devices),
            workers=tuple(f"worker-{index}" for index in range(len(rank_devices))),
            device=own[rank][0],
            devices=own[rank][1],
            visible_devices=",".join(dict.fromkeys(rank_device.uuids)),
            device_names=names,
            backend=common_backend(inner),
            inner_backend=inner[rank],
            cores=cores[rank],
            num_threads=threads[rank],
            origin="evenload",
            mode=mode,
            settings=settings,
            options=dict(options or {}),
        )
        for rank, rank_device in enumerate(rank_devices)
    )


def own_numbers(rank_device: RankDevice) -> tuple[str, tuple[str, ...]]:
    """Return `device` and `devices` as a process counts them that sees only the GPUs of this rank, if they have UUIDs."""
    if not rank_device.uuids:
        return rank_device.device, rank_device.devices
    seen = list(dict.fromkeys(device for device in rank_device.devices or (rank_device.device,) if device != "cpu"))
    numbers = {"cpu": "cpu", **{device: f"cuda:{index}" for index, device in enumerate(seen)}}
    return numbers[rank_device.device], tuple(numbers[device] for device in rank_device.devices)


def own_cores(workers: Sequence[WorkerSpec], host: HostDevices) -> tuple[float, ...]:
    """Return the cores of each rank; a fraction where ranks share cores."""
    if workers[0].has_server and workers[0].rank == 0:
        return (1.0, *own_cores(workers[1:], host))  # it computes little, and is not throttled
    num_unbound = sum(1 for worker in workers if not worker.cores)
    left = host.num_cores - sum(len(worker.cores) for worker in workers)
    return tuple(float(len(worker.cores)) if worker.cores else left / num_unbound for worker in workers)


def describe_workers(workers: Sequence[WorkerSpec]) -> list[str]:
    """Describe each rank, or each replica of one process, in one line: devices, cores, threads and backend."""
    first = workers[0]
    if first.replicas:
        factors = first.throttle.get("factors", [None] * len(first.replicas))
        lines = [f"one process, {len(first.replicas)} replicas (strategy dp)"]
        rows = [
            (index, replica["device"], replica["name"], replica["num_threads"], "", factor)
            for index, (replica, factor) in enumerate(zip(first.replicas, factors, strict=True))
        ]
    else:
        lines = []
        used = used_backends([worker.inner_backend for worker in workers])
        rows = [
            (w.rank, "+".join(w.devices) or w.device, w.device_names[w.rank], w.num_threads, f", {backend}",
             w.throttle.get("factor"))
            for w, backend in zip(workers, used, strict=True)
        ]  # fmt: skip
    width = max(len(name) for _, _, name, *_ in rows)
    for rank, device, name, num_threads, backend, factor in rows:
        threads = f"{num_threads} thread" + ("s" if num_threads != 1 else "")
        throttle = "" if factor in (None, 1.0) else f", throttled to {factor:g} of its speed"
        lines.append(f"rank {rank}: {device:<6} {name:<{width}}  {threads}{backend}{throttle}")
    return lines


def _gpu_device(gpu: ComputeDevice) -> RankDevice:
    return RankDevice(f"cuda:{gpu.index}", gpu.name, uuids=(gpu.uuid,) if gpu.uuid else (), is_part=gpu.is_part)


def _cpu_device(host: HostDevices) -> RankDevice:
    return RankDevice("cpu", host.cpu.name)


def _name(rank_device: RankDevice, cores: tuple[int, ...]) -> str:
    """Return the name; of the CPU, with the cores of this rank."""
    if set(rank_device.devices or (rank_device.device,)) != {"cpu"} or not cores:
        return rank_device.name
    runs = f"{cores[0]}-{cores[-1]}" if cores[-1] - cores[0] + 1 == len(cores) > 1 else ",".join(map(str, cores))
    name = f"CPU (core{'s' if len(cores) > 1 else ''} {runs})"
    return f"{len(rank_device.devices)} × {name}" if rank_device.devices else name


def _inner_backends(rank_devices: Sequence[RankDevice]) -> list[str]:
    # NCCL requires a separate GPU for each rank, and takes two parts of a GPU for one.
    counts = Counter(device for rank_device in rank_devices for device in rank_device.devices or (rank_device.device,))
    return [
        ""
        if rank_device.device == "cpu" or counts[rank_device.device] > 1 or rank_device.devices or rank_device.is_part
        else "nccl"
        for rank_device in rank_devices
    ]


def _cores_by_rank(rank_devices: Sequence[RankDevice], host: HostDevices) -> list[tuple[int, ...]]:
    bound: list[tuple[int, ...]] = [()] * len(rank_devices)
    cpu_ranks = [rank for rank, rank_device in enumerate(rank_devices) if rank_device.device == "cpu"]
    num_gpu_ranks = len(rank_devices) - len(cpu_ranks)
    cores = host.cores
    if host.num_cores < len(cores):
        return bound
    if len(cores) >= len(cpu_ranks) + num_gpu_ranks:
        cores = cores[num_gpu_ranks * _cores_per_gpu_rank(len(cores), num_gpu_ranks, len(cpu_ranks)) :]
    if len(cores) < len(cpu_ranks):
        return bound
    for index, rank in enumerate(cpu_ranks):
        low = index * len(cores) // len(cpu_ranks)
        high = (index + 1) * len(cores) // len(cpu_ranks)
        bound[rank] = cores[low:high]
    return bound


def _cores_per_gpu_rank(num_cores: int, num_gpu_ranks: int, num_cpu_ranks: int) -> int:
    # A GPU idles while Python, autograd's thread or a loader worker waits for a core, and it is the faster device.
    if not num_gpu_ranks:
        return 0
    wanted = max(2, min(4, num_cores // 2 // num_gpu_ranks))
    return min(wanted, (num_cores - num_cpu_ranks) // num_gpu_ranks)


def _threads_by_rank(
    rank_devices: Sequence[RankDevice], host: HostDevices, cores: Sequence[tuple[int, ...]]
) -> list[int]:
    num_bound = sum(len(own) for own in cores)
    num_unbound_ranks = sum(1 for own in cores if not own)
    left = max(0.0, host.num_cores - num_bound)
    even = max(1, math.floor(left / num_unbound_ranks)) if num_unbound_ranks else 1
    return [len(own) if own else even for own in cores]
