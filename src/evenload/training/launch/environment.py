"""The worker that this process is, from the launcher's file or from the variables of torchrun or srun.

The launcher describes a worker in one JSON file, named by the variable `EVENLOAD_WORKER`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evenload.atomic_file import write_atomically
from evenload.errors import LaunchError
from evenload.stored_names import STORED_MODES
from evenload.training.launch import slurm

WORKER_VARIABLE = "EVENLOAD_WORKER"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class WorkerSpec:
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    generation: int = 0
    workers: tuple[str, ...] = ("worker-0",)
    """Stable ids of all workers; the index is the rank."""
    joining: bool = False
    """True: a run is in progress. The worker runs the script as a world of one up to its first step, without writing into the run
    folder, and is then admitted."""
    device: str = "auto"
    """``cuda:N`` or ``cpu``; ``auto``: the first GPU, else the CPU."""
    devices: tuple[str, ...] = ()
    """All devices of a rank with several (``-d 0+1``), `device` first; otherwise empty."""
    visible_devices: str = ""
    """CUDA_VISIBLE_DEVICES of this worker; empty: as the launcher's."""
    replicas: tuple[Mapping[str, Any], ...] = ()
    """``device``, ``name``, ``cores`` and ``num_threads`` of each replica of this process (strategy ``dp``)."""
    device_names: tuple[str, ...] = ()
    """Name of each rank's device for people; empty if unknown."""
    backend: str = "auto"
    """Backend of the gradient reduction over all ranks: ``nccl``, ``gloo`` or ``auto``."""
    inner_backend: str = ""
    """Backend in which this rank sums gradients with others that have one, before the rest join: ``nccl`` for a GPU of its own
    (``gloo`` on CPUs, for tests), or empty."""
    store: str = ""
    """``host:port`` of the launcher's TCPStore, ``env://host:port`` under torchrun, ``tcp://host:port`` where rank 0 serves it;
    empty for a world of one."""
    interface: str = ""
    """Network interface of gloo and NCCL; empty: they choose."""
    cores: tuple[int, ...] = ()
    """CPU cores this worker is bound to; empty: unbound."""
    num_threads: int = 0
    """Threads for torch's own operators; 0 leaves torch's default."""
    launch_dir: str = ""
    """Folder of this launch for worker files and failure reports; empty without Evenload's launcher."""
    lifeline: int = -1
    """File descriptor of a pipe from the launcher: one byte starts the worker; its end means that the launcher is gone."""
    channel: int = -1
    """File descriptor of a socket to the supervisor for `membership_messages`; -1: none, and a lost rank ends the run."""
    origin: str = "alone"
    """The launcher: ``evenload``, ``spawn`` (`evenload.spawn`), ``torchrun``, ``slurm``, ``group`` (an existing process
    group) or ``alone``."""
    has_server: bool = False
    """Rank 0 is a process that the launcher started beside the devices, for the server of strategy ``async``."""
    mode: str = "train"
    """``train``, ``verify``, or ``measure`` (the measurement of the demo and the benchmarks)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the mode, such as the lengths of a measurement."""
    command: str = ""
    """Command that resumes this launch; empty without Evenload's launcher."""
    call: str = ""
    """Folder of the function that this worker calls (function_call.py); empty: it runs a script or a module."""
    throttle: Mapping[str, Any] = field(default_factory=dict)
    """Speed limit of this worker (throttle.py): ``factor`` and ``means`` (``quota`` or ``compute``); empty: none."""

    @property
    def worker(self) -> str:
        """Stable id of this worker; files of the launch folder carry it."""
        return self.workers[self.rank]


def at_device(base: WorkerSpec, planned: WorkerSpec, used_cores: Collection[int]) -> WorkerSpec:
    """Return the spec of a worker that joins at another device, which another one was `planned` for; rank 0 of one."""
    return replace(
        base,
        device=planned.device,
        devices=planned.devices,
        visible_devices=planned.visible_devices,
        device_names=(planned.device_names[planned.rank],),
        inner_backend=planned.inner_backend,
        cores=() if {*used_cores} & {*planned.cores} else planned.cores,
        num_threads=planned.num_threads,
        rank=0,
    )


def devices_without_effect(spec: WorkerSpec) -> str:
    names = [name.removeprefix("cuda:") for name in spec.devices]
    return (
        f"-d {'+'.join(names)} gives each rank {len(names)} devices, but no model is split over them, so the others would be "
        "idle; write model = evenload.place(model) before run.prepare(model), or start a rank on each device with "
        f"-d {','.join(names)}"
    )


def write_spec(spec: WorkerSpec, path: Path) -> None:
    write_atomically(path, json.dumps(dataclasses.asdict(spec), indent=1))


def read_spec(path: Path) -> WorkerSpec:
    """Read a worker's file; LaunchError if it can't be read or holds something else."""
    try:
        raw = json.loads(path.read_text())
        for key in ("workers", "devices", "device_names", "cores", "replicas"):
            raw[key] = tuple(raw[key])
        if raw.get("mode") in STORED_MODES:
            raw["mode"] = STORED_MODES[raw["mode"]]
        return WorkerSpec(**raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"the worker's file {path}, named by {WORKER_VARIABLE}, can't be read ({error}); start with `evenload run`"
        ) from error


def detect() -> WorkerSpec:
    """Return the worker that this process is.

    Taken from the first of these that exists: the launcher's file, torchrun's variables (possibly set by hand), those of a
    task of `srun`. Otherwise the process is a world of one. LaunchError: variables contradict one another, or the file
    can't be read.
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
        # Otherwise each process would train a model of its own.
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
        # Only for messages: torch reads the variables itself (torchrun's agent may serve the store).
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
