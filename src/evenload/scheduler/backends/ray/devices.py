"""Convert Ray's nodes to devices of the queue, and a job's devices to bundles of a placement group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenload.scheduler.core.values import Device

_ACCELERATOR = "accelerator_type:"
NODE_LABEL = "ray.io/node-id"
"""Label with which Ray marks each node."""


@dataclass(frozen=True, slots=True)
class NodeBundle:
    """A job's devices on one node."""

    node: str
    num_cpus: int = 0
    num_gpus: int = 0

    def resources(self) -> dict[str, float]:
        return {"GPU": float(self.num_gpus)} if self.num_gpus else {"CPU": float(self.num_cpus)}


def host_names(nodes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return a name of each live node in `ray.nodes()` for people: its host name, else its address, as far as only it has it."""
    alive = [node for node in nodes if node.get("Alive")]
    found = {}
    for node in alive:
        node_id = str(node["NodeID"])
        for key in ("NodeManagerHostname", "NodeManagerAddress"):
            name = node.get(key)
            if name and sum(1 for other in alive if other.get(key) == name) == 1:
                found[node_id] = str(name)
                break
        else:
            address = node.get("NodeManagerAddress")
            found[node_id] = f"{address}/{node_id[:6]}" if address else node_id[:12]
    return found


def device_label(device: str, names: Mapping[str, str]) -> str:
    """Return a device's name for people, such as ``box1:gpu0``."""
    node, kind, index = device.split("/")
    return f"{names.get(node, node[:12])}:{kind}{'' if kind.isalpha() else '/'}{index}"


def devices_of(nodes: Iterable[Mapping[str, Any]]) -> tuple[Device, ...]:
    """Return the devices of the live nodes in `ray.nodes()`: a node's GPUs, or its CPUs if it has none."""
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


def bundles_of(devices: Sequence[Device]) -> tuple[NodeBundle, ...]:
    """Return one bundle per node, in the order of the devices."""
    counts: dict[str, tuple[int, int]] = {}
    for device in devices:
        cpus, gpus = counts.get(device.host, (0, 0))
        counts[device.host] = (cpus + 1, gpus) if device.kind == "cpu" else (cpus, gpus + 1)
    return tuple(NodeBundle(node, cpus, gpus) for node, (cpus, gpus) in counts.items())
