"""The processes of one attempt: found by markers, and killed together where the kernel has control groups.

Four markers identify them: descent from the runner or the program, the program's session, a cgroup of their own where one
can be made, and the variable with the path of the attempt's terms, which they inherit. A process that clears its variables,
makes a session of its own and lets its parent die keeps none of them where there is no cgroup. Only its runner finds it then:
the kernel makes the runner the parent of such orphans.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from evenload.hardware import own_cgroups
from evenload.job.processes import ProcessStat, ancestors, descendants
from evenload.job.protocol import VARIABLE


@dataclass(frozen=True, slots=True)
class ProcessMarkers:
    """Markers of one attempt's processes; an unknown one is 0 or empty."""

    program: int = 0
    """Process id of the program, which is its session's too."""
    program_ticks: int = 0
    cgroup: str = ""
    terms: str = ""
    """Path of the attempt's terms."""


def members(markers: ProcessMarkers, stats: dict[int, ProcessStat]) -> set[int]:
    """Return the processes with one of an attempt's markers. Never this process itself, nor one of its ancestors."""
    found: set[int] = set()
    leader = stats.get(markers.program)
    is_same = leader is None or leader.start_ticks == markers.program_ticks
    if markers.program and is_same:
        found |= {
            pid
            for pid, stat in stats.items()
            if stat.session == markers.program and stat.start_ticks >= markers.program_ticks
        }
        found |= {markers.program} if leader is not None else set()
    found |= set(in_cgroup(markers.cgroup)) & stats.keys()
    if markers.terms:
        wanted = f"{VARIABLE}={markers.terms}".encode()
        found |= {pid for pid in stats if wanted in _variables(pid)}
    found |= descendants(found, stats)
    return found - {os.getpid(), *ancestors(os.getpid(), stats)}


def _variables(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


# Control groups, only those of the unified hierarchy: there a whole group is killed at once.


def cgroup_of(attempt: Path) -> Path | None:
    """Return the path of an attempt's cgroup, below this process's own; None without a unified hierarchy."""
    mount = _unified_mount()
    if mount is None:
        return None
    queue = hashlib.sha256(str(attempt.parent).encode()).hexdigest()[:8]  # several queues may be below one cgroup
    return mount / own_cgroup().lstrip("/") / f"evenload-{queue}-{attempt.name}"


def make_cgroup(attempt: Path) -> str:
    """Make the cgroup of an attempt and return its path; empty where that is not permitted."""
    folder = cgroup_of(attempt)
    if folder is None:
        return ""
    try:
        folder.mkdir(exist_ok=True)
        return str(folder) if os.access(folder / "cgroup.procs", os.W_OK) else ""
    except OSError:
        return ""


def join_cgroup(cgroup: str, pid: int) -> bool:
    """Move a process into a cgroup; return False where the kernel refuses."""
    try:
        Path(cgroup, "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True


def in_cgroup(cgroup: str) -> list[int]:
    if not cgroup:
        return []
    try:
        return [int(line) for line in Path(cgroup, "cgroup.procs").read_text().split()]
    except (OSError, ValueError):
        return []


def kill_cgroup(cgroup: str) -> None:
    """Kill every process of a cgroup, also those that are being forked."""
    if cgroup:
        with contextlib.suppress(OSError):
            Path(cgroup, "cgroup.kill").write_text("1")


def remove_cgroup(cgroup: str) -> None:
    """Remove an empty cgroup; the kernel may need a moment to see that it is empty."""
    for _ in range(5 if cgroup else 0):
        try:
            Path(cgroup).rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)


def own_cgroup() -> str:
    """Return this process's path in the unified hierarchy."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return line[3:]
    return "/"


def _unified_mount() -> Path | None:
    return next((mount_point for _, mount_point, version in own_cgroups("") if version == 2), None)
