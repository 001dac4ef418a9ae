"""Check of the NUMA nodes of cores, memory, GPUs and network cards."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from evenload import hardware
from evenload.doctor import system_files
from evenload.doctor.checks.iommu import gpu_devices
from evenload.doctor.finding import Finding, Options, ok, warn


def numa(options: Options) -> Finding:
    root = options.root_path
    nodes = _read_nodes(root)
    if len(nodes) < 2:
        return ok("one node")
    usable = set(hardware.usable_cores())
    own = {node for node, cores in nodes.items() if set(cores) & usable}
    devices = _read_devices(root)
    far = {name: node for name, node in devices.items() if node in nodes and node not in own}
    if far:
        found = "; ".join(f"{name} is on node {node}" for name, node in far.items())
        wanted = sorted({core for node in (*own, *far.values()) for core in nodes[node]})
        fix = f"taskset -c {hardware.spell_numbers(wanted)} evenload run train.py"
        found += f", but this process may only use cores of node {_list(own)}"
        return warn(found, "cores on the node of each GPU and network card", fix)
    status = system_files.text(root / "proc/self/status").splitlines()
    allowed = next((line.partition(":")[2] for line in status if line.startswith("Mems_allowed_list:")), "")
    memory_nodes = set(system_files.numbers(allowed)) or set(nodes)
    if own - memory_nodes:
        found = f"cores of node {_list(own)}, but only memory of node {_list(memory_nodes)}"
        fix = f"docker update --cpuset-mems {_list(own | memory_nodes)} CONTAINER   # or cpuset.mems of the cgroup"
        return warn(found, "memory on the nodes of the cores", fix)
    placed = "".join(f", {name} on node {node}" for name, node in devices.items() if node in nodes)
    return ok(f"{len(nodes)} nodes, cores of {len(own)}{placed}")


def _read_nodes(root: Path) -> dict[int, tuple[int, ...]]:
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cores = system_files.numbers(system_files.text(folder / "cpulist"))
        if cores:
            found[int(folder.name[4:])] = cores
    return dict(sorted(found.items()))


def _read_devices(root: Path) -> dict[str, int]:
    files = {f"GPU {device.name}": device / "numa_node" for device in gpu_devices(root)}
    files |= {card.name: card / "device/numa_node" for card in sorted((root / "sys/class/net").glob("*"))}
    nodes = {name: system_files.number(path) for name, path in files.items()}
    return {name: node for name, node in nodes.items() if node is not None}


def _list(nodes: Iterable[int]) -> str:
    return hardware.spell_numbers(sorted(nodes))
