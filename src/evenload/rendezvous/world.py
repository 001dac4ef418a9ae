"""From machines that met to one world of ranks: who is which rank, over which backend. Pure: nothing is started here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evenload.errors import ConfigError
from evenload.rendezvous.host_info import Card, Seat
from evenload.training.launch.environment import WorkerSpec


@dataclass(frozen=True)
class Machine:
    """One machine of a run, as all of them know it."""

    name: str
    """What a person calls it: the host's name, with the address where two have the same."""
    address: str
    interface: str
    seats: tuple[Seat, ...]


@dataclass(frozen=True)
class World:
    """All machines of a run, by node rank."""

    machines: tuple[Machine, ...]
    backend: str

    @property
    def world_size(self) -> int:
        """Ranks of all machines."""
        return sum(len(machine.seats) for machine in self.machines)

    def first_rank(self, node_rank: int) -> int:
        """Of a machine; its other ranks follow."""
        return sum(len(machine.seats) for machine in self.machines[:node_rank])

    def ranks(self, node_rank: int) -> str:
        """``rank 2`` or ``ranks 2-3``, for people."""
        first, count = self.first_rank(node_rank), len(self.machines[node_rank].seats)
        return f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"

    def describe(self) -> list[str]:
        """One line for each rank."""
        lines = []
        names = [f"{machine.name}: {seat.device}" for machine in self.machines for seat in machine.seats]
        width = max(map(len, names))
        for rank, seat in enumerate(seat for machine in self.machines for seat in machine.seats):
            threads = f"{seat.num_threads} thread" + ("s" if seat.num_threads != 1 else "")
            held = f", throttled to {seat.speed:g} of its speed" if seat.speed != 1.0 else ""
            lines.append(f"rank {rank} on {names[rank]:<{width}}  {seat.name}  {threads}, {self.backend}{held}")
        return lines


def order(cards: Sequence[Card], num_nodes: int) -> tuple[int, ...]:
    """The indices of the cards by node rank.

    The first card is the meeting point's, which is node 0. Ranks that users fixed hold; the other machines follow by name
    and address, so that the same machines have the same ranks whoever came first.

    Raises:
        ConfigError: two machines have the same rank, or one is out of range.
    """
    fixed: dict[int, int] = {0: 0}
    for index, card in enumerate(cards):
        rank = card.node_rank
        if rank is None or index == 0:
            continue
        if not 0 < rank < num_nodes:
            raise ConfigError(
                f"--node-rank {rank} on {card.label}: node 0 is {cards[0].label}, which serves the meeting point; the others "
                f"are 1 to {num_nodes - 1}"
            )
        if rank in fixed:
            raise ConfigError(
                f"--node-rank {rank} is given on {cards[fixed[rank]].label} and on {card.label}; give each machine its own, "
                "or none"
            )
        fixed[rank] = index
    free = sorted(
        (index for index in range(len(cards)) if index not in fixed.values()),
        key=lambda index: (cards[index].host_name, cards[index].address, index),
    )
    places = sorted(set(range(num_nodes)) - fixed.keys())
    fixed.update(zip(places, free, strict=False))
    return tuple(fixed[rank] for rank in sorted(fixed))


def build_world(cards: Sequence[Card], settings: Mapping[str, Any]) -> World:
    """The world of some machines, in the order of their node ranks.

    Raises:
        ConfigError: ``settings`` fix the shares of another number of ranks.
    """
    names = [card.host_name for card in cards]
    machines = tuple(
        Machine(
            name=card.host_name if names.count(card.host_name) == 1 else card.label,
            address=card.address,
            interface=card.interface,
            seats=card.seats,
        )
        for card in cards
    )
    world = World(_with_unique_names(machines), backend_of(cards))
    shares = settings.get("balance")
    if isinstance(shares, tuple | list) and len(shares) != world.world_size:
        told = ", ".join(f"{len(machine.seats)} on {machine.name}" for machine in machines)
        raise ConfigError(
            f"--balance {','.join(map(str, shares))}: {len(shares)} shares for {world.world_size} ranks ({told}); give one "
            "share for each rank"
        )
    return world


def backend_of(cards: Sequence[Card]) -> str:
    """NCCL where each machine alone would take it, else gloo. Whether two launches share a GPU the ranks see (groups.py)."""
    return "nccl" if all(card.backend == "nccl" for card in cards) else "gloo"


def join_world(own: Sequence[WorkerSpec], world: World, node_rank: int, store: str) -> tuple[WorkerSpec, ...]:
    """This machine's workers, as members of the world.

    Args:
        own: as `plan_workers` planned them for this machine alone; their rank becomes the local rank.
        world: all machines.
        node_rank: of this machine.
        store: ``host:port`` of the store, as this machine reaches it.
    """
    first = world.first_rank(node_rank)
    several = len(world.machines) > 1
    names = tuple(
        f"{machine.name} {seat.name}" if several else seat.name for machine in world.machines for seat in machine.seats
    )
    return tuple(
        replace(
            spec,
            rank=first + local_rank,
            local_rank=local_rank,
            world_size=world.world_size,
            node_rank=node_rank,
            num_nodes=len(world.machines),
            workers=tuple(f"worker-{rank}" for rank in range(world.world_size)),
            device_names=names,
            backend=world.backend,
            store=store,
            interface=world.machines[node_rank].interface if several else "",
        )
        for local_rank, spec in enumerate(own)
    )


def as_message(world: World) -> dict[str, Any]:
    """The world as it travels."""
    return {
        "backend": world.backend,
        "machines": [
            {
                "name": machine.name,
                "address": machine.address,
                "interface": machine.interface,
                "seats": [[seat.device, seat.name, seat.num_threads, seat.speed] for seat in machine.seats],
            }
            for machine in world.machines
        ],
    }


def from_message(raw: Any) -> World:
    """A world that has travelled, from the meeting point, whose version is ours."""
    return World(
        machines=tuple(
            Machine(
                machine["name"],
                machine["address"],
                machine["interface"],
                tuple(Seat(*seat) for seat in machine["seats"]),
            )
            for machine in raw["machines"]
        ),
        backend=raw["backend"],
    )


def _with_unique_names(machines: tuple[Machine, ...]) -> tuple[Machine, ...]:
    """Two launches on one machine have the same name and address: they are counted."""
    names = [machine.name for machine in machines]
    return tuple(
        machine
        if names.count(machine.name) == 1
        else replace(machine, name=f"{machine.name} #{names[: index + 1].count(machine.name)}")
        for index, machine in enumerate(machines)
    )
