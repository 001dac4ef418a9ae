"""Checks of the limits of open files and of processes."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

from evenload import hardware
from evenload.doctor import system_files
from evenload.doctor.finding import Finding, Options, fail, ok, warn

FILES_STOP = 256
FILES_BASE, FILES_PER_RANK = 256, 256
"""Open files needed, roughly: FILES_BASE + FILES_PER_RANK x ranks; batches from loader workers hold some each."""
PROCESSES_STOP = 64
PROCESSES_BASE, PROCESSES_PER_RANK = 64, 128
"""Likewise: torch starts a thread per core in each rank and loader worker, besides those of gloo, NCCL and autograd."""


def open_files(options: Options) -> Finding:
    soft, hard = system_files.limits(resource.RLIMIT_NOFILE)
    num_ranks = max(2, system_files.num_gpu_files(options.root_path))
    needed = FILES_BASE + FILES_PER_RANK * num_ranks
    found = f"ulimit -n is {soft:g}" if soft == hard else f"ulimit -n is {soft:g} (at most {hard:g})"
    expected = f"at least {needed} for {num_ranks} ranks with loader workers"
    if soft >= needed:
        return ok(found, expected)
    fix = f"ulimit -n {min(65536, hard):g}"
    if hard < needed:
        fix = "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.conf   # then log in again"
    return (fail if soft < FILES_STOP else warn)(found, expected, fix)


def processes(options: Options) -> Finding:
    root = options.root_path
    soft, hard = system_files.limits(resource.RLIMIT_NPROC)
    cgroup_left, cgroup = math.inf, ""
    for folder in hardware.cgroup_folders("pids", root):
        limit, count = system_files.number(folder / "pids.max"), system_files.number(folder / "pids.current")
        if limit is not None and count is not None and limit - count < cgroup_left:
            cgroup_left, cgroup = limit - count, str(folder)
    return evaluate_processes(
        soft,
        hard,
        num_own=_own_threads(root),
        cgroup_left=cgroup_left,
        cgroup=cgroup,
        num_ranks=max(2, system_files.num_gpu_files(root)),
        is_root=os.geteuid() == 0,
    )


def evaluate_processes(
    soft: float, hard: float, *, num_own: int, cgroup_left: float, cgroup: str, num_ranks: int, is_root: bool
) -> Finding:
    """``soft`` is ``ulimit -u``, which does not apply to root; ``cgroup_left`` is what the tightest cgroup still allows."""
    needed = PROCESSES_BASE + PROCESSES_PER_RANK * num_ranks
    expected = f"space for {needed} more, for {num_ranks} ranks with loader workers"
    user_left = math.inf if is_root else soft - num_own
    left = min(user_left, cgroup_left)
    if left >= needed:
        return ok(
            f"space for {'any number of' if math.isinf(left) else f'{left:g}'} more processes and threads", expected
        )
    report = fail if left < PROCESSES_STOP else warn
    if cgroup_left <= user_left:
        fix = f"echo max | sudo tee {cgroup}/pids.max   # in a container: docker update --pids-limit -1 NAME"
        return report(f"the cgroup allows {cgroup_left:g} more processes and threads", expected, fix)
    fix = f"ulimit -u {hard:g}"
    if hard - num_own < needed:
        fix = "echo '* - nproc 65536' | sudo tee -a /etc/security/limits.conf   # then log in again"
    return report(f"ulimit -u is {soft:g}, and this user has {num_own} processes and threads", expected, fix)


def _own_threads(root: Path) -> int:
    num_threads = 0
    for process in (root / "proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.getuid():
                num_threads += len(list((process / "task").iterdir()))
        except OSError:
            continue  # it has ended
    return num_threads
