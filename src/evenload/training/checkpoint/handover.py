"""Rank 0's checkpoint, for ranks that don't see its folder: on another machine, without a shared disk."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evenload.errors import CheckpointError, PeerLostError
from evenload.training.checkpoint import files
from evenload.training.comm.groups import Groups

_CHUNK_BYTES = 256 << 20
"""Each part has the groups' time limit for itself."""


def identity(checkpoint: Path | None) -> list[float]:
    """What tells checkpoints apart without reading them: the step, the time of writing (μs), the size of the small file.

    Two machines that see one file, or a copy that kept its time, have the same.
    """
    if checkpoint is None:
        return [-1.0, 0.0, 0.0]
    try:
        stat = (checkpoint / files.SKELETON).stat()
    except OSError:  # reading it will tell why
        return [float(files.step_of(checkpoint)), 0.0, 0.0]
    return [float(files.step_of(checkpoint)), float(stat.st_mtime_ns // 1000), float(stat.st_size)]


def strangers(rows: Sequence[Sequence[float]], folder: Path) -> list[int]:
    """The ranks that don't see rank 0's newest checkpoint.

    Args:
        rows: each rank's `identity`.
        folder: the run folder, for the error.

    Raises:
        CheckpointError: one has a newer one, which training on would overtake.
    """
    first = rows[0]
    for rank, row in enumerate(rows):
        if row[0] > first[0]:
            have = f"step {int(first[0])}" if first[0] >= 0 else "none"
            raise CheckpointError(
                f"rank {rank} has a newer checkpoint in its {folder} (step {int(row[0])}) than rank 0 ({have}), which writes "
                "them; start with that machine as the first (--host, or --node-rank 0), or copy its folder to rank 0's machine, "
                "or start anew with --fresh"
            )
    return [rank for rank, row in enumerate(rows) if list(row) != list(first)]


def hand_over(state: dict[str, Any] | None, groups: Groups) -> dict[str, Any]:
    """Rank 0's state, on all ranks; the others give None.

    Raises:
        PeerLostError: a rank is gone meanwhile.
    """
    buffer = io.BytesIO()
    if state is not None:
        torch.save(state, buffer)
    size = torch.tensor([buffer.tell()])
    try:
        dist.broadcast(size, group_src=0, group=groups.control)
        payload = (
            torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
            if state is not None
            else torch.empty(int(size), dtype=torch.uint8)
        )
        for start in range(0, payload.numel(), _CHUNK_BYTES):
            dist.broadcast(payload[start : start + _CHUNK_BYTES], group_src=0, group=groups.control)
    except RuntimeError as error:
        raise PeerLostError(f"rank 0's checkpoint did not reach all ranks: {error}") from error
    if state is not None:
        return state
    with torch.serialization.safe_globals(files.SAFE):
        received: dict[str, Any] = torch.load(io.BytesIO(payload.numpy().tobytes()), weights_only=True)
    return received
