"""`BucketSum`: one bucket on its way, and the group of those that exchange it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from evenload.training.comm.wire_groups import WireGroups

Steps = Generator[dist.Work, None, None]
"""A sum that begins its collectives one after the other, and yields each to be waited for."""


@dataclass(frozen=True)
class Matrix:
    """A parameter of two or more axes as a matrix: its first axis by all others."""

    name: str
    start: int
    num_rows: int
    num_columns: int

    @property
    def stop(self) -> int:
        return self.start + self.num_rows * self.num_columns


@dataclass
class BucketSum:
    """The values of one bucket on one of the ranks that exchange it; the sum replaces them."""

    values: torch.Tensor
    """float32 or float64, shape ``(n,)``."""
    scalar: torch.Tensor
    """Scalar of the same dtype, which travels as it is: of gradients the norm, whose sum bounds every value of the exact sum."""
    matrices: tuple[Matrix, ...] = ()
    lost: torch.Tensor | None = None
    """The part of this rank's contribution that was lost, like `values`; None if nothing."""
    next_starts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Start values of the next sum of these matrices, equal on all ranks."""


class WireFormat(Protocol):
    name: str

    def sum(self, job: BucketSum, groups: WireGroups) -> Steps:
        """Replace ``job.values`` and ``job.scalar`` by their sums over `groups`, equal in each bit on all its ranks.

        The `index`-th collective runs in ``groups.stages[index]``. The sum over ranks of what they lost is the difference to the
        exact sum.
        """
