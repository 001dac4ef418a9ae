"""How many more processes and threads the system grants, against what ranks and their loader workers start."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

from evenload import hardware
from evenload.doctor import files
from evenload.doctor.checks.machine import as_limit
from evenload.doctor.finding import Finding, Options, Status

NAME = "processes"
BASE, PER_RANK = 64, 128
"""About: torch starts a thread a core in each rank and each loader worker, beside those of gloo, NCCL and autograd."""
STOP = 64


def processes(options: Options) -> Finding:
    """The limit of processes (``ulimit -u``) and that of the control groups, less what runs already."""
    root = options.root_path
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    num_gpus = len(list((root / "dev").glob("nvidia[0-9]*")))
    group_left, folder = left_in_groups(root)
    return judge_processes(
        as_limit(soft),
        as_limit(hard),
        num_own=own_threads(root),
        group_left=group_left,
        group=folder,
        num_ranks=max(2, num_gpus),
        is_root=os.geteuid() == 0,
    )


def judge_processes(
    soft: float, hard: float, *, num_own: int, group_left: float, group: str, num_ranks: int, is_root: bool
) -> Finding:
    """What the limits mean.

    Args:
        soft: ``ulimit -u``; the kernel doesn't hold it against root.
        hard: how far a user may raise it.
        num_own: processes and threads that this user has already.
        group_left: what the tightest control group still allows.
        group: the folder of that group.
        num_ranks: ranks that a run here would have.
        is_root: this user is root.
    """
    needed = BASE + PER_RANK * num_ranks
    expected = f"room for {needed} more, for {num_ranks} ranks with loader workers"
    user_left = math.inf if is_root else soft - num_own
    left = min(user_left, group_left)
    if left >= needed:
        spelled = "any number of" if math.isinf(left) else f"{left:g}"
        return Finding(NAME, "ok", f"room for {spelled} more processes and threads", expected)
    status: Status = "fail" if left < STOP else "warn"
    if group_left <= user_left:
        found = f"the control group allows {group_left:g} more processes and threads"
        mend = f"echo max | sudo tee {group}/pids.max   # in a container: docker update --pids-limit -1 NAME"
        return Finding(NAME, status, found, expected, mend)
    found = f"ulimit -u is {soft:g}, and this user has {num_own} processes and threads already"
    mend = f"ulimit -u {hard:g}" if hard - num_own >= needed else ""
    mend = mend or "echo '* - nproc 65536' | sudo tee -a /etc/security/limits.conf   # then log in again"
    return Finding(NAME, status, found, expected, mend)


def left_in_groups(root: Path) -> tuple[float, str]:
    """What the tightest of this process's control groups still allows, and its folder; infinite where none limits."""
    left, tightest = math.inf, ""
    for folder in hardware.cgroup_folders("pids", root):
        most, now = files.number(folder / "pids.max"), files.number(folder / "pids.current")
        if most is not None and now is not None and most - now < left:
            left, tightest = most - now, str(folder)
    return left, tightest


def own_threads(root: Path) -> int:
    """Processes and threads of this user."""
    num_threads = 0
    for process in (root / "proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.getuid():
                num_threads += len(list((process / "task").iterdir()))
        except OSError:
            continue  # gone meanwhile
    return num_threads
