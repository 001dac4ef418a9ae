"""Do cores, memory, GPUs and network cards of a run lie at the same NUMA node?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from evenload import hardware
from evenload.doctor import files
from evenload.doctor.checks.iommu import CLASSES, VENDORS
from evenload.doctor.finding import Finding, Options

NAME = "NUMA"


def numa(options: Options) -> Finding:
    """Reads /sys and the cores and memory nodes this process may use."""
    root = options.root_path
    nodes = read_nodes(root)
    status = files.text(root / "proc/self/status").splitlines()
    memory = next((line.partition(":")[2] for line in status if line.startswith("Mems_allowed_list:")), "")
    return judge_numa(nodes, hardware.usable_cores(), files.numbers(memory) or tuple(nodes), read_devices(root))


def judge_numa(
    nodes: Mapping[int, Sequence[int]], usable: Sequence[int], memory_nodes: Sequence[int], devices: Mapping[str, int]
) -> Finding:
    """What the nodes mean: what crosses from one to another takes longer, and shares one link.

    Args:
        nodes: for each node its cores.
        usable: the cores this process may use.
        memory_nodes: the nodes whose memory it may use.
        devices: for each GPU and network card its node; -1 where nobody knows.
    """
    if len(nodes) < 2:
        return Finding(NAME, "ok", "one node: all memory is equally near")
    own = {node for node, cores in nodes.items() if set(cores) & set(usable)}
    far = {name: node for name, node in devices.items() if node in nodes and node not in own}
    if far:
        story = "; ".join(f"{name} is at node {node}" for name, node in far.items())
        found = f"{story}, but this process may use cores of node {_list(own)} alone"
        wanted = sorted({core for node in (*own, *far.values()) for core in nodes[node]})
        mend = f"taskset -c {hardware.spell_numbers(wanted)} evenload run train.py"
        return Finding(NAME, "warn", found, "cores at the node of each GPU and network card", mend)
    without = own - set(memory_nodes)
    if without:
        found = f"cores of node {_list(own)}, but memory of node {_list(memory_nodes)} alone"
        expected = "memory from the nodes whose cores compute"
        mend = f"docker update --cpuset-mems {_list(own | set(memory_nodes))} CONTAINER   # or the control group's cpuset.mems"
        return Finding(NAME, "warn", found, expected, mend)
    placed = [f"{name} at node {node}" for name, node in devices.items() if node in nodes]
    return Finding(NAME, "ok", f"{len(nodes)} nodes, cores of {len(own)}" + "".join(f", {text}" for text in placed))


def read_nodes(root: Path) -> dict[int, tuple[int, ...]]:
    """For each node that has cores, its cores."""
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cores = files.numbers(files.text(folder / "cpulist"))
        if cores:
            found[int(folder.name[4:])] = cores
    return dict(sorted(found.items()))


def read_devices(root: Path) -> dict[str, int]:
    """The node of each GPU on the PCI bus and of each network card that is a device."""
    found = {}
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if files.text(device / "vendor") in VENDORS and files.text(device / "class")[:6] in CLASSES:
            found[f"GPU {device.name}"] = files.number(device / "numa_node")
    for card in sorted((root / "sys/class/net").glob("*")):
        found[card.name] = files.number(card / "device/numa_node")
    return {name: node for name, node in found.items() if node is not None}


def _list(nodes: set[int] | Sequence[int]) -> str:
    return hardware.spell_numbers(sorted(nodes))
