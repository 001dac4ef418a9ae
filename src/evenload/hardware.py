"""What is here: GPUs, CPU cores, quotas, memory, networks. Read, never assumed; no torch.

GPUs are asked through NVML (`nvidia-ml-py`), which makes no CUDA context and holds no memory. Where it or the driver is
missing there are no GPUs, and `nvml_problem` tells why. All files are read below ``root``, so that a test can stand in
another machine's files.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from evenload.balance.values import ComputeDevice

ROOT = Path("/")


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a GPU this process may use."""

    gpu_index: int
    """The N of ``cuda:N`` here."""
    pid: int
    """Its id on the host; inside a container there may be no such process."""
    name: str
    """Its command, or an empty text where it can't be seen."""
    user: str
    """Who runs it, or an empty text where it can't be seen."""
    used_bytes: int
    """Memory it holds; 0 where the driver doesn't tell."""


@dataclass(frozen=True)
class GpuDriver:
    """The installed driver, and what the GPUs here can run."""

    version: str
    """Such as ``550.54.15``."""
    cuda: tuple[int, int]
    """The newest CUDA version it runs, (major, minor)."""
    capabilities: tuple[tuple[int, int], ...]
    """The compute capability of each GPU, in the order of `gpus`."""


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    addresses: tuple[str, ...]
    """Its IPv4 and IPv6 addresses, IPv4 first."""
    is_up: bool
    is_loopback: bool


# GPUs


def gpus(environ: Mapping[str, str] = os.environ) -> tuple[ComputeDevice, ...]:
    """The GPUs a process may use, ``index`` being the N of its ``cuda:N``.

    Honours CUDA_VISIBLE_DEVICES and its order, and CUDA_DEVICE_ORDER; empty where there is none or NVML can't be asked.
    """
    with _nvml() as nvml:
        if nvml is None:
            return ()
        return tuple(
            ComputeDevice(nvml.nvmlDeviceGetName(handle), "cuda", index, memory_bytes=_memory(nvml, handle)[1])
            for index, handle in enumerate(_visible_handles(nvml, environ))
        )


def gpu_processes(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> tuple[GpuProcess, ...]:
    """Who holds memory on the GPUs of `gpus`; empty where the driver doesn't tell."""
    found = []
    with _nvml() as nvml:
        if nvml is None:
            return ()
        for index, handle in enumerate(_visible_handles(nvml, environ)):
            with suppress(nvml.NVMLError):
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    name, user = _process_owner(process.pid, root)
                    found.append(GpuProcess(index, process.pid, name, user, process.usedGpuMemory or 0))
    return tuple(found)


def gpu_used_bytes(environ: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Memory held on each GPU of `gpus`, by processes that can't be seen from a container too; not the driver's own."""
    with _nvml() as nvml:
        return tuple(_memory(nvml, handle)[0] for handle in _visible_handles(nvml, environ)) if nvml else ()


def gpu_driver(environ: Mapping[str, str] = os.environ) -> GpuDriver | None:
    """The installed NVIDIA driver; None where NVML can't be asked."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return GpuDriver(
            version=nvml.nvmlSystemGetDriverVersion(),
            cuda=(number // 1000, number % 1000 // 10),
            capabilities=tuple(
                tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in _visible_handles(nvml, environ)
            ),
        )


@contextmanager
def asked_gpus(environ: Mapping[str, str] = os.environ) -> Iterator[tuple[Any, list[Any]]]:
    """NVML and its handles of `gpus`, for questions that are asked in one place alone; (None, []) where it can't be asked."""
    with _nvml() as nvml:
        yield nvml, _visible_handles(nvml, environ) if nvml is not None else []


def nvml_problem(root: Path = ROOT) -> str:
    """Why NVIDIA hardware that is plainly here can't be asked; an empty text where all is well or nothing is here."""
    if not any((root / "dev").glob("nvidia[0-9]*")) and not (root / "proc/driver/nvidia/version").exists():
        return ""
    nvml, problem = _begin_nvml()
    if nvml is not None:
        nvml.nvmlShutdown()
    return problem


def _begin_nvml() -> tuple[Any, str]:
    """The initialised module `pynvml`, or None and why there is none."""
    try:
        import pynvml
    except ImportError:
        return None, "the package nvidia-ml-py is missing"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, str(error)
    return pynvml, ""


@contextmanager
def _nvml() -> Iterator[Any]:
    """The initialised module `pynvml`, or None where it or the driver is missing."""
    nvml, _ = _begin_nvml()
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def _visible_handles(nvml: Any, environ: Mapping[str, str]) -> list[Any]:
    """NVML's handles in CUDA's order.

    CUDA_VISIBLE_DEVICES lists indices, or beginnings of UUIDs; an entry that names nothing ends the list, and a device
    named twice leaves none, as the driver has it.
    """
    handles = _ordered_handles(nvml, environ)
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return handles
    by_uuid = {nvml.nvmlDeviceGetUUID(handle): handle for handle in handles}
    visible: list[Any] = []
    named: list[str] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if entry.isdigit() and int(entry) < len(handles):
            uuid = list(by_uuid)[int(entry)]
            visible.append(by_uuid[uuid])
        elif entry.startswith("GPU-") and sum(uuid.startswith(entry) for uuid in by_uuid) == 1:
            uuid = next(uuid for uuid in by_uuid if uuid.startswith(entry))
            visible.append(by_uuid[uuid])
        elif entry.startswith("MIG-"):
            try:
                visible.append(nvml.nvmlDeviceGetHandleByUUID(entry))
            except nvml.NVMLError:
                break
            uuid = entry
        else:
            break
        if uuid in named:
            return []
        named.append(uuid)
    return visible


def _ordered_handles(nvml: Any, environ: Mapping[str, str]) -> list[Any]:
    """All handles in the order CUDA counts them.

    NVML counts along the PCI bus. CUDA does so with CUDA_DEVICE_ORDER=PCI_BUS_ID; by default it puts the fastest first
    by a rule of its own, so where GPUs are unlike the driver is asked. Without its answer the order stays the bus's.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return handles
    if len({nvml.nvmlDeviceGetName(handle) for handle in handles}) < 2:
        return handles
    order = _cuda_uuids(environ)
    by_uuid = {nvml.nvmlDeviceGetUUID(handle): handle for handle in handles}
    return [by_uuid[uuid] for uuid in order] if set(order) == set(by_uuid) else handles


_ASK_DRIVER = """
import ctypes, uuid
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
count = ctypes.c_int()
assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for index in range(count.value):
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0
    assert cuda.cuDeviceGetUuid(ctypes.byref(raw), device) == 0
    print("GPU-" + str(uuid.UUID(bytes=bytes(raw))))
"""


def _cuda_uuids(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The UUIDs of all GPUs in CUDA's own order; empty where the driver doesn't answer."""
    asked = {key: value for key, value in environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    try:
        return _ask_driver(_ASK_DRIVER, tuple(sorted(asked.items())))
    except (OSError, subprocess.SubprocessError):
        return ()


@cache
def _ask_driver(program: str, environ: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """What a child that begins CUDA prints: a process that has begun it must not fork. Asked once, since it takes a second."""
    command = [sys.executable, "-I", "-c", program]
    done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=20, check=True)
    return tuple(done.stdout.split())


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Used and total bytes; zeros where the GPU has no memory of its own."""
    try:
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        except (nvml.NVMLError, AttributeError, TypeError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return 0, 0
    return int(memory.used), int(memory.total)


def _process_owner(pid: int, root: Path) -> tuple[str, str]:
    """The command and the user of a process; empty texts where it can't be seen."""
    place = root / "proc" / str(pid)
    try:
        command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        user_id = place.stat().st_uid
    except OSError:
        return "", ""
    try:
        import pwd

        return command, pwd.getpwuid(user_id).pw_name
    except (ImportError, KeyError):
        return command, str(user_id)


# CPU


def cpu(cores: Sequence[int] | None = None, root: Path = ROOT) -> ComputeDevice:
    """The CPU as one device.

    Args:
        cores: the cores a rank will be bound to; None for all this process may use.
        root: where the files of the machine are read.

    Returns:
        ``memory_bytes`` is that of the machine, or the cgroup's limit where it is lower.
    """
    chosen = usable_cores() if cores is None else tuple(cores)
    return ComputeDevice(
        name=f"CPU ({_spell_cores(chosen)})",
        kind="cpu",
        index=-1,
        memory_bytes=_memory_bytes(root),
        num_cores=len(chosen),
    )


def cpu_model(root: Path = ROOT) -> str:
    """What the CPU is called, such as ``AMD EPYC 7B13``; ``CPU`` where the system doesn't say."""
    lines = (line.partition(":") for line in _read(root / "proc/cpuinfo").splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() in ("model name", "Model")), "CPU")


def usable_cores() -> tuple[int, ...]:
    """The cores this process may run on, by its affinity (which holds the cpuset of a container too)."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_quota(root: Path = ROOT) -> float | None:
    """How many cores' worth of time the cgroups grant, the tightest level counting; None where they set no limit.

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
    sizes = []
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            sizes.append(int(line.split()[1]) * 1024)
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
    """The folders that limit this process by ``controller``, from its own cgroup up to the mount, for v1 and v2.

    In a container the path in ``/proc/self/cgroup`` may be the host's, of which only a part is mounted; a path that is
    not below what is mounted stands for the mount itself.
    """
    folders = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind_and_options = before.split(), after.split()
        if len(fields) < 5 or len(kind_and_options) < 3 or kind_and_options[0] not in ("cgroup", "cgroup2"):
            continue
        is_v2 = kind_and_options[0] == "cgroup2"
        if not is_v2 and controller not in kind_and_options[2].split(","):
            continue
        mounted, mount_point = fields[3], root / fields[4].replace("\\040", " ").lstrip("/")
        own = PurePosixPath(_own_cgroup("" if is_v2 else controller, root))
        below = own.relative_to(mounted) if own.is_relative_to(mounted) and ".." not in own.parts else PurePosixPath()
        folders += [mount_point / below, *(mount_point / parent for parent in below.parents)]
    return list(dict.fromkeys(folders))


def _own_cgroup(controller: str, root: Path) -> str:
    """This process's path in the hierarchy of ``controller`` (v1), or in the unified one (v2, an empty text)."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path
    return "/"


def spell_numbers(numbers: Sequence[int]) -> str:
    """As the kernel spells cores and nodes: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _spell_cores(cores: Sequence[int]) -> str:
    """``cores 0-3,8``; ``core 2``."""
    return f"{'core' if len(cores) == 1 else 'cores'} {spell_numbers(cores)}"


# Network


def interfaces() -> tuple[Interface, ...]:
    """The network interfaces, sorted by name; needs psutil."""
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


def free_port(host: str = "") -> int:
    """A TCP port nobody listens on right now; bind it soon, others may take it."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _read(path: Path) -> str:
    """The text of a file, or an empty text where there is none to read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
