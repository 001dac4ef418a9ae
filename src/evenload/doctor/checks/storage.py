"""Where runs write, and where temporary files go: room, speed, and what kind of file system it is."""

from __future__ import annotations

import errno
import os
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evenload.doctor import files
from evenload.doctor.finding import Finding, Options, Status

RUNS, TEMPORARY = "run folder", "temporary folder"
GIB = 2**30
STOPS_BYTES, SLOWS_BYTES = GIB, 10 * GIB
"""Free; a checkpoint of a model of 100 million parameters with Adam takes 1.2 GiB, and two are kept at least."""
FEW_FILES = 10_000
"""Free inodes."""
NETWORK_KINDS = ("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "fuse.sshfs", "fuse.rclone", "fuse.s3fs", "davfs")
"""File systems that one server holds; those made for clusters (lustre, beegfs, ceph, gpfs) are fast enough."""
MEMORY_KINDS = ("tmpfs", "ramfs")
NUM_TRIED_BYTES = 4 * 2**20
SLOW_WRITE_S = 1.0
"""For that many bytes, brought to the disk."""
TEMPORARY_SLOWS_BYTES = GIB
LONGEST_PATH = 60
"""Sockets of worker processes lie some 40 characters deeper; the system takes 107."""


@dataclass(frozen=True)
class Place:
    """What a folder is like to write in."""

    folder: str
    kind: str = ""
    """Of its file system; empty where the system doesn't tell."""
    free_bytes: int = 0
    total_bytes: int = 0
    free_files: int | None = None
    """None where the file system doesn't count them."""
    write_s: float = 0.0
    """Seconds to write `NUM_TRIED_BYTES` and bring them to the disk."""
    runs_programs: bool = True
    """Not mounted with ``noexec``."""
    error: str = ""
    """Why it can't be written in; empty where it can."""


def runs(options: Options) -> Finding:
    """Writes a trial file where runs will write, and takes it away."""
    return judge_runs(look_at(Path(options.folder).absolute(), options.root_path))


def judge_runs(place: Place) -> Finding:
    """What a place means for records and checkpoints."""
    elsewhere = "evenload run --project-dir ~/runs/first train.py"
    if place.error:
        found = f"{place.folder} can't be written: {place.error}"
        return Finding(RUNS, "fail", found, "a folder that this user may write in", elsewhere)
    kind = f", {place.kind}" if place.kind else ""
    found = f"{place.free_bytes / GIB:.1f} GiB free in {place.folder}{kind}"
    if place.free_bytes < SLOWS_BYTES or (place.free_files is not None and place.free_files < FEW_FILES):
        few = place.free_files is not None and place.free_files < FEW_FILES
        found += f", room for {place.free_files} more files" if few else ""
        status: Status = "fail" if place.free_bytes < STOPS_BYTES or place.free_files == 0 else "warn"
        expected = f"{SLOWS_BYTES / GIB:.0f} GiB free, for checkpoints"
        mend = (
            f"du -xsh {shlex.quote(place.folder)}/* | sort -h | tail   # and remove what is not needed, or: {elsewhere}"
        )
        return Finding(RUNS, status, found, expected, mend)
    if place.kind in NETWORK_KINDS:
        expected = "a local disk: each step's line, and each checkpoint, crosses the network here"
        return Finding(RUNS, "warn", found, expected, "evenload run --project-dir /var/tmp/first train.py")
    if place.kind in MEMORY_KINDS:
        expected = "a disk: what is here is gone with the next start, and takes memory from the run"
        return Finding(RUNS, "warn", found, expected, elsewhere)
    if place.write_s > SLOW_WRITE_S:
        found += f"; {NUM_TRIED_BYTES / 2**20:.0f} MiB took {place.write_s:.1f} s to write"
        return Finding(RUNS, "warn", found, f"less than {SLOW_WRITE_S:g} s", elsewhere)
    return Finding(RUNS, "ok", found)


def temporary(options: Options) -> Finding:
    """Writes a trial file where Python puts temporary files."""
    return judge_temporary(look_at(Path(options.temporary or "/tmp"), options.root_path))


def judge_temporary(place: Place) -> Finding:
    """What a place means for the sockets of loader workers, for compiled kernels, and for the launcher's files."""
    elsewhere = "export TMPDIR=/var/tmp"
    elsewhere = elsewhere if place.folder != "/var/tmp" else "export TMPDIR=/tmp"
    if place.error:
        found = f"{place.folder} can't be written: {place.error}"
        return Finding(TEMPORARY, "fail", found, "a folder for temporary files that this user may write in", elsewhere)
    if len(place.folder) > LONGEST_PATH:
        found = f"{place.folder} has {len(place.folder)} characters"
        expected = f"at most {LONGEST_PATH}: sockets of loader workers lie below it, and the system takes 107"
        return Finding(TEMPORARY, "fail", found, expected, elsewhere)
    found = f"{place.free_bytes / GIB:.1f} GiB free in {place.folder}" + (f", {place.kind}" if place.kind else "")
    if not place.runs_programs:
        expected = "a folder that may hold programs: torch.compile loads what it builds there"
        return Finding(TEMPORARY, "warn", found + ", mounted with noexec", expected, elsewhere)
    if place.free_bytes < TEMPORARY_SLOWS_BYTES:
        return Finding(TEMPORARY, "warn", found, f"{TEMPORARY_SLOWS_BYTES / GIB:.0f} GiB free", elsewhere)
    return Finding(TEMPORARY, "ok", found)


def look_at(folder: Path, root: Path) -> Place:
    """Tries to write in a folder, or where it would be made."""
    here = folder
    try:
        while not here.exists() and here != here.parent:
            here = here.parent
        if not here.is_dir():
            return Place(str(folder), error=f"{here} is a file")
        state = os.statvfs(here)
        write_s = _write(here / f".evenload-doctor-{os.getpid()}")
    except OSError as error:
        full = " (the disk, or this user's quota, is full)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return Place(str(folder), error=(error.strerror or str(error)) + full)
    return Place(
        str(folder),
        kind=mount_kind(here.resolve(), root),
        free_bytes=state.f_bavail * state.f_frsize,
        total_bytes=state.f_blocks * state.f_frsize,
        free_files=state.f_favail if state.f_files else None,
        write_s=write_s,
        runs_programs=not state.f_flag & getattr(os, "ST_NOEXEC", 8),
    )


def mount_kind(folder: Path, root: Path) -> str:
    """What kind of file system a folder lies on, by /proc/self/mountinfo; empty where that doesn't tell."""
    best, kind = -1, ""
    for line in files.text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        at = Path(fields[4].replace("\\040", " "))
        if folder.is_relative_to(at) and len(at.parts) >= best:  # of two at one place the later one covers the other
            best, kind = len(at.parts), after.split()[0]
    return kind


def _write(trial: Path) -> float:
    """Seconds that `NUM_TRIED_BYTES` take to reach the disk; the file is taken away again."""
    began = time.perf_counter()
    try:
        with trial.open("wb") as file:
            file.write(os.urandom(NUM_TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - began
    finally:
        with suppress(OSError):
            trial.unlink()
