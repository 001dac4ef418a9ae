"""Starts a job's program: as its owner, in a session of its own, with the variables it was submitted with and no others."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
from dataclasses import dataclass
from pathlib import Path

from evenload.errors import QueueError
from evenload.job.protocol import VARIABLE, write_terms
from evenload.scheduler import snapshots
from evenload.scheduler.runner import files, processes
from evenload.scheduler.runner.files import Order
from evenload.scheduler.runner.processes import Marks

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Started:
    """A program that runs."""

    pid: int
    start_ticks: int
    cgroup: str


def become_reaper() -> None:
    """From now on the kernel gives orphans among this process's descendants to it."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise QueueError(f"the runner can't keep orphans: {os.strerror(ctypes.get_errno())}")


def open_log(order: Order) -> int:
    """The job's log, for appending; its owner's and readable by him alone.

    Raises:
        QueueError: the folder or the file is a link, or somebody else's: nothing is written there.
    """
    path = Path(order.log)
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(folder).st_uid != os.geteuid():
                raise QueueError(f"the folder of logs {path.parent} belongs to user {os.fstat(folder).st_uid}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            log = os.open(path.name, flags, 0o600, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise QueueError(f"the log {path} can't be written: {error}") from error
    found = os.fstat(log)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid not in (os.geteuid(), order.uid):
        os.close(log)
        raise QueueError(f"the log {path} is no plain file of this job alone: nothing is written to it")
    os.set_blocking(log, True)
    if order.user:
        os.fchown(log, order.uid, order.gid)
    return log


def start(folder: Path, order: Order, log: int) -> Started:
    """Starts the program and returns once it is executed.

    Its marks are on disk before its first instruction: whoever finds this runner dead knows what to end.

    Raises:
        QueueError: it can't be started, with the reason.
    """
    told = folder / files.TOLD
    told.mkdir(mode=0o700, exist_ok=True)
    if order.user:
        os.chown(told, order.uid, order.gid)
    write_terms(folder / files.TERMS, files.terms_of(folder, order))
    cgroup = processes.make_cgroup(folder)
    problem, child_problem = os.pipe()
    child_gate, gate = os.pipe()
    runner = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(gate)
            os.close(problem)
            if os.read(child_gate, 1) == b"":
                os._exit(127)  # the runner is gone
            _become(folder, order, log, runner)
        except BaseException as error:
            os.write(child_problem, f"{error}".encode(errors="replace")[:2000] or b"unknown")
        os._exit(127)
    os.close(child_problem)
    os.close(child_gate)
    try:
        if cgroup and not processes.join_cgroup(cgroup, pid):
            processes.remove_cgroup(cgroup)
            cgroup = ""
        stat_now = processes.stat_of(pid)
        ticks = stat_now.start_ticks if stat_now is not None else 0
        files.write_marks(folder, Marks(pid, ticks, cgroup, str(folder / files.TERMS)))
        try:
            os.write(gate, b"1")
        except BrokenPipeError:
            os.waitpid(pid, 0)
            raise QueueError("it was killed before it began") from None
        os.close(gate)
        gate = -1
        text = b""
        while part := os.read(problem, 4096):
            text += part
    finally:
        os.close(problem)
        if gate >= 0:
            os.close(gate)
    if text:
        os.waitpid(pid, 0)
        processes.remove_cgroup(cgroup)
        raise QueueError(text.decode(errors="replace"))
    return Started(pid, ticks, cgroup)


def _become(folder: Path, order: Order, log: int, runner: int) -> None:
    """Turns this fresh child into the program; returns never, or raises."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if order.cores:
        os.sched_setaffinity(0, order.cores)
    os.umask(0o022)
    if order.user:
        os.initgroups(order.user, order.gid)
        os.setresgid(order.gid, order.gid, order.gid)
        os.setresuid(order.uid, order.uid, order.uid)
        if os.getresuid() != (order.uid,) * 3 or os.getresgid() != (order.gid,) * 3:
            raise QueueError(f"the program can't become user {order.uid}")
    if order.uid != os.geteuid():
        raise QueueError(f"the program is user {order.uid}'s, and this queue runs as user {os.geteuid()}")
    # After the change of user, which forgets it. A program whose runner is killed must not go on unseen.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != runner:
        os._exit(127)
    snapshots.ready(order.folder)  # by its owner, who alone may write there
    try:
        os.chdir(order.folder)
    except OSError as error:
        raise QueueError(f"it was to run in {order.folder}, which can't be entered: {error.strerror}") from None
    environment = {**order.environment, VARIABLE: str(folder / files.TERMS)}
    try:
        os.execvpe(order.command[0], order.command, environment)
    except OSError as error:
        raise QueueError(f"the command {order.command[0]!r} can't be started: {error.strerror}") from None
