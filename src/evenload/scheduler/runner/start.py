"""Start of a job's program: as its owner, in a session of its own, with the variables it was submitted with and no others."""

from __future__ import annotations

import errno
import os
import signal
import stat
from dataclasses import dataclass
from pathlib import Path

from evenload.errors import QueueError
from evenload.job.processes import end_with_parent, stat_of
from evenload.job.protocol import VARIABLE, write_contract
from evenload.scheduler import snapshots
from evenload.scheduler.container import container_command, find_runtime
from evenload.scheduler.runner import files, processes
from evenload.scheduler.runner.files import AttemptSpec
from evenload.scheduler.runner.lost_programs import names_evenload
from evenload.scheduler.runner.processes import ProcessMarkers
from evenload.scheduler.runner.terminal import ProgramTerminal, take_terminal

_FULL_DISK_EXIT = 125
"""Exit code of the forked child that found a full disk before it became the program."""


@dataclass(frozen=True, slots=True)
class StartedProgram:
    pid: int
    start_ticks: int
    cgroup: str


def open_log(spec: AttemptSpec) -> int:
    """Open the job's log for appending, for its owner alone.

    Raises:
        OSError: the disk is full; the caller may try again.
        QueueError: it is a link, somebody else's file, or can't be written for another reason.
    """
    path = Path(spec.log)
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(folder).st_uid != os.geteuid():
                raise QueueError(f"the log folder {path.parent} belongs to user {os.fstat(folder).st_uid}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            log = os.open(path.name, flags, 0o600, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        if files.is_full_disk(error):
            raise
        raise QueueError(f"the log {path} can't be written: {error}") from error
    found = os.fstat(log)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid not in (os.geteuid(), spec.uid):
        os.close(log)
        raise QueueError(f"the log {path} is no plain file of this job alone: nothing is written to it")
    os.set_blocking(log, True)
    if spec.user:
        os.fchown(log, spec.uid, spec.gid)
    return log


def start(folder: Path, spec: AttemptSpec, log: int, terminal: ProgramTerminal | None = None) -> StartedProgram:
    """Start the program and return once it is executed; raise a `QueueError` with the reason where it can't be.

    A full disk is an `OSError`: nothing has begun, and the caller may try again. The program's markers are on disk before
    its first instruction: whoever finds this runner dead knows which processes to end.
    """
    reports = folder / files.REPORT_FOLDER
    reports.mkdir(mode=0o700, exist_ok=True)
    if spec.user:
        os.chown(reports, spec.uid, spec.gid)
    write_contract(folder / files.TERMS, files.terms_of(folder, spec))
    cgroup = processes.make_cgroup(folder)
    problem, child_problem = os.pipe()
    runner = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(problem)
            end_with_parent()
            protocol = files.open_protocol(folder)
            _write_markers(folder, cgroup)
            _become(folder, spec, log, runner, protocol, terminal)
        except BaseException as error:
            os.write(child_problem, f"{error}".encode(errors="replace")[:2000] or b"unknown")
            if files.is_full_disk(error):
                os._exit(_FULL_DISK_EXIT)
        os._exit(127)
    os.close(child_problem)
    with os.fdopen(problem, "rb") as pipe:
        text = pipe.read()
    markers = files.read_markers(folder)
    if text or markers.program != pid:
        _, status = os.waitpid(pid, 0)
        processes.remove_cgroup(cgroup)
        if os.waitstatus_to_exitcode(status) == _FULL_DISK_EXIT:
            raise OSError(errno.ENOSPC, text.decode(errors="replace"))
        raise QueueError(text.decode(errors="replace") or "it was killed before it began")
    if markers.cgroup != cgroup:
        processes.remove_cgroup(cgroup)
    return StartedProgram(pid, markers.program_ticks, markers.cgroup)


def _write_markers(folder: Path, cgroup: str) -> None:
    pid = os.getpid()
    if cgroup and not processes.join_cgroup(cgroup, pid):
        cgroup = ""
    found = stat_of(pid)
    ticks = 0 if found is None else found.start_ticks
    files.write_markers(folder, ProcessMarkers(pid, ticks, cgroup, str(folder / files.TERMS)))


def _become(
    folder: Path, spec: AttemptSpec, log: int, runner: int, protocol: tuple[int, int], terminal: ProgramTerminal | None
) -> None:
    """Turn this forked child into the program; never returns."""
    os.setsid()
    if terminal is not None:
        take_terminal(terminal.slave)
    else:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    os.umask(0o022)
    if spec.user:
        os.initgroups(spec.user, spec.gid)
        os.setresgid(spec.gid, spec.gid, spec.gid)
        os.setresuid(spec.uid, spec.uid, spec.uid)
        if os.getresuid() != (spec.uid,) * 3 or os.getresgid() != (spec.gid,) * 3:
            raise QueueError(f"the program can't become user {spec.uid}")
    if spec.uid != os.geteuid():
        raise QueueError(f"the program is user {spec.uid}'s, and this queue runs as user {os.geteuid()}")
    end_with_parent()  # again: the kernel forgets it when the user changes
    if os.getppid() != runner:
        os._exit(127)
    snapshots.ready(spec.folder)  # by its owner, who alone may write there
    try:
        os.chdir(spec.folder)
    except OSError as error:
        raise QueueError(f"it was to run in {spec.folder}, which can't be entered: {error.strerror}") from None
    environment = {**spec.environment, VARIABLE: str(folder / files.TERMS)}
    command = list(spec.command)
    if spec.image:
        command, environment = container_command(
            find_runtime(environment.get("PATH", os.defpath)),
            spec.image,
            command,
            folder=spec.folder,
            mounts=(*spec.mounts, str(folder)),
            variables=environment,
            has_terminal=spec.pty,
        )
    files.note_start(protocol, reports=names_evenload(spec.command, spec.folder))
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise QueueError(f"the command {command[0]!r} can't be started: {error.strerror}") from None
