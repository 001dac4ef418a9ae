"""Supervision of processes: start one in its own session, stop it within a grace, and leave nothing of its tree running.

`SessionProcess` is for a parent that starts one program: it leads a session and process group of its own, so that Ctrl-C
does not reach it and ending its group ends what it started. The functions below read /proc and find processes that left
the group as well; a signal reaches exactly the process that was recorded, never a later one with the same id.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


class SessionProcess:
    """A program in a session of its own. Call `poll` several times a second: it also enforces the end of the grace."""

    def __init__(self, command: Sequence[str], *, ends_with_parent: bool = False, **popen: Any) -> None:
        """Start the program.

        With ``ends_with_parent`` the kernel kills it when the thread that started it ends. (Linux; runs code after fork.)
        OSError, ValueError: it can't be started.
        """
        preexec = end_with_parent if ends_with_parent and _libc is not None else None
        self._process = subprocess.Popen(list(command), start_new_session=True, preexec_fn=preexec, **popen)
        self._deadline_s: float | None = None
        self.code: int | None = None
        """The exit code once `poll` or `kill` has seen the end; -N for signal N."""
        self.ended_s = 0.0
        """When `poll` saw the end, seconds since 1970."""

    @property
    def pid(self) -> int:
        """Process id, and that of the session and process group that the program leads."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code once the program has ended; its process group is killed then, or when the grace is over."""
        if self.code is not None:
            return self.code
        # Looked at without reaping: until it is reaped, its id can't become another process's.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self.ended_s = time.time()
            self._kill_and_reap()
        elif self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            self.kill_group()
        return self.code

    def send_signal(self, number: int) -> None:
        """Send a signal to the program alone, if it still runs."""
        if self.poll() is None:
            self._process.send_signal(number)

    def stop(self, grace_s: float, number: int | None = signal.SIGTERM) -> None:
        """Request a stop: send `number` (None: the program was asked in another way) and kill the group after the grace."""
        self._deadline_s = time.monotonic() + grace_s
        if number is not None:
            self.send_signal(number)

    def kill_group(self) -> None:
        """Send SIGKILL to the program and its process group, and return at once."""
        if self.code is None:  # afterwards the id may be another process's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the program and its process group, and wait until the program has ended."""
        if self.poll() is None:
            self._kill_and_reap()

    def _kill_and_reap(self) -> None:
        self.kill_group()
        self.code = self._process.wait()


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: a program without a supervisor would hold its devices."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def become_reaper(adopts: bool = True) -> None:
    """Have the kernel make this process the parent of every orphan among its descendants, or no longer; OSError if it refuses."""
    if _libc is not None and _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"can't adopt orphaned processes: {os.strerror(ctypes.get_errno())}")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that no later one can be mistaken for."""

    pid: int
    start_ticks: int
    """When it started, in clock ticks since the machine was booted."""
    boot_id: str


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of /proc/PID/stat that are used here."""

    state: str
    parent: int
    session: int
    start_ticks: int
    cpu_ticks: int = 0
    """CPU time of the process and of the children that it waited for."""


def boot_id() -> str:
    """Return an id that changes with each boot of the machine; empty where the system has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def boottime_s() -> float:
    """Return the seconds since the machine was booted: a clock that all processes share, and that nobody can set."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def identity_of(pid: int) -> ProcessIdentity | None:
    """Return the identity of a running process; None where there is none."""
    found = stat_of(pid)
    return None if found is None or found.state in "ZX" else ProcessIdentity(pid, found.start_ticks, boot_id())


def is_alive(identity: ProcessIdentity) -> bool:
    """Return True if exactly this process still runs."""
    return identity_of(identity.pid) == identity


def stat_of(pid: int) -> ProcessStat | None:
    """Read /proc/PID/stat; None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()  # the name before it may hold anything
    if len(fields) < 20:
        return None
    return ProcessStat(
        fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]), sum(map(int, fields[11:15]))
    )


def cpu_s_of(pid: int) -> float:
    """Return the CPU time of a process and of the children that it waited for; NaN where there is no such process."""
    return math.nan if (stat := stat_of(pid)) is None else stat.cpu_ticks / os.sysconf("SC_CLK_TCK")


def all_stats() -> dict[int, ProcessStat]:
    """Return every visible process by its id, zombies left out."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and (stat := stat_of(int(name))) is not None and stat.state not in "ZX":
            found[int(name)] = stat
    return found


def descendants(roots: Iterable[int], stats: dict[int, ProcessStat]) -> set[int]:
    """Return all descendants of these processes, themselves left out."""
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


def ancestors(pid: int, stats: dict[int, ProcessStat]) -> list[int]:
    """Return the parents of a process, nearest first."""
    found: list[int] = []
    while pid in stats and (pid := stats[pid].parent) > 0 and pid not in found:
        found.append(pid)
    return found


def send_signal(pid: int, number: int, start_ticks: int) -> None:
    """Send a signal to the process that started at `start_ticks`, and to no later one with the same id."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(pid)
        try:
            stat = stat_of(pid)
            if stat is not None and stat.start_ticks == start_ticks:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def signal_all(pids: Iterable[int], stats: dict[int, ProcessStat], number: int = signal.SIGKILL) -> None:
    """Send a signal to each of these processes that is in `stats`."""
    for pid in pids:
        if pid in stats:
            send_signal(pid, number, stats[pid].start_ticks)
