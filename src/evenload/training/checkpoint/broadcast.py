"""Send rank 0's checkpoint to ranks that don't see its folder: on another machine, without a shared disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evenload.errors import CheckpointError, PeerLostError
from evenload.training.checkpoint import files
from evenload.training.comm.groups import Groups

_CHUNK_BYTES = 256 << 20
"""Outside of `evenload run` each chunk has the whole `timeout_s`."""


UNUSABLE = -2.0
"""In place of a step: there are checkpoints, and none can be used."""


def checkpoint_key(checkpoint: Path | None, unusable: bool = False) -> list[float]:
    """Return step, time of writing (μs) and size of the small file: equal for one checkpoint on all machines.

    `unusable` means that there are some, and none can be used.
    """
    if checkpoint is None:
        return [UNUSABLE if unusable else -1.0, 0.0, 0.0]
    try:
        stat = (checkpoint / files.SKELETON).stat()
    except OSError:  # reading the checkpoint reports the reason
        return [float(files.step_of(checkpoint)), 0.0, 0.0]
    return [float(files.step_of(checkpoint)), float(stat.st_mtime_ns // 1000), float(stat.st_size)]


def ranks_without(rows: Sequence[Sequence[float]], folder: Path) -> list[int]:
    """Return the ranks that don't see rank 0's newest checkpoint, from each rank's `checkpoint_key`.

    Raises:
        CheckpointError: A rank has a newer checkpoint, whose steps would be lost, or rank 0 can't use its own.
    """
    first = rows[0]
    if first[0] == UNUSABLE:
        raise CheckpointError("rank 0 can't use its checkpoints, and reports why")
    for rank, row in enumerate(rows):
        if row[0] > first[0]:
            have = f"step {int(first[0])}" if first[0] >= 0 else "none"
            raise CheckpointError(
                f"rank {rank} has a newer checkpoint in its {folder} (step {int(row[0])}) than rank 0 ({have}), which writes "
                "them; start with that machine as the first (--host, or --node-rank 0), or copy its folder to rank 0's machine, "
                "or start anew with --fresh"
            )
    return [rank for rank, row in enumerate(rows) if list(row) != list(first)]


def broadcast_state(state: dict[str, Any] | None, groups: Groups) -> dict[str, Any]:
    """Return rank 0's state on all ranks; the others pass None. PeerLostError if a rank was lost meanwhile."""
    payload = files.to_bytes(state) if state is not None else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([payload.numel()])
    try:
        groups.wait(dist.broadcast(size, group_src=0, group=groups.control, async_op=True))
        if state is None:
            payload = torch.empty(int(size), dtype=torch.uint8)
        for start in range(0, payload.numel(), _CHUNK_BYTES):
            part = payload[start : start + _CHUNK_BYTES]
            groups.wait(dist.broadcast(part, group_src=0, group=groups.control, async_op=True))
    except RuntimeError as error:
        raise PeerLostError(f"rank 0's checkpoint did not reach all ranks: {error}") from error
    return state if state is not None else dict(files.from_bytes(payload))
