"""Detect collectives of the user's own: torch counts those of each process group."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

_never_equal = itertools.count(1)
_backends: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Any]] = weakref.WeakKeyDictionary()
"""Of each group; it may have several (cpu:gloo,cuda:nccl), each with a count of its own."""


def user_collectives(own: Collection[dist.ProcessGroup | None]) -> int:
    """Return a number that grows when this rank calls a collective, send or receive on a group that is not in `own`.

    Two calls return the same number if nothing was called between them and no group was made or ended. Groups of Evenload's
    are `own`; every other one counts, also the default group, and those that `run.group` made. A group of a backend that
    doesn't count (neither gloo nor NCCL) makes each number a new one. Takes about 2 us for each group.
    """
    if not dist.is_initialized():
        return 0
    total, own_ids = 0, set(map(id, own))
    for group in list(_world.pg_map):  # another thread may make one
        if id(group) in own_ids:
            continue
        try:
            if (backends := _backends.get(group)) is None:
                backends = _backends[group] = [group._get_backend(device) for device in group._device_types]
            for backend in backends:
                total += backend._get_sequence_number_for_group()
        except RuntimeError:
            total += next(_never_equal)
    return total
