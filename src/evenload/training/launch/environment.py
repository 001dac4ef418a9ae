"""Which worker this process is: told by our launcher's file, by the variables of torchrun or srun, or alone.

The launcher speaks to a worker through one channel: a JSON file named by the variable `EVENLOAD_WORKER`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenload.errors import LaunchError
from evenload.training.launch import slurm

WORKER_VARIABLE = "EVENLOAD_WORKER"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class WorkerSpec:
    """One worker of one job, as started."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    generation: int = 0
    workers: tuple[str, ...] = ("worker-0",)
    """Stable ids of all workers; the index is the rank."""
    device: str = "auto"
    """``cuda:N`` or ``cpu``; ``auto`` where nobody told (the first GPU, else the CPU)."""
    devices: tuple[str, ...] = ()
    """All devices of this rank, `device` first, where it has several (``-d 0+1``); empty: that one alone."""
    replicas: tuple[Mapping[str, Any], ...] = ()
    """Where the replicas of this process compute (strategy ``dp``): ``device``, ``name``, ``cores``, ``num_threads`` of each."""
    device_names: tuple[str, ...] = ()
    """What a person calls the device of each rank; empty where nobody told."""
    backend: str = "auto"
    """Of the gradients: ``nccl``, ``gloo`` or ``auto``."""
    store: str = ""
    """``host:port`` of the TCPStore that the launcher serves, ``env://host:port`` under torchrun,
    ``tcp://host:port`` where rank 0 serves it; empty for a world of one."""
    interface: str = ""
    """The network interface that gloo and NCCL use; empty: they choose."""
    cores: tuple[int, ...] = ()
    """CPU cores this worker is bound to; empty: unbound."""
    num_threads: int = 0
    """Threads for torch's own operators; 0 leaves torch's default."""
    launch_dir: str = ""
    """The launcher's folder for this launch: worker files, failures, logs; empty without our launcher."""
    lifeline: int = -1
    """File descriptor of a pipe from the launcher: one byte means go, its end means that the launcher is gone."""
    origin: str = "alone"
    """Who started it: ``evenload``, ``spawn`` (`evenload.spawn`), ``torchrun``, ``slurm``, ``group`` (an existing process
    group) or ``alone``."""
    mode: str = "train"
    """``train``, ``verify`` or ``windows`` (the demo's and the benchmarks' alternating windows)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the command line set, by key of Config."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the mode needs to know, such as the windows' lengths."""
    command: str = ""
    """How a person starts this launch again; empty without our launcher."""
    call: str = ""
    """Folder of the function that this worker calls in place of a script (call.py); empty: a script or a module."""
    throttle: Mapping[str, Any] = field(default_factory=dict)
    """How this worker is slowed down: ``factor``, ``means`` (``quota`` or ``compute``); empty: not at all (throttle.py)."""


def devices_without_effect(spec: WorkerSpec) -> str:
    """What is told where a rank has several devices and no model is cut over them."""
    names = [name.removeprefix("cuda:") for name in spec.devices]
    return (
        f"-d {'+'.join(names)} gives each rank {len(names)} devices, but no model is cut over them, so the others would do "
        "nothing; write model = evenload.place(model) before run.prepare(model), or start a rank on each device with "
        f"-d {','.join(names)}"
    )


def write_spec(spec: WorkerSpec, path: Path) -> None:
    """Writes a worker's file; readers see all of it or none."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(dataclasses.asdict(spec), indent=1))
    partial.replace(path)


def read_spec(path: Path) -> WorkerSpec:
    """Reads a worker's file.

    Raises:
        LaunchError: it can't be read, or holds something else.
    """
    try:
        raw = json.loads(path.read_text())
        for key in ("workers", "devices", "device_names", "cores", "replicas"):
            raw[key] = tuple(raw[key])
        return WorkerSpec(**raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"the worker's file {path}, named by {WORKER_VARIABLE}, can't be read ({error}); start with `evenload run`"
        ) from error


def detect() -> WorkerSpec:
    """Which worker this process is.

    The first of these that is there: the file of our launcher, torchrun's variables (torchrun's own, or set by hand), those
    of a task of `srun`. Otherwise it is alone.

    Raises:
        LaunchError: variables contradict one another, or the file can't be read.
    """
    variables = os.environ
    if path := variables.get(WORKER_VARIABLE):
        return read_spec(Path(path))
    missing = [name for name in _TORCHRUN if name not in variables]
    if not missing:
        return _from_torchrun(variables)
    if (task := slurm.read_task(variables)) is not None:
        return _from_slurm(task)
    if variables.get("RANK", "0") != "0" or variables.get("WORLD_SIZE", "1") != "1":
        # Going on alone would train as many models as there are processes.
        there = [name for name in _TORCHRUN if name not in missing]
        raise LaunchError(
            f"{', '.join(f'{name}={variables[name]}' for name in there)} {'are' if len(there) > 1 else 'is'} set, but "
            f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not; start with `evenload run` or torchrun, which "
            f"set all of them, or unset {', '.join(there)} to run alone"
        )
    return WorkerSpec()


def _from_torchrun(variables: Mapping[str, str]) -> WorkerSpec:
    try:
        rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        # Set by hand in a script that srun starts, the rank within the node is Slurm's.
        local_rank = int(variables.get("LOCAL_RANK", variables.get("SLURM_LOCALID", rank)))
        num_nodes = int(variables.get("GROUP_WORLD_SIZE", 1))
        node_rank = int(variables.get("GROUP_RANK", 0))
        int(variables["MASTER_PORT"])
    except ValueError as error:
        raise LaunchError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be integers: {error}") from error
    if not 0 <= rank < world_size:
        raise LaunchError(f"RANK={rank} with WORLD_SIZE={world_size}: the rank must be from 0 to {world_size - 1}")
    return WorkerSpec(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        workers=_names(world_size),
        # torch reads the variables again (torchrun's agent may serve the store); what stands here is for people.
        store=f"env://{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}",
        origin="torchrun",
    )


def _from_slurm(task: slurm.SlurmTask) -> WorkerSpec:
    return WorkerSpec(
        rank=task.rank,
        local_rank=task.local_rank,
        world_size=task.world_size,
        node_rank=task.node_rank,
        num_nodes=task.num_nodes,
        workers=_names(task.world_size),
        store=f"tcp://[{task.host}]:{task.port}" if ":" in task.host else f"tcp://{task.host}:{task.port}",
        origin="slurm",
    )


def _names(world_size: int) -> tuple[str, ...]:
    return tuple(f"worker-{index}" for index in range(world_size))
