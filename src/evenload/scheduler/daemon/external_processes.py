"""Use of devices from outside the queue: external processes, and memory that no known process holds.

`closed_reason` is pure. `GpuMonitor` scans through NVML in a thread of its own, because a driver that hangs must not hang the
queue. Each scan has a time, so that a caller can require one that began after a certain moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenload.job.processes import ProcessStat, all_stats, ancestors
from evenload.visible_gpus import VisibleGpu, query_gpus

_ALONG_THE_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    pid: int
    user: str
    command: str
    """Empty where it can't be read (another container)."""
    used_bytes: int | None
    """None where the driver doesn't report it."""
    is_own: bool = False
    """It belongs to a job of this queue."""
    runner: int = 0
    """Process id of that job's runner."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The use of one device in one scan."""

    holders: tuple[DeviceProcess, ...] = ()
    used_bytes: int = 0
    utilisation: float | None = None
    """Part of the last moments in which it computed; None where the driver doesn't report it (parts of a GPU)."""
    problem: str = ""
    """Reason why the scan failed; empty if it didn't."""

    @property
    def external(self) -> tuple[DeviceProcess, ...]:
        return tuple(holder for holder in self.holders if not holder.is_own)

    def ghost_bytes(self, allowed_bytes: int) -> int:
        """Return memory that no known process holds, above what the driver may keep for itself."""
        if any(holder.used_bytes is None for holder in self.holders):
            return 0
        left = self.used_bytes - sum(holder.used_bytes or 0 for holder in self.holders)
        return left if left > allowed_bytes else 0


@dataclass(frozen=True, slots=True)
class GpuScan:
    began_s: float
    """By the monotonic clock; a process that started later may be missing."""
    held: Mapping[str, DeviceUse] = field(default_factory=dict)


def closed_reason(held: DeviceUse | None, allowed_bytes: int) -> str:
    """Return why nothing may start on a device without a job of this queue; empty where it is free."""
    if held is None:
        return "NVML doesn't list it any more"
    if held.problem:
        return held.problem
    if held.holders:
        others = f" and {len(held.holders) - 1} more" if len(held.holders) > 1 else ""
        return f"held by {describe(held.holders[0])}{others}, outside the queue"
    if ghost_bytes := held.ghost_bytes(allowed_bytes):
        return f"{ghost_bytes / 2**30:.1f} GiB of its memory are in use, but no process is known to hold them"
    return ""


def join_refusal(held: DeviceUse | None, allowed_bytes: int, runners: Iterable[int]) -> str:
    """Return why a job can't join the jobs that share a device, whose runners are given; empty where it can."""
    if held is None or held.problem:
        return closed_reason(held, allowed_bytes)
    ours = frozenset(runners)
    for holder in held.holders:  # one that can't be read may well be theirs
        if holder.command and holder.runner not in ours:
            return f"held by {describe(holder)}, outside the jobs that share it"
    return closed_reason(DeviceUse((), held.ghost_bytes(allowed_bytes)), 0)


def describe(holder: DeviceProcess) -> str:
    if not holder.command:
        return f"process {holder.pid}, which can't be read from here"
    return f"process {holder.pid} of {holder.user} ({holder.command[:60]})"


class GpuMonitor(threading.Thread):
    """A thread that scans the GPUs periodically and on request."""

    def __init__(self, every_s: float, on_scan: Callable[[], None]) -> None:
        """Scan every `every_s` seconds; `on_scan` is called from this thread after each scan."""
        super().__init__(name="evenload-gpu-monitor", daemon=True)
        self._on_scan = on_scan
        self.last: GpuScan | None = None
        self.runners: tuple[int, ...] = ()
        """Process ids of runners: their descendants are the queue's own."""
        self._every_s = every_s
        self._is_requested = threading.Event()
        self._is_over = False

    def scan_soon(self) -> None:
        """Request a scan that begins after this call."""
        self._is_requested.set()

    def run(self) -> None:
        while not self._is_over:
            try:
                with query_gpus(_ALONG_THE_BUS) as found:
                    self._scan_repeatedly(found.nvml, found.gpus)
            except Exception as error:  # whatever a driver's library raises: the queue goes on and reports it
                self._publish(GpuScan(time.monotonic(), _UnknownUse(f"NVML can't be queried: {error}")))
                self._wait()

    def _scan_repeatedly(self, nvml: Any, gpus: Sequence[VisibleGpu]) -> None:
        """Scan while the devices stay the same; initialising NVML for each scan would cost a second."""
        if nvml is None:
            self._publish(GpuScan(time.monotonic(), _UnknownUse("NVML can't be queried any more")))
            self._wait()
            return
        count = nvml.nvmlDeviceGetCount()
        while not self._is_over and nvml.nvmlDeviceGetCount() == count:
            self._is_requested.clear()
            began_s = time.monotonic()
            self._publish(GpuScan(began_s, scan_devices(nvml, gpus, self.runners)))
            self._wait()

    def _publish(self, scan: GpuScan) -> None:
        self.last = scan
        self._on_scan()

    def _wait(self) -> None:
        self._is_requested.wait(self._every_s)

    def close(self) -> None:
        self._is_over = True
        self._is_requested.set()


class _UnknownUse(dict[str, DeviceUse]):
    """The use of every device after a failed scan."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self._held = DeviceUse(problem=problem)

    def get(self, key: str, default: Any = None) -> Any:
        return self._held


def scan_devices(nvml: Any, gpus: Iterable[VisibleGpu], runners: Iterable[int]) -> dict[str, DeviceUse]:
    """Scan the devices and return their use by UUID."""
    found = {}
    stats: dict[int, ProcessStat] | None = None
    ours = frozenset(runners)
    for gpu in gpus:
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
            used_bytes = _used_bytes(nvml, gpu.handle)
        except nvml.NVMLError as error:
            found[gpu.uuid] = DeviceUse(problem=f"NVML doesn't report its processes: {error}")
            continue
        if processes and stats is None:
            stats = all_stats()
        holders = tuple(_holder(process, runner_of(int(process.pid), ours, stats or {})) for process in processes)
        found[gpu.uuid] = DeviceUse(holders, used_bytes, _utilisation(nvml, gpu.handle))
    return found


def runner_of(pid: int, runners: frozenset[int], stats: dict[int, ProcessStat]) -> int:
    """Return which of the runners a process descends from; 0 for none."""
    return next((parent for parent in ancestors(pid, stats) if parent in runners), 0)


def _used_bytes(nvml: Any, handle: Any) -> int:
    """Return the memory in use, without the driver's own where NVML reports it separately."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)
    except (nvml.NVMLError, AttributeError, TypeError):
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)


def _utilisation(nvml: Any, handle: Any) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except (nvml.NVMLError, AttributeError):
        return None


def _holder(process: Any, runner: int) -> DeviceProcess:
    pid = int(process.pid)
    place = Path("/proc", str(pid))
    used = process.usedGpuMemory
    used_bytes = None if used is None else int(used)
    try:
        command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        user_id = place.stat().st_uid
    except OSError:
        return DeviceProcess(pid, "", "", used_bytes)
    return DeviceProcess(pid, user_name(user_id), _printable(command), used_bytes, runner > 0, runner)


def user_name(uid: int) -> str:
    """Return the name of a user, or the number where there is none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _printable(text: str) -> str:
    """Replace characters that could control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:200]
