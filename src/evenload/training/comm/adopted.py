"""Adopt a process group that the script made before `evenload.init`. Evenload uses it and never ends it."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from evenload.errors import LaunchError
from evenload.training.launch.environment import WORKER_VARIABLE, WorkerSpec, detect

_KNOWN = ("gloo", "nccl")


def adopt_group() -> WorkerSpec:
    """Return the spec of this process by the script's own process group.

    The group takes precedence over the variables of torchrun or srun, whose tasks may start further processes. Only our own
    launcher must agree with it: LaunchError otherwise, or if the group's backend doesn't allow our groups.
    """
    _check_backend()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if WORKER_VARIABLE in os.environ:
        spec = detect()
        if (rank, world_size) == (spec.rank, spec.world_size):
            return spec
        how = "evenload.spawn" if spec.origin == "spawn" else "evenload run"
        raise LaunchError(
            f"the script's own process group (dist.init_process_group) makes this process rank {rank} of {world_size}, but {how} "
            f"started it as rank {spec.rank} of {spec.world_size}; use only one of the two"
        )
    return replace(
        WorkerSpec(),
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        world_size=world_size,
        workers=tuple(f"worker-{index}" for index in range(world_size)),
        device=_device(),
        origin="group",
    )


def _device() -> str:
    group = dist.group.WORLD
    if group is not None and group.bound_device_id is not None:
        return str(group.bound_device_id)
    if "LOCAL_RANK" not in os.environ and torch.cuda.is_initialized() and torch.cuda.current_device():  # type: ignore[no-untyped-call]
        return f"cuda:{torch.cuda.current_device()}"
    return "auto"


def _check_backend() -> None:
    config = dist.get_backend_config()
    if {part.rpartition(":")[2] for part in config.split(",")} <= set(_KNOWN):
        return
    raise LaunchError(
        f"the script's own process group has the backend {config}; Evenload makes gloo and nccl groups beside it, which need a "
        "group of these: call dist.init_process_group with backend='gloo' or 'nccl', or leave it out and let evenload.init "
        "make the groups"
    )
