"""Is there memory for a run, and is the machine short of it already?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evenload import hardware
from evenload.doctor import files
from evenload.doctor.finding import Finding, Options, Status

MEMORY, PRESSURE = "memory", "memory pressure"
GIB = 2**30
STOPS_BYTES, SLOWS_BYTES = GIB // 2, 2 * GIB
"""Free, for each rank: torch alone takes about 0.5 GiB, with loader workers and a model soon 2."""
SWAPPED_FRACTION = 0.1
"""Of the memory; what lies in swap comes back at the speed of a disk."""
PRESSED_PERCENT = 5.0
"""Of the last minute that some process stood still for want of memory (the kernel's PSI)."""
BIGGEST = "ps -eo pid,user,rss,args --sort=-rss | head   # then end what is not needed"


@dataclass(frozen=True)
class Room:
    """What is free of the machine's memory, and of that of the control group, whichever is less."""

    free_bytes: int
    total_bytes: int
    group: str = ""
    """The folder of the control group that is the tighter limit; empty where the machine is."""
    num_killed: int = 0
    """Processes of the group that the kernel has ended for want of memory."""


def memory(options: Options) -> Finding:
    """Reads /proc/meminfo and the control groups."""
    num_gpus = len(list((options.root_path / "dev").glob("nvidia[0-9]*")))
    return judge_memory(read_room(options.root_path), num_ranks=max(2, num_gpus))


def judge_memory(room: Room | None, *, num_ranks: int) -> Finding:
    """What the free memory means for so many ranks."""
    if room is None:
        return Finding(MEMORY, "skip", "the system doesn't tell how much memory is free")
    of = "the control group's" if room.group else "the machine's"
    found = f"{room.free_bytes / GIB:.1f} GiB free of {of} {room.total_bytes / GIB:.1f} GiB"
    expected = f"{SLOWS_BYTES / GIB:g} GiB for each of {num_ranks} ranks"
    larger = f"echo max | sudo tee {room.group}/memory.max   # in a container: docker update --memory 64g NAME"
    if room.free_bytes < num_ranks * SLOWS_BYTES:
        status: Status = "fail" if room.free_bytes < num_ranks * STOPS_BYTES else "warn"
        return Finding(MEMORY, status, found, expected, larger if room.group else BIGGEST)
    if room.num_killed:
        found += f"; {room.num_killed} processes of this group were ended for want of it (the OOM killer)"
        return Finding(MEMORY, "warn", found, expected, larger if room.group else BIGGEST)
    return Finding(MEMORY, "ok", found, expected)


def read_room(root: Path) -> Room | None:
    """The tightest of the machine and the control groups; None where the system doesn't tell."""
    machine = files.table(root / "proc/meminfo")
    if "MemAvailable" not in machine:
        return None
    total_bytes = machine.get("MemTotal", 0) * 1024
    tightest = Room(machine["MemAvailable"] * 1024, total_bytes)
    num_killed = 0
    for folder in hardware.cgroup_folders("memory", root):
        num_killed = max(
            num_killed,
            files.table(folder / "memory.events").get("oom_kill", 0),
            files.table(folder / "memory.oom_control").get("oom_kill", 0),
        )
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = files.number(folder / limit_name), files.number(folder / used_name)
            if limit is None or used is None or limit >= total_bytes:
                continue
            free = limit - used + files.table(folder / "memory.stat").get(cache_name, 0)
            if free < tightest.free_bytes:
                tightest = Room(max(0, free), limit, str(folder))
    return Room(tightest.free_bytes, tightest.total_bytes, tightest.group, num_killed)


def pressure(options: Options) -> Finding:
    """Reads what lies in swap, and how long processes stood still for want of memory."""
    root = options.root_path
    return judge_pressure(files.table(root / "proc/meminfo"), read_pressed(root))


def judge_pressure(machine: Mapping[str, int], pressed_percent: float | None) -> Finding:
    """What swap and stalls mean.

    Args:
        machine: /proc/meminfo, in KiB.
        pressed_percent: ``some avg60`` of /proc/pressure/memory; None where the kernel doesn't tell.
    """
    total, free, memory_kib = (machine.get(key, 0) for key in ("SwapTotal", "SwapFree", "MemTotal"))
    swapped = (total - free) / memory_kib if memory_kib else 0.0
    expected = f"less than {SWAPPED_FRACTION:.0%} of the memory in swap, nobody standing still for want of it"
    if pressed_percent is not None and pressed_percent > PRESSED_PERCENT:
        found = f"for {pressed_percent:.0f} % of the last minute some process stood still for want of memory"
        return Finding(PRESSURE, "warn", found, expected, BIGGEST)
    if swapped > SWAPPED_FRACTION:
        found = f"{(total - free) / 2**20:.1f} GiB lie in swap, as much as {swapped:.0%} of the memory"
        mend = "sudo swapoff -a && sudo swapon -a   # brings it back, where there is room now"
        return Finding(PRESSURE, "warn", found, expected, mend)
    told = "" if pressed_percent is None else f", {pressed_percent:.0f} % of the last minute lost"
    return Finding(PRESSURE, "ok", f"{(total - free) / 2**20:.1f} GiB in swap{told}")


def read_pressed(root: Path) -> float | None:
    """Percent of the last minute in which some process waited for memory."""
    for line in files.text(root / "proc/pressure/memory").splitlines():
        words = line.split()
        if words and words[0] == "some":
            return float(next(word.partition("=")[2] for word in words if word.startswith("avg60=")))
    return None
