"""`Generation`: who takes part in a job now, and through which process groups. One value, replaced as a whole.

All parts read it live through `Groups.generation`; nobody keeps a copy, so rank, size and groups never mix two generations.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch.distributed as dist

from evenload.errors import PeerLostError
from evenload.training.comm.hierarchical_sum import HierarchicalSum
from evenload.training.comm.host_exchange import HostExchange
from evenload.training.comm.shared_memory import SharedChannel
from evenload.training.comm.shared_sums import SharedSums
from evenload.training.comm.wire_groups import WireGroups


class CollectiveAbortedError(PeerLostError):
    """A collective inside a forward or backward ended early: another rank has left it, and may still be alive."""


@dataclass(frozen=True)
class Membership:
    """Members of one generation; the index of a worker is its rank."""

    number: int
    """Grows with each change of the members."""
    workers: tuple[str, ...]
    store: str
    """`WorkerSpec.store`; empty for a single rank, or if the script made the process group."""
    device_names: tuple[str, ...] = ()
    """Names of the members' devices by rank, where they have changed since the start; empty: those of `WorkerSpec`."""


@dataclass(frozen=True, eq=False)
class ComputingGroups:
    """The groups of the ranks that compute: the fields of `Generation` with these names."""

    gradients: dist.ProcessGroup | None
    hierarchy: HierarchicalSum | None
    statistics: dist.ProcessGroup | SharedChannel | None
    wire: WireGroups | None = None
    sums: SharedSums | None = None

    @cached_property
    def groups(self) -> list[dist.ProcessGroup]:
        parts = [part.groups for part in (self.hierarchy, self.wire) if part is not None]
        found = (self.gradients, self.statistics, *chain.from_iterable(parts))
        return [group for group in found if isinstance(group, dist.ProcessGroup)]

    @property
    def fields(self) -> dict[str, Any]:
        """The fields by name; `vars` holds `groups` too, once it was asked for."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def close(self) -> None:
        """End the thread of `hierarchy` and leave shared memory; process groups end elsewhere."""
        if self.hierarchy is not None:
            self.hierarchy.close()
        if isinstance(self.statistics, SharedChannel):
            self.statistics.close()
        if self.sums is not None:
            self.sums.close()


@dataclass(frozen=True, eq=False)
class Generation:
    """Membership, this rank, and the groups by what travels in them; None stands for a group of one.

    Three groups, because their collectives interleave differently on each rank: gradients leave in the middle of a backward,
    statistics (BatchNorm) inside forward and backward, control at the boundaries.
    """

    number: int
    """Grows with each change of the members or of the ranks that compute."""
    membership: Membership
    rank: int
    ranks: tuple[int, ...]
    """The ranks in the control group: rows of an exchange, in this order."""
    computing: tuple[int, ...]
    """The ranks in the groups of gradients and statistics; a rank outside them computes nothing."""
    control: dist.ProcessGroup | None = None
    gradients: dist.ProcessGroup | None = None
    hierarchy: HierarchicalSum | None = None
    """Sums gradients where GPUs compute beside other ranks; otherwise they are summed in `gradients`."""
    statistics: dist.ProcessGroup | SharedChannel | None = None
    """Shared memory where all computing ranks are on one host and on CPUs."""
    wire: WireGroups | None = None
    """Of a job whose gradients travel in another format; see parallel/wire/."""
    sums: SharedSums | None = None
    """Sums of small gradients, where all computing ranks are on one host and on CPUs; the others travel in `gradients`."""
    hosts: tuple[tuple[int, ...], ...] = ()
    """The ranks of each machine."""
    rows: HostExchange | None = None
    """The exchange of rows where ranks share a host; otherwise rows travel in `control`."""
    island: int = 0
    """Coordinate on the island axis; the groups are those of this island (`Groups(within=...)`)."""

    @cached_property
    def world_size(self) -> int:
        return len(self.ranks)

    @cached_property
    def computes(self) -> bool:
        """True if this rank takes part in gradients and statistics."""
        return self.rank in self.computing

    @property
    def num_data(self) -> int:
        """Size of the data axis: the number of columns of a plan."""
        return len(self.membership.workers)

    @cached_property
    def data_index(self) -> int:
        """Coordinate of this rank on the data axis: its column in a plan."""
        return self.rank
