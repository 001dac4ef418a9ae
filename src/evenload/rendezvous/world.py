"""The ranks of all machines: which machine has which rank, on which device, over which backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenload.errors import ConfigError
from evenload.rendezvous.host_info import DeviceSlot, HostInfo
from evenload.rendezvous.rank_backends import common_backend, used_backends


@dataclass(frozen=True)
class Machine:
    """One machine of a run, as all of them know it."""

    name: str
    """The host's name; with the address where two machines have the same name."""
    address: str
    interface: str
    slots: tuple[DeviceSlot, ...]
    endpoint: str = ""
    """``host:port`` at which it is reached where it is the coordinator; empty in a run that can't go on without its first."""


@dataclass(frozen=True)
class RankAssignment:
    """The part of a worker's specification that is known once all machines have met."""

    rank: int
    local_rank: int
    world_size: int
    node_rank: int
    num_nodes: int
    workers: tuple[str, ...]
    """Stable ids of all workers; the index is the rank."""
    device_names: tuple[str, ...]
    backend: str
    store: str
    """``host:port`` of the store, as this machine reaches it."""
    interface: str
    """For gloo and NCCL."""


@dataclass(frozen=True)
class World:
    """All machines of a run, by node rank."""

    machines: tuple[Machine, ...]

    @property
    def _inner_backends(self) -> list[str]:
        return [slot.inner_backend for machine in self.machines for slot in machine.slots]

    @property
    def world_size(self) -> int:
        return sum(len(machine.slots) for machine in self.machines)

    def first_rank(self, node_rank: int) -> int:
        return sum(len(machine.slots) for machine in self.machines[:node_rank])

    def describe_ranks(self, node_rank: int) -> str:
        """Return ``rank 2`` or ``ranks 2-3``."""
        first, count = self.first_rank(node_rank), len(self.machines[node_rank].slots)
        return f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"

    def describe(self) -> list[str]:
        """Return one line for each rank."""
        lines = []
        names = [f"{machine.name}: {slot.device}" for machine in self.machines for slot in machine.slots]
        width = max(map(len, names))
        backends = used_backends(self._inner_backends)
        for rank, slot in enumerate(slot for machine in self.machines for slot in machine.slots):
            threads = f"{slot.num_threads} thread" + ("s" if slot.num_threads != 1 else "")
            throttled = f", throttled to {slot.speed:g} of its speed" if slot.speed != 1.0 else ""
            lines.append(f"rank {rank} on {names[rank]:<{width}}  {slot.name}  {threads}, {backends[rank]}{throttled}")
        return lines

    def assignments(self, node_rank: int, store: str) -> tuple[RankAssignment, ...]:
        """Return the assignments of one machine's ranks, by local rank; ``store`` as that machine reaches it."""
        names = tuple(f"{machine.name} {slot.name}" for machine in self.machines for slot in machine.slots)
        machine = self.machines[node_rank]
        return tuple(
            RankAssignment(
                rank=self.first_rank(node_rank) + local_rank,
                local_rank=local_rank,
                world_size=self.world_size,
                node_rank=node_rank,
                num_nodes=len(self.machines),
                workers=tuple(f"worker-{rank}" for rank in range(self.world_size)),
                device_names=names,
                backend=common_backend(self._inner_backends),
                store=store,
                interface=machine.interface,
            )
            for local_rank in range(len(machine.slots))
        )


def order(infos: Sequence[HostInfo], num_nodes: int) -> tuple[int, ...]:
    """Return the indices of the machines by node rank.

    The first machine is the coordinator, which is node 0. Ranks that users fixed are kept; the other machines follow by name
    and address, so that the same machines have the same ranks whichever connected first. ConfigError: two machines have the
    same rank, or one is out of range.
    """
    fixed: dict[int, int] = {0: 0}
    for index, info in enumerate(infos):
        rank = info.node_rank
        if rank is None or index == 0:
            continue
        if not 0 < rank < num_nodes:
            raise ConfigError(
                f"--node-rank {rank} on {info.label}: node 0 is {infos[0].label}, the coordinator; the others are 1 to "
                f"{num_nodes - 1}"
            )
        if rank in fixed:
            raise ConfigError(
                f"--node-rank {rank} is given on {infos[fixed[rank]].label} and on {info.label}; give each machine its own, "
                "or none"
            )
        fixed[rank] = index
    free = sorted(
        (index for index in range(len(infos)) if index not in fixed.values()),
        key=lambda index: (infos[index].host_name, infos[index].address, index),
    )
    free_ranks = sorted(set(range(num_nodes)) - fixed.keys())
    fixed.update(zip(free_ranks, free, strict=False))
    return tuple(fixed[rank] for rank in sorted(fixed))


def build_world(infos: Sequence[HostInfo], settings: Mapping[str, Any]) -> World:
    """Build the world of machines in the order of their node ranks.

    ConfigError: ``settings`` fix the shares of another number of ranks. Ranks that share a GPU because two launches do are
    found later, by the ranks (groups.py).
    """
    host_names = [info.host_name for info in infos]
    names = [info.host_name if host_names.count(info.host_name) == 1 else info.label for info in infos]
    machines = tuple(
        # Two launches on one machine have the same name and address: they are numbered.
        Machine(
            name=name if names.count(name) == 1 else f"{name} #{names[: index + 1].count(name)}",
            address=info.address,
            interface=info.interface,
            slots=info.slots,
            endpoint=info.endpoint,
        )
        for index, (name, info) in enumerate(zip(names, infos, strict=True))
    )
    world = World(machines)
    shares = settings.get("balance")
    if isinstance(shares, tuple | list) and len(shares) != world.world_size:
        counts = ", ".join(f"{len(info.slots)} on {name}" for name, info in zip(names, infos, strict=True))
        raise ConfigError(
            f"--balance {','.join(map(str, shares))}: {len(shares)} shares for {world.world_size} ranks ({counts}); give one "
            "share for each rank"
        )
    return world


def from_message(raw: Any) -> World:
    """Read a world from a message of the coordinator, whose version is ours."""
    return World(
        tuple(
            Machine(**{**machine, "slots": tuple(DeviceSlot(**slot) for slot in machine["slots"])})
            for machine in raw["machines"]
        )
    )
