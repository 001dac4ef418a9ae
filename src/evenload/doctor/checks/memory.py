"""Checks of free memory and of memory pressure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from evenload import hardware
from evenload.doctor import system_files
from evenload.doctor.finding import Finding, Options, fail, ok, skip, warn
from evenload.doctor.system_files import GIB

STOPS_BYTES, SLOWS_BYTES = GIB // 2, 2 * GIB
"""Free memory for each rank: torch alone takes about 0.5 GiB, with loader workers and a model easily 2."""
SWAPPED_FRACTION = 0.1
"""Of the memory; swapped memory is read back at the speed of a disk."""
PRESSURE_PERCENT = 5.0
"""Of the last minute in which some process was stalled for lack of memory (the kernel's PSI)."""
LARGEST = "ps -eo pid,user,rss,args --sort=-rss | head   # then end what is not needed"


@dataclass(frozen=True)
class FreeMemory:
    """Free memory of the machine or of the tightest cgroup, whichever is less."""

    free_bytes: int
    total_bytes: int
    cgroup: str = ""
    """The folder of the cgroup; empty if the machine itself has less."""
    num_killed: int = 0
    """Processes of the cgroup killed by the OOM killer."""


def memory(options: Options) -> Finding:
    num_ranks = max(2, system_files.num_gpu_files(options.root_path))
    state = _read_free(options.root_path)
    if state is None:
        return skip("the system does not report its free memory")
    owner = "the cgroup's" if state.cgroup else "the machine's"
    found = f"{state.free_bytes / GIB:.1f} GiB free of {owner} {state.total_bytes / GIB:.1f} GiB"
    expected = f"{SLOWS_BYTES / GIB:g} GiB for each of {num_ranks} ranks"
    raise_limit = f"echo max | sudo tee {state.cgroup}/memory.max   # in a container: docker update --memory 64g NAME"
    fix = raise_limit if state.cgroup else LARGEST
    if state.free_bytes < num_ranks * SLOWS_BYTES:
        return (fail if state.free_bytes < num_ranks * STOPS_BYTES else warn)(found, expected, fix)
    if state.num_killed:
        return warn(f"{found}; the OOM killer ended {state.num_killed} processes of this cgroup", expected, fix)
    return ok(found, expected)


def _read_free(root: Path) -> FreeMemory | None:
    machine = system_files.table(root / "proc/meminfo")
    if "MemAvailable" not in machine:
        return None
    total_bytes = machine.get("MemTotal", 0) * 1024
    tightest = FreeMemory(machine["MemAvailable"] * 1024, total_bytes)
    num_killed = 0
    for folder in hardware.cgroup_folders("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            num_killed = max(num_killed, system_files.table(folder / name).get("oom_kill", 0))
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = system_files.number(folder / limit_name), system_files.number(folder / used_name)
            if limit is None or used is None or limit >= total_bytes:
                continue
            free = limit - used + system_files.table(folder / "memory.stat").get(cache_name, 0)
            if free < tightest.free_bytes:
                tightest = FreeMemory(max(0, free), limit, str(folder))
    return replace(tightest, num_killed=num_killed)


def pressure(options: Options) -> Finding:
    table = system_files.table(options.root_path / "proc/meminfo")
    total, free, memory_kib = (table.get(key, 0) for key in ("SwapTotal", "SwapFree", "MemTotal"))
    fraction = (total - free) / memory_kib if memory_kib else 0.0
    swapped = f"{(total - free) / 2**20:.1f} GiB in swap"
    percent = _stalled_percent(options.root_path)
    expected = f"less than {SWAPPED_FRACTION:.0%} of the memory in swap, and no process stalled for lack of memory"
    if percent is not None and percent > PRESSURE_PERCENT:
        found = f"some process was stalled for lack of memory in {percent:.0f} % of the last minute"
        return warn(found, expected, LARGEST)
    if fraction > SWAPPED_FRACTION:
        fix = "sudo swapoff -a && sudo swapon -a   # reads it back, if there is enough memory now"
        return warn(f"{swapped}, {fraction:.0%} of the memory", expected, fix)
    return ok(swapped + ("" if percent is None else f", stalled for {percent:.0f} % of the last minute"))


def _stalled_percent(root: Path) -> float | None:
    for line in system_files.text(root / "proc/pressure/memory").splitlines():
        words = line.split()
        if words and words[0] == "some":
            return float(next(word.partition("=")[2] for word in words if word.startswith("avg60=")))
    return None
