"""Checks of /dev/shm, the run folder and the folder for temporary files."""

from __future__ import annotations

import errno
import os
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evenload.doctor.finding import Finding, Options, fail, ok, warn
from evenload.doctor.system_files import GIB
from evenload.hardware import MAX_TEMPORARY_PATH, mount_of, temporary_path_problem

SHM_STOPS_BYTES, SHM_SLOWS_BYTES = GIB // 8, GIB
"""Loader workers and NCCL exchange data in /dev/shm; with Docker's default, 64 MiB, workers die by SIGBUS."""
STOPS_BYTES, SLOWS_BYTES = GIB, 10 * GIB
"""Free; a checkpoint of a model with 100 million parameters and Adam takes 1.2 GiB, and at least two are kept."""
FEW_FILES = 10_000
"""Free inodes."""
NETWORK_KINDS = ("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "fuse.sshfs", "fuse.rclone", "fuse.s3fs", "davfs")
"""File systems of a single server; cluster file systems (lustre, beegfs, ceph, gpfs) are fast enough."""
MEMORY_KINDS = ("tmpfs", "ramfs")
TEST_BYTES = 4 * 2**20
SLOW_WRITE_S = 1.0
"""To write TEST_BYTES to the disk."""
TEMPORARY_SLOWS_BYTES = GIB


def shared_memory(options: Options) -> Finding:
    root = options.root_path
    is_container = (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
    try:
        state = os.statvfs(root / "dev/shm")
    except OSError as error:
        return evaluate_shared_memory(None, 0, is_container=is_container, error=error.strerror or "")
    total_bytes, free_bytes = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    return evaluate_shared_memory(total_bytes, free_bytes, is_container=is_container)


def evaluate_shared_memory(total_bytes: int | None, free_bytes: int, *, is_container: bool, error: str = "") -> Finding:
    """Evaluate the size of /dev/shm; None if there is none."""
    expected = f"at least {SHM_SLOWS_BYTES / GIB:.2f} GiB free, for loader workers"
    in_docker = "docker run --shm-size=8g ...   # restart the container with this option"
    if total_bytes is None:
        mount = "sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o size=50% tmpfs /dev/shm"
        return fail(f"/dev/shm is not readable: {error}", expected, in_docker if is_container else mount)
    found = f"{free_bytes / GIB:.2f} GiB free of {total_bytes / GIB:.2f} GiB"
    if free_bytes >= SHM_SLOWS_BYTES:
        return ok(found, expected)
    fix = "ls -lhS /dev/shm   # and remove files of programs that have ended"
    if total_bytes < SHM_SLOWS_BYTES:
        fix = in_docker if is_container else "sudo mount -o remount,size=50% /dev/shm"
    return (fail if free_bytes < SHM_STOPS_BYTES else warn)(found, expected, fix)


@dataclass(frozen=True)
class FolderState:
    folder: str
    kind: str = ""
    """Of its file system; empty if unknown."""
    free_bytes: int = 0
    free_files: int | None = None
    """None if the file system has no such limit."""
    write_s: float = 0.0
    """Seconds to write `TEST_BYTES` to the disk."""
    runs_programs: bool = True
    """Not mounted with ``noexec``."""
    error: str = ""
    """The reason that it is not writable; empty if it is."""

    @property
    def text(self) -> str:
        return f"{self.free_bytes / GIB:.1f} GiB free in {self.folder}" + (f", {self.kind}" if self.kind else "")


def runs(options: Options) -> Finding:
    state = _test_folder(Path(options.folder).absolute())
    elsewhere = "evenload run --project-dir ~/runs/first train.py"
    if state.error:
        return fail(f"{state.folder} is not writable: {state.error}", "a folder that this user may write to", elsewhere)
    found = state.text
    is_short_of_files = state.free_files is not None and state.free_files < FEW_FILES
    if state.free_bytes < SLOWS_BYTES or is_short_of_files:
        found += f", space for {state.free_files} more files" if is_short_of_files else ""
        report = fail if state.free_bytes < STOPS_BYTES or state.free_files == 0 else warn
        usage = f"du -xsh {shlex.quote(state.folder)}/* | sort -h | tail"
        fix = f"{usage}   # and remove what is not needed, or: {elsewhere}"
        return report(found, f"{SLOWS_BYTES / GIB:.0f} GiB free, for checkpoints", fix)
    if state.kind in NETWORK_KINDS:
        expected = "a local disk: here every step's record and every checkpoint is sent over the network"
        return warn(found, expected, "evenload run --project-dir /var/tmp/first train.py")
    if state.kind in MEMORY_KINDS:
        return warn(found, "a disk: this folder is lost at the next reboot and takes memory from the run", elsewhere)
    if state.write_s > SLOW_WRITE_S:
        found += f"; writing {TEST_BYTES / 2**20:.0f} MiB took {state.write_s:.1f} s"
        return warn(found, f"less than {SLOW_WRITE_S:g} s", elsewhere)
    return ok(found)


def temporary(options: Options) -> Finding:
    state = _test_folder(Path(options.temporary or "/tmp"))
    fix = "export TMPDIR=/var/tmp" if state.folder != "/var/tmp" else "export TMPDIR=/tmp"
    if state.error:
        expected = "a folder for temporary files that this user may write to"
        return fail(f"{state.folder} is not writable: {state.error}", expected, fix)
    if problem := temporary_path_problem(state.folder):
        return fail(problem, f"at most {MAX_TEMPORARY_PATH} characters", fix)
    if not state.runs_programs:
        expected = "a folder that allows programs: torch.compile loads its kernels from there"
        return warn(f"{state.text}, mounted with noexec", expected, fix)
    if state.free_bytes < TEMPORARY_SLOWS_BYTES:
        return warn(state.text, f"{TEMPORARY_SLOWS_BYTES / GIB:.0f} GiB free", fix)
    return ok(state.text)


def _test_folder(folder: Path) -> FolderState:
    """Write a test file in a folder, or in its nearest existing parent."""
    here = folder
    try:
        while not here.exists() and here != here.parent:
            here = here.parent
        if not here.is_dir():
            return FolderState(str(folder), error=f"{here} is a file")
        state = os.statvfs(here)
        write_s = _time_write(here / f".evenload-doctor-{os.getpid()}")
    except OSError as error:
        full = " (the disk, or this user's quota, is full)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return FolderState(str(folder), error=(error.strerror or str(error)) + full)
    mount = mount_of(here)
    return FolderState(
        str(folder),
        kind="" if mount is None else mount.fs_type,
        free_bytes=state.f_bavail * state.f_frsize,
        free_files=state.f_favail if state.f_files else None,
        write_s=write_s,
        runs_programs=not state.f_flag & getattr(os, "ST_NOEXEC", 8),
    )


def _time_write(path: Path) -> float:
    began = time.perf_counter()
    try:
        with path.open("wb") as file:
            file.write(os.urandom(TEST_BYTES))
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - began
    finally:
        with suppress(OSError):
            path.unlink()
