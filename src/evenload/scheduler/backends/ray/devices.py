"""Ray's nodes as devices of the core, and devices given to a job as bundles of a placement group; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenload.scheduler.core.values import Device

_ACCELERATOR = "accelerator_type:"
NODE_LABEL = "ray.io/node-id"
"""Ray labels each node with its own id."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a job holds of one node."""

    node: str
    num_cpus: int = 0
    num_gpus: int = 0

    def resources(self) -> dict[str, float]:
        """As a placement group asks for them."""
        return {"GPU": float(self.num_gpus)} if self.num_gpus else {"CPU": float(self.num_cpus)}


def devices_of(nodes: Iterable[Mapping[str, Any]]) -> tuple[Device, ...]:
    """The devices of the nodes that are alive, as ``ray.nodes()`` tells them: a node's GPUs, or its CPUs if it has none."""
    found = []
    for node in nodes:
        if not node.get("Alive"):
            continue
        name, resources = str(node["NodeID"]), node.get("Resources", {})
        num_gpus = int(resources.get("GPU", 0))
        kinds = [key.removeprefix(_ACCELERATOR).lower() for key in resources if key.startswith(_ACCELERATOR)]
        kind = (kinds[0] if kinds else "gpu") if num_gpus else "cpu"
        number = num_gpus or int(resources.get("CPU", 0))
        found += [Device(f"{name}/{kind}/{index}", name, kind=kind) for index in range(number)]
    return tuple(found)


def bundles_of(devices: Sequence[Device]) -> tuple[Bundle, ...]:
    """One bundle a node, in the order in which the devices were given."""
    counts: dict[str, tuple[int, int]] = {}
    for device in devices:
        cpus, gpus = counts.get(device.host, (0, 0))
        counts[device.host] = (cpus + 1, gpus) if device.kind == "cpu" else (cpus, gpus + 1)
    return tuple(Bundle(node, cpus, gpus) for node, (cpus, gpus) in counts.items())
