"""`Subset`: exchanges among the members of one of the user's process groups, over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenload.training.comm.pending import Pending


@dataclass(frozen=True)
class Subset:
    """Members of one of the user's process groups, which take part in an exchange instead of all ranks."""

    control: dist.ProcessGroup
    rank: int
    """Rank of this process among all ranks."""
    ranks: tuple[int, ...]
    timeout_s: float
    closed: bool
    gone: bool

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def wait(self, work: dist.Work | None) -> None:
        """Wait for a collective in the group; PeerLostError if a member is gone."""
        Pending(work, blocking=False).wait()

    def exchange_row(self, row: Sequence[float]) -> NDArray[np.float64]:
        """Exchange numbers and return those of all members, shape ``(num_ranks, len(row))``. PeerLostError if one is gone."""
        everyone, work = begin_gather(torch.tensor(row, dtype=torch.float64), self.control)
        self.wait(work)
        rows: NDArray[np.float64] = everyone.numpy()
        return rows


def begin_gather(own: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin an all-gather, and return the table that it fills, shape ``(num_ranks, num_values)``."""
    everyone = own.new_empty(group.size(), own.numel())
    return everyone, dist.all_gather(list(everyone.unbind()), own, group=group, async_op=True)
