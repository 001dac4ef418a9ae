"""Hardware of this machine: GPUs, CPU cores, quotas, memory and network interfaces; no torch.

GPUs are found by NVML (visible_gpus.py). All files are read below ``root``, so tests can provide those of another machine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from evenload.balance.values import ComputeDevice
from evenload.visible_gpus import GpuQuery, gpus_of_torch, nvml_problem, query_gpus

ROOT = Path("/")
_LOWEST_PORT = 20_000
"""Of those that `free_port` draws from; services have most of their ports below."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses memory of a GPU visible to this process."""

    gpu_index: int
    """N of ``cuda:N``."""
    pid: int
    """Process id on the host; it may not exist inside a container."""
    name: str
    """Its command line; empty if not visible."""
    user: str
    """Its user; empty if not visible."""
    used_bytes: int
    """GPU memory in use; 0 if unknown to the driver."""


@dataclass(frozen=True)
class GpuDriver:
    version: str
    cuda: tuple[int, int]
    """The newest supported CUDA version, (major, minor)."""
    capabilities: tuple[tuple[int, int], ...]
    """The compute capability of each GPU, in the order of `gpus`."""


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    """Its IPv4 and IPv6 addresses, IPv4 first."""
    is_up: bool
    is_loopback: bool


@dataclass(frozen=True)
class Mount:
    source: str
    point: str
    fs_type: str


def gpus(environ: Mapping[str, str] = os.environ) -> tuple[ComputeDevice, ...]:
    """Return the GPUs that a process may use; ``index`` is N of ``cuda:N``. Empty if there is no GPU or no NVML.

    Follows CUDA_VISIBLE_DEVICES and its order, and CUDA_DEVICE_ORDER. Parts of a GPU (MIG) are devices of their own.
    """
    with query_gpus(environ) as found:
        return _devices(found)


def find_gpus(
    environ: Mapping[str, str] = os.environ, root: Path = ROOT
) -> tuple[tuple[ComputeDevice, ...], tuple[str, ...]]:
    """Return the GPUs for a run, and in words what is wrong with others. Torch is asked where NVML can't be."""
    with query_gpus(environ) as found:
        problems = tuple(f"GPU {gpu.index} is left out: {gpu.reason}" for gpu in found.refused)
        devices = _devices(found)
    if found.nvml is not None or not (problem := nvml_problem(root, environ)):
        return devices, problems
    known = gpus_of_torch(environ)
    devices = tuple(ComputeDevice(name, "cuda", index, size) for index, (name, size) in enumerate(known.gpus))
    outcome = f"finds {len(devices)}" if devices else "finds none, so the CPU is used; `evenload doctor` explains why"
    return devices, (f"NVML can't be asked for GPUs ({problem}); {known.text} {outcome}",)


def gpu_processes(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> tuple[GpuProcess, ...]:
    """Return the processes that use memory of the GPUs of `gpus`; empty if unknown to the driver."""
    processes = []
    with query_gpus(environ) as found:
        for gpu in found.gpus:
            with suppress(found.nvml.NVMLError):
                for process in found.nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle):
                    name, user = _process_owner(process.pid, root)
                    processes.append(GpuProcess(gpu.index, process.pid, name, user, process.usedGpuMemory or 0))
    return tuple(processes)


def gpu_used_bytes(environ: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Return the memory in use on each GPU of `gpus`, also by processes outside this container, without the driver's own."""
    with query_gpus(environ) as found:
        return tuple(found.used_and_total_bytes(gpu)[0] for gpu in found.gpus)


def gpu_driver(environ: Mapping[str, str] = os.environ) -> GpuDriver | None:
    """Return None without NVML."""
    with query_gpus(environ) as found:
        if found.nvml is None:
            return None
        number = found.nvml.nvmlSystemGetCudaDriverVersion_v2()
        return GpuDriver(
            version=found.nvml.nvmlSystemGetDriverVersion(),
            cuda=(number // 1000, number % 1000 // 10),
            capabilities=tuple(found.compute_capability(gpu) for gpu in found.gpus),
        )


def _devices(found: GpuQuery) -> tuple[ComputeDevice, ...]:
    return tuple(
        ComputeDevice(
            gpu.name,
            "cuda",
            gpu.index,
            memory_bytes=found.used_and_total_bytes(gpu)[1],
            uuid=gpu.uuid if found.needs_uuids else "",
            is_part=gpu.is_part,
        )
        for gpu in found.gpus
    )


def _process_owner(pid: int, root: Path) -> tuple[str, str]:
    """Return command line and user of a process; empty if not visible."""
    folder = root / "proc" / str(pid)
    try:
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        user_id = folder.stat().st_uid
    except OSError:
        return "", ""
    try:
        import pwd

        return command, pwd.getpwuid(user_id).pw_name
    except (ImportError, KeyError):
        return command, str(user_id)


def cpu(cores: Sequence[int] | None = None, root: Path = ROOT) -> ComputeDevice:
    """Return the CPU, or those cores of it; ``memory_bytes`` is that of the machine, or the cgroup's limit if lower."""
    chosen = usable_cores() if cores is None else tuple(cores)
    return ComputeDevice(
        name=f"CPU ({'core' if len(chosen) == 1 else 'cores'} {spell_numbers(chosen)})",
        kind="cpu",
        index=-1,
        memory_bytes=_memory_bytes(root),
        num_cores=len(chosen),
    )


def cpu_model(root: Path = ROOT) -> str:
    """Return the model of the CPU, such as ``AMD EPYC 7B13``; ``CPU`` if unknown."""
    lines = (line.partition(":") for line in _read(root / "proc/cpuinfo").splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() in ("model name", "Model")), "CPU")


def usable_cores() -> tuple[int, ...]:
    """Return the cores in this process's affinity, which includes the cpuset of a container."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the smallest CPU quota of this process's cgroups, in cores; None without a limit.

    Reads ``cpu.max`` (cgroup v2) and ``cpu.cfs_quota_us`` over ``cpu.cfs_period_us`` (v1).
    """
    quotas = []
    for folder in cgroup_folders("cpu", root):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:  # "max" and -1: no limit
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory_bytes(root: Path) -> int:
    lines = _read(root / "proc/meminfo").splitlines()
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    if not sizes:
        try:
            import psutil

            sizes.append(psutil.virtual_memory().total)
        except ImportError:
            return 0
    for folder in cgroup_folders("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read(folder / name).strip()
            if limit.isdigit():
                sizes.append(int(limit))
    return min(sizes)


def cgroup_folders(controller: str, root: Path) -> list[Path]:
    """Return the folders that limit this process by ``controller``, from its own cgroup up to the mount, for v1 and v2."""
    folders = []
    for own, mount_point, _ in own_cgroups(controller, root):
        folders += [own, *(parent for parent in own.parents if parent.is_relative_to(mount_point))]
    return list(dict.fromkeys(folders))


def own_cgroups(controller: str, root: Path = ROOT) -> list[tuple[Path, Path, int]]:
    """Return the folder, the mount point and the version of each cgroup of this process that may have ``controller``.

    In a container the path in ``/proc/self/cgroup`` may be the host's, of which only a part is mounted. A path outside the
    mounted part then stands for the mount itself. (`mounts` does not know the mounted part.)
    """
    found = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind_and_options = before.split(), after.split()
        if len(fields) < 5 or len(kind_and_options) < 3 or kind_and_options[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if kind_and_options[0] == "cgroup2" else 1
        if version == 1 and controller not in kind_and_options[2].split(","):
            continue
        mounted, mount_point = fields[3], root / fields[4].replace("\\040", " ").lstrip("/")
        own = PurePosixPath(_own_cgroup("" if version == 2 else controller, root))
        below = own.relative_to(mounted) if own.is_relative_to(mounted) and ".." not in own.parts else PurePosixPath()
        found.append((mount_point / below, mount_point, version))
    return found


def _own_cgroup(controller: str, root: Path) -> str:
    """Return this process's path in the hierarchy of ``controller`` (v1), or in the unified one (v2, empty)."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path
    return "/"


def spell_numbers(numbers: Sequence[int]) -> str:
    """Format numbers of cores or nodes as the kernel does: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def interfaces() -> tuple[Interface, ...]:
    import psutil

    found = []
    states = psutil.net_if_stats()
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        ip4 = [address.address for address in addresses if address.family == socket.AF_INET]
        ip6 = [address.address.partition("%")[0] for address in addresses if address.family == socket.AF_INET6]
        is_loopback = any(address.startswith("127.") or address == "::1" for address in (*ip4, *ip6))
        is_up = name in states and states[name].isup
        found.append(Interface(name, (*ip4, *ip6), is_up, is_loopback))
    return tuple(found)


def mounts() -> tuple[Mount, ...]:
    """Return the mounted file systems in the order of mounting; empty if they can't be read."""
    try:
        import psutil

        return tuple(Mount(p.device, p.mountpoint, p.fstype) for p in psutil.disk_partitions(all=True))
    except (ImportError, OSError):
        return ()


def mount_of(path: Path) -> Mount | None:
    """Return the mount that holds a path, whose links are resolved; None if unknown."""
    resolved = path.resolve()
    above = [mount for mount in mounts() if mount.point and resolved.is_relative_to(mount.point)]
    # Of two mounts at one point the later covers the earlier.
    return max(reversed(above), key=lambda mount: len(mount.point), default=None)


MAX_TEMPORARY_PATH = 75
"""Bytes: ``/pymp-abcdefgh/listener-abcdefgh`` follows in the names of sockets, for which the system allows 107."""


def temporary_path_problem(folder: str) -> str:
    """Return why processes can't exchange tensors through sockets in a folder for temporary files; empty if they can."""
    num_bytes = len(os.fsencode(folder))
    if num_bytes <= MAX_TEMPORARY_PATH:
        return ""
    return (
        f"the path of {folder} has {num_bytes} characters, at most {MAX_TEMPORARY_PATH} leave room for the sockets of loader "
        "workers; a shorter one: export TMPDIR=/tmp"
    )


def free_port(host: str = "") -> int:
    """Return a free port that no outgoing connection takes before it is used: below the range of ephemeral ports."""
    try:
        lowest_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        lowest_ephemeral = 0
    below = range(_LOWEST_PORT, lowest_ephemeral)
    drawn = [below[int.from_bytes(os.urandom(4)) % len(below)] for _ in range(20)] if below else []
    for port in (*drawn, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise OSError(f"no port of {host or 'this machine'} is free")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
