"""`GridGather`: all-gather over many hosts in two rounds, along the rows and then along the columns of a grid.

The all-gather of gloo is a ring: of n members it takes n - 1 hops, one after the other. Over a grid it takes about 2 sqrt(n),
with the same bytes, and a member has connections only to those in its row and column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from evenload.balance.split import even_shares
from evenload.training.comm.pending import Pending

LEAST_MEMBERS = 17
"""Fewer members use one ring: a second round wakes threads once more."""

Begin = Callable[[torch.Tensor, dist.ProcessGroup], tuple[torch.Tensor, Pending]]
"""Begins an all-gather, and returns the table that it fills."""


class GridGather:
    def __init__(
        self,
        members: Sequence[int],
        new_group: Callable[[Sequence[int]], dist.ProcessGroup | None],
        begin: Begin,
    ) -> None:
        """All ranks make it, members and others, because all take part in making groups.

        Args:
            members: the ranks that gather, ascending as in a process group.
            new_group: makes the group of some ranks; None for a rank outside.
            begin: begins an all-gather in a group.
        """
        grid = grid_rows(len(members))
        self._begin = begin
        self._width = len(grid[0])
        self._cells = [row * self._width + column for row, cells in enumerate(grid) for column in range(len(cells))]
        """Where the vector of each member is in the whole table, in which short rows are padded."""
        self._row: dist.ProcessGroup | None = None
        self._columns: list[dist.ProcessGroup] = []
        """A short row's first member stands for the missing one, too."""
        for cells in grid:
            self._row = new_group([members[cell] for cell in cells]) or self._row
        for column in range(self._width):
            ranks = [members[cells[column if column < len(cells) else 0]] for cells in grid]
            if (group := new_group(ranks)) is not None:
                self._columns.append(group)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [group for group in (self._row, *self._columns) if group is not None]

    def __call__(self, own: torch.Tensor) -> torch.Tensor:
        """Return the vectors of all members, shape ``(num_members, len(own))``; all members call it."""
        if self._row is None:  # a rank outside
            return own.clone()
        table, pending = self._begin(own, self._row)
        pending.wait()
        padded = own.new_zeros(self._width, own.numel())
        padded[: len(table)] = table
        begun = [self._begin(padded.view(-1), column) for column in self._columns]
        for _, pending in begun:
            pending.wait()
        return begun[0][0].view(-1, own.numel())[self._cells]


def grid_rows(num_members: int) -> list[range]:
    """Return the members of each row of a grid that is nearly square; rows differ by one member at most, long ones first."""
    start = 0
    rows: list[range] = []
    for size in even_shares(num_members, math.isqrt(num_members)):
        rows.append(range(start, start + size))
        start += size
    return rows


def num_hops(num_members: int) -> int:
    """Return the hops of an all-gather, one after the other."""
    if num_members < LEAST_MEMBERS:
        return num_members - 1
    rows = grid_rows(num_members)
    return len(rows[0]) - 1 + len(rows) - 1
