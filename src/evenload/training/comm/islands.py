"""Islands: ranks joined by fast links, each island with process groups of its own, and the link between them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from evenload.errors import ConfigError
from evenload.training.comm.collective_errors import collective_error
from evenload.training.comm.control import Control, Operation
from evenload.training.comm.generation import Generation, Membership
from evenload.training.comm.groups import Groups
from evenload.training.comm.pending import Pending
from evenload.training.comm.store import new_group
from evenload.training.comm.wire_groups import NUM_STAGES, WireGroups


@dataclass(frozen=True)
class IslandMap:
    """The ranks of each island; equal on all ranks."""

    ranks: tuple[tuple[int, ...], ...]
    """Of each island."""
    own: int
    """The island of this rank."""

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this rank's island."""
        return self.ranks[self.own]

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.ranks))

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each island."""
        return tuple(members[0] for members in self.ranks)

    def __str__(self) -> str:
        return " / ".join(", ".join(map(str, members)) for members in self.ranks)


def find_islands(
    wanted: tuple[tuple[int, ...], ...] | None, setting: str, node: str, rank: int, control: Control
) -> IslandMap:
    """Return the islands that were set, or one for each machine. All ranks call it.

    Args:
        wanted: the setting ``islands``; None where it was not set.
        setting: its spelling, for an error.
        node: names this machine.
        rank: of this process.
        control: among all ranks.

    Raises:
        ConfigError: the islands do not hold exactly the ranks of the job.
    """
    rows = control.exchange(Operation.INIT, [float(zlib.crc32(node.encode()))])
    if wanted is None:
        machines: dict[float, list[int]] = {}
        for other, row in enumerate(rows):
            machines.setdefault(row[0], []).append(other)
        wanted = tuple(tuple(ranks) for ranks in machines.values())
    num_named = sum(map(len, wanted))
    if num_named != len(rows):
        raise ConfigError(
            f"{setting}: it names {num_named} ranks, but the job has {len(rows)}; every rank belongs to one island, such as "
            f"{'/'.join(map(str, range(len(rows))))}"
        )
    return IslandMap(wanted, next(index for index, ranks in enumerate(wanted) if rank in ranks))


class IslandGroups(Groups):
    """The groups of one island: a job of its own to everything inside a step. Ranks count from 0 within it."""

    _may_come_late = False

    def __init__(self, world: Groups, islands: IslandMap, **options: Any) -> None:
        """Only the members of an island call it together; `options` are those of `Groups`."""
        self._world_ranks = islands.members
        everyone = world.membership
        workers = tuple(everyone.workers[rank] for rank in islands.members)
        membership = Membership(everyone.number, workers, everyone.store)
        super().__init__(membership, islands.members.index(world.rank), **options)
        self.generation = replace(self.generation, island=islands.own)

    def _build(self, membership: Membership, rank: int, check: Callable[[], None] | None = None) -> Generation:
        if len(self._world_ranks) > 1:
            return super()._build(membership, rank)
        self._collectives.reopen()
        return Generation(membership.number, membership, rank, ranks=(rank,), computing=(rank,))

    def _make_group(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup | None:
        members = [self._world_ranks[rank] for rank in ranks]
        return new_group(members, backend, self.limits, members_alone=True)


class IslandLink:
    """Sums over islands: the first rank of each sums over the link, and passes the sum on inside its island."""

    def __init__(self, world: Groups, island: Groups, islands: IslandMap, *, has_wire: bool = False) -> None:
        """Make the groups of the first ranks; all ranks call it. `has_wire`: for a sum of several collectives."""
        self._island = island
        self.begin = island.begin
        self.num_islands = len(islands)
        leaders = tuple(sorted(islands.leaders))  # as torch orders a group
        on_gpus = set(leaders) <= set(world.nccl_ranks)
        made: list[dist.ProcessGroup | None] = []
        if len(islands) > 1:
            backend = "nccl" if on_gpus else "gloo"
            made = [new_group(leaders, backend, world.limits) for _ in range(NUM_STAGES if has_wire else 1)]
        stages = tuple(group for group in made if group is not None)
        self.groups = WireGroups(leaders, leaders.index(islands.members[0]), bool(stages), None, stages, on_gpus)
        """Of the first ranks, one from each island."""

    def sum_async(self, tensor: torch.Tensor) -> Pending:
        """Begin a sum over the islands, in place, on their first ranks; nothing happens on the others."""
        if not self.groups.leads:
            return Pending(None, blocking=False)
        work = dist.all_reduce(tensor, group=self.groups.stages[0], async_op=True)
        return self.begin(work, tensor.device.type == "cpu")

    def pass_on(self, tensor: torch.Tensor) -> None:
        """Send what the first rank of this island holds to its other ranks."""
        group = self._island.gradients
        if group is None or self.num_islands == 1:
            return
        try:
            self._island.wait(dist.broadcast(tensor, group_src=0, group=group, async_op=True), tensor.device)
        except RuntimeError as error:
            raise collective_error(error, "the islands' sum did not arrive") from error
