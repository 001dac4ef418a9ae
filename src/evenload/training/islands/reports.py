"""`IslandReports`: send times and requests between islands beside the computation: no rank waits for a round trip.

    LEAD steps before it counts: a row of each rank -> half of them later rank 0 decides by all rows, and sends it -> the step

A rank waits only where another one is further behind than that, or where steps are shorter than round trips.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from evenload.training.comm.groups import Groups
from evenload.training.comm.pending import Pending
from evenload.training.comm.store import new_group
from evenload.training.comm.subset import begin_gather


class IslandReports:
    """Reports of all ranks, one at a time. Each begins on all ranks, and is taken further in the same order."""

    def __init__(self, world: Groups) -> None:
        """Make the group of all ranks, which call it together."""
        self._group = new_group(world.ranks, "gloo", world.limits) if world.world_size > 1 else None
        self._world = world
        self.num_begun = 0
        """Of the two exchanges of a report: its rows, and what rank 0 decides."""
        self.waited_s = 0.0
        """Seconds that this rank has waited in this report."""
        self._table = self._decided = torch.empty(0)
        self._pending = Pending(None, blocking=False)

    def send_row(self, row: Sequence[float]) -> None:
        self.num_begun, self.waited_s = 1, 0.0
        self._table = torch.tensor([row], dtype=torch.float64)
        if self._group is not None:
            self._table, work = begin_gather(self._table[0], self._group)
            self._pending = self._world.begin(work, True)

    @property
    def rows(self) -> list[list[float]]:
        """Of all ranks, by rank, after `wait`."""
        rows: list[list[float]] = self._table.tolist()
        return rows

    def send_decision(self, values: Sequence[int]) -> None:
        """Send rank 0's integers; those of the others are as many, and do not count."""
        self.num_begun = 2
        self._decided = torch.tensor(values, dtype=torch.int64)
        if self._group is not None:
            work = dist.broadcast(self._decided, group_src=0, group=self._group, async_op=True)
            self._pending = self._world.begin(work, True)

    def end(self) -> list[int]:
        """Return rank 0's integers."""
        self.wait()
        self.num_begun = 0
        return self._decided.tolist()

    def wait(self) -> None:
        """Wait for what was sent last."""
        began_s = time.perf_counter()
        self._pending.wait()
        self.waited_s += time.perf_counter() - began_s
