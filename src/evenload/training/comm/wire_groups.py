"""`WireGroups`: the ranks of a machine sum first, then one rank of each machine exchanges with those of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

NUM_STAGES = 2
"""Collectives of one sum between machines; each has its own group, for those of several buckets interleave differently on each
rank."""


@dataclass(frozen=True)
class WireGroups:
    leaders: tuple[int, ...]
    """One rank of each machine; all ranks if there is one machine."""
    index: int
    """Of this rank's machine among them."""
    leads: bool
    """True if this rank is the one of its machine."""
    inner: dist.ProcessGroup | None
    """The ranks of this machine, the leader first; None if there is one."""
    stages: tuple[dist.ProcessGroup, ...]
    """The leaders; empty on other ranks."""
    on_gpus: bool
    """All of them use NCCL."""

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [*self.stages, *([] if self.inner is None else [self.inner])]


def make_wire_groups(
    hosts: Sequence[Sequence[int]],
    rank: int,
    ranks: Sequence[int],
    backend: str,
    make_group: Callable[[Sequence[int], str], dist.ProcessGroup | None],
) -> WireGroups | None:
    """Make the groups of the ranks that compute, on all ranks; None outside, and if there is only one."""
    machines = find_machines(hosts, ranks)
    leaders = tuple(machine[0] for machine in machines)
    if len(leaders) < 2:
        return None
    own = [make_group(machine, backend) for machine in machines if len(machine) > 1]
    stages = [make_group(leaders, backend) for _ in range(NUM_STAGES)]
    if rank not in ranks:
        return None
    index = next(n for n, machine in enumerate(machines) if rank in machine)
    return WireGroups(
        leaders=leaders,
        index=index,
        leads=rank in leaders,
        inner=next((group for group in own if group is not None), None),
        stages=tuple(group for group in stages if group is not None),
        on_gpus=backend == "nccl",
    )


def find_machines(hosts: Sequence[Sequence[int]], ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the computing ranks of each machine, in the order of their first; with one machine, each rank for itself."""
    machines = sorted(found for host in hosts if (found := tuple(sorted(set(host) & set(ranks)))))
    return machines if len(machines) > 1 else [(rank,) for rank in sorted(ranks)]
