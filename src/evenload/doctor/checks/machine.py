"""Shared memory, open files, cores: what the operating system grants."""

from __future__ import annotations

import math
import os
import resource
import shlex
from pathlib import Path

from evenload import hardware
from evenload.doctor.finding import Finding, Options

GIB = 2**30
SHM_STOPS_BYTES = GIB // 8
SHM_SLOWS_BYTES = GIB
"""Loader workers and NCCL hand data over through /dev/shm; with Docker's default, 64 MiB, workers die by SIGBUS."""
FILES_STOP = 256
FILES_BASE, FILES_PER_RANK = 256, 256
"""Open files needed, about: FILES_BASE + FILES_PER_RANK x ranks; batches from loader workers hold some each."""
CORES_PER_GPU = 2


def shared_memory(options: Options) -> Finding:
    """Size and free space of /dev/shm."""
    folder = options.root_path / "dev/shm"
    try:
        state = os.statvfs(folder)
    except OSError as error:
        return judge_shared_memory(
            None, None, is_container=_is_container(options.root_path), error=error.strerror or ""
        )
    return judge_shared_memory(
        state.f_blocks * state.f_frsize,
        state.f_bavail * state.f_frsize,
        is_container=_is_container(options.root_path),
    )


def judge_shared_memory(
    total_bytes: int | None, free_bytes: int | None, *, is_container: bool, error: str = ""
) -> Finding:
    """What a size of /dev/shm means; None where there is none."""
    expected = f"at least {_gib(SHM_SLOWS_BYTES)} free, for loader workers"
    larger = (
        "docker run --shm-size=8g ...   # start the container anew with this option"
        if is_container
        else "sudo mount -o remount,size=50% /dev/shm"
    )
    if total_bytes is None or free_bytes is None:
        mend = larger if is_container else "sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o size=50% tmpfs /dev/shm"
        return Finding("/dev/shm", "fail", f"/dev/shm can't be read: {error}", expected, mend)
    found = f"{_gib(free_bytes)} free of {_gib(total_bytes)}"
    if free_bytes >= SHM_SLOWS_BYTES:
        return Finding("/dev/shm", "ok", found, expected)
    mend = larger if total_bytes < SHM_SLOWS_BYTES else "ls -lhS /dev/shm   # and remove what ended programs left"
    return Finding("/dev/shm", "fail" if free_bytes < SHM_STOPS_BYTES else "warn", found, expected, mend)


def open_files(options: Options) -> Finding:
    """The limit of open files (``ulimit -n``), against what the ranks on this machine need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_gpus = len(list((options.root_path / "dev").glob("nvidia[0-9]*")))
    return judge_open_files(as_limit(soft), as_limit(hard), num_ranks=max(2, num_gpus))


def judge_open_files(soft: float, hard: float, *, num_ranks: int) -> Finding:
    """What a pair of limits means; infinite where there is none."""
    needed = FILES_BASE + FILES_PER_RANK * num_ranks
    found = f"ulimit -n is {soft:g}" if soft == hard else f"ulimit -n is {soft:g} (at most {hard:g})"
    expected = f"at least {needed} for {num_ranks} ranks with loader workers"
    if soft >= needed:
        return Finding("open files", "ok", found, expected)
    mend = f"ulimit -n {min(65536, hard):g}"
    if hard < needed:
        mend = "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.conf   # then log in again"
    return Finding("open files", "fail" if soft < FILES_STOP else "warn", found, expected, mend)


def cores(options: Options) -> Finding:
    """The cores this process may use, and how much of their time."""
    root = options.root_path
    return judge_cores(
        hardware.usable_cores(),
        num_cores=os.cpu_count() or 1,
        quota=hardware.cpu_quota(root),
        num_gpus=len(list((root / "dev").glob("nvidia[0-9]*"))),
        model=hardware.cpu_model(root),
    )


def judge_cores(usable: tuple[int, ...], *, num_cores: int, quota: float | None, num_gpus: int, model: str) -> Finding:
    """What cores and quota mean: threads beyond the quota stop each other, a GPU without cores waits for data."""
    found = f"{len(usable)} of {num_cores} cores ({model})"
    if quota is not None and quota < len(usable):
        whole = max(1, math.floor(quota))
        return Finding(
            "CPU cores",
            "warn",
            f"{found}, but a quota of {quota:g} cores' time",
            f"no more cores than the quota pays for: {whole}",
            shlex.join(["taskset", "-c", ",".join(map(str, usable[:whole])), "evenload", "run", "train.py"]),
        )
    found += "" if quota is None else f", a quota of {quota:g} cores' time"
    expected = f"at least {CORES_PER_GPU} cores for each of {num_gpus} GPUs" if num_gpus else "at least 1 core"
    if len(usable) >= CORES_PER_GPU * num_gpus:
        return Finding("CPU cores", "ok", found, expected)
    mend = (
        f"taskset -c 0-{num_cores - 1} evenload run train.py"
        if len(usable) < num_cores
        else f"evenload run -d {','.join(map(str, range(max(1, len(usable) // CORES_PER_GPU))))} train.py"
    )
    return Finding("CPU cores", "warn", found, expected, mend)


def _is_container(root: Path) -> bool:
    return (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()


def as_limit(value: int) -> float:
    """A resource limit as a number; infinite where there is none."""
    return math.inf if value == resource.RLIM_INFINITY else value


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes < 10 * GIB else f"{size_bytes / GIB:.0f} GiB"
