"""Processes as the kernel tells them: which one a recorded id still is, and all that belong to one attempt of a job.

An attempt's processes are found by four marks: descent from the runner or the program, the program's session, a cgroup
of their own where one can be made, and the variable that names the attempt's terms, which they inherit. A process that
clears its variables, makes a session of its own and lets its parent die keeps none of them where there is no cgroup, and
is then found only by its runner, to whom the kernel gives such orphans.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from evenload.job.protocol import VARIABLE

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Identity:
    """A process that no later one can be taken for."""

    pid: int
    start_ticks: int
    """When it started, in ticks since the machine did."""
    boot_id: str


@dataclass(frozen=True, slots=True)
class Stat:
    """What matters here of /proc/PID/stat."""

    state: str
    parent: int
    session: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Marks:
    """What the processes of one attempt are known by; what isn't known is 0 or empty."""

    program: int = 0
    """Process id of the program, which is its session's too."""
    program_ticks: int = 0
    cgroup: str = ""
    terms: str = ""
    """Path of the attempt's terms."""


def boot_id() -> str:
    """Differs after each start of the machine; an empty text where the system doesn't tell."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def identity_of(pid: int) -> Identity | None:
    """The identity of a process that runs now; None where none does."""
    found = stat_of(pid)
    return None if found is None or found.state in "ZX" else Identity(pid, found.start_ticks, boot_id())


def is_alive(identity: Identity) -> bool:
    """Whether exactly this process still runs."""
    return identity_of(identity.pid) == identity


def stat_of(pid: int) -> Stat | None:
    """What the kernel says of a process; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()  # the name before it may hold anything
    if len(fields) < 20:
        return None
    return Stat(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def all_stats() -> dict[int, Stat]:
    """Every process that can be seen, ended ones that nobody waited for left out."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and (stat := stat_of(int(name))) is not None and stat.state not in "ZX":
            found[int(name)] = stat
    return found


def below(roots: Iterable[int], stats: dict[int, Stat]) -> set[int]:
    """All descendants of these processes, themselves left out."""
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found: set[int] = set()
    left = list(roots)
    while left:
        for child in children.get(left.pop(), ()):
            if child not in found:
                found.add(child)
                left.append(child)
    return found


def runner_of(pid: int, runners: frozenset[int], stats: dict[int, Stat]) -> int:
    """Which of the runners a process descends from; 0 for none."""
    passed: set[int] = set()
    while pid in stats and pid not in passed:
        passed.add(pid)
        pid = stats[pid].parent
        if pid in runners:
            return pid
    return 0


def members(marks: Marks, stats: dict[int, Stat]) -> set[int]:
    """The processes that bear one of an attempt's marks. Never this process itself, nor one above it."""
    found: set[int] = set()
    leader = stats.get(marks.program)
    is_same = leader is None or leader.start_ticks == marks.program_ticks
    if marks.program and is_same:
        found |= {
            pid
            for pid, stat in stats.items()
            if stat.session == marks.program and stat.start_ticks >= marks.program_ticks
        }
        found |= {marks.program} if leader is not None else set()
    found |= set(in_cgroup(marks.cgroup)) & stats.keys()
    if marks.terms:
        wanted = f"{VARIABLE}={marks.terms}".encode()
        found |= {pid for pid in stats if wanted in _variables(pid)}
    found |= below(found, stats)
    return found - _line_up(os.getpid(), stats)


def _variables(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _line_up(pid: int, stats: dict[int, Stat]) -> set[int]:
    line = set()
    while pid > 0 and pid not in line:
        line.add(pid)
        pid = stats[pid].parent if pid in stats else 0
    return line


def send(pid: int, number: int, start_ticks: int) -> None:
    """Sends a signal to this process and to no later one of the same id."""
    with contextlib.suppress(ProcessLookupError, PermissionError), _pidfd(pid) as descriptor:
        stat = stat_of(pid)
        if descriptor >= 0 and stat is not None and stat.start_ticks == start_ticks:
            signal.pidfd_send_signal(descriptor, number)


def kill_all(pids: Iterable[int], stats: dict[int, Stat], number: int = signal.SIGKILL) -> None:
    """Sends a signal to each of these."""
    for pid in pids:
        if pid in stats:
            send(pid, number, stats[pid].start_ticks)


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# Control groups, of the unified hierarchy alone: there a whole group is killed at once.


def cgroup_of(attempt: Path) -> Path | None:
    """Where the cgroup of an attempt is, below this process's own; None where there is no unified hierarchy."""
    mount = _unified_mount()
    if mount is None:
        return None
    queue = hashlib.sha256(str(attempt.parent).encode()).hexdigest()[:8]  # several queues may be below one cgroup
    return mount / own_cgroup().lstrip("/") / f"evenload-{queue}-{attempt.name}"


def make_cgroup(attempt: Path) -> str:
    """Makes the cgroup of an attempt; an empty text where that isn't allowed here."""
    folder = cgroup_of(attempt)
    if folder is None:
        return ""
    try:
        folder.mkdir(exist_ok=True)
        return str(folder) if os.access(folder / "cgroup.procs", os.W_OK) else ""
    except OSError:
        return ""


def join_cgroup(cgroup: str, pid: int) -> bool:
    """Moves a process there; False where the kernel refuses."""
    try:
        Path(cgroup, "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True


def in_cgroup(cgroup: str) -> list[int]:
    """The processes of a cgroup; none where it is gone."""
    if not cgroup:
        return []
    try:
        return [int(line) for line in Path(cgroup, "cgroup.procs").read_text().split()]
    except (OSError, ValueError):
        return []


def kill_cgroup(cgroup: str) -> None:
    """Kills all in it, those that are being forked too."""
    if cgroup:
        with contextlib.suppress(OSError):
            Path(cgroup, "cgroup.kill").write_text("1")


def remove_cgroup(cgroup: str) -> None:
    """Takes an empty cgroup away; the kernel may need a moment to see that it is."""
    for _ in range(5 if cgroup else 0):
        try:
            Path(cgroup).rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)


def own_cgroup() -> str:
    """This process's place in the unified hierarchy."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return line[3:]
    return "/"


def _unified_mount() -> Path | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            fields = line.split(" ")
            if len(fields) > 3 and fields[2] == "cgroup2":
                return Path(fields[1].replace("\\040", " "))
    return None
