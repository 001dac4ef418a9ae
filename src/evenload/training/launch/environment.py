"""Which worker this process is: told by our launcher's file, by torchrun's variables, or alone.

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
    device_names: tuple[str, ...] = ()
    """What a person calls the device of each rank; empty where nobody told."""
    backend: str = "auto"
    """Of the gradients: ``nccl``, ``gloo`` or ``auto``."""
    store: str = ""
    """``host:port`` of the TCPStore that the launcher serves, ``env://`` under torchrun; empty for a world of one."""
    cores: tuple[int, ...] = ()
    """CPU cores this worker is bound to; empty: unbound."""
    num_threads: int = 0
    """Threads for torch's own operators; 0 leaves torch's default."""
    launch_dir: str = ""
    """The launcher's folder for this launch: worker files, failures, logs; empty without our launcher."""
    lifeline: int = -1
    """File descriptor of a pipe from the launcher: one byte means go, its end means that the launcher is gone."""
    origin: str = "alone"
    """Who started it: ``evenload``, ``torchrun``, ``group`` (an existing process group) or ``alone``."""
    mode: str = "train"
    """``train``, ``verify`` or ``windows`` (the demo's and the benchmarks' alternating windows)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the command line set, by key of Config."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the mode needs to know, such as the windows' lengths."""
    throttle: Mapping[str, Any] = field(default_factory=dict)
    """How this worker is slowed down: ``factor``, ``means`` (``quota`` or ``compute``); empty: not at all (throttle.py)."""


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
        for key in ("workers", "device_names", "cores"):
            raw[key] = tuple(raw[key])
        return WorkerSpec(**raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"the worker's file {path}, named by {WORKER_VARIABLE}, can't be read ({error}); start with `evenload run`"
        ) from error


def detect() -> WorkerSpec:
    """Which worker this process is.

    Raises:
        LaunchError: variables contradict one another, or the file can't be read.
    """
    if path := os.environ.get(WORKER_VARIABLE):
        return read_spec(Path(path))
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if not missing:
        return _from_torchrun()
    if os.environ.get("RANK", "0") != "0" or os.environ.get("WORLD_SIZE", "1") != "1":
        # Going on alone would train as many models as there are processes.
        there = [name for name in _TORCHRUN if name not in missing]
        raise LaunchError(
            f"{', '.join(f'{name}={os.environ[name]}' for name in there)} {'are' if len(there) > 1 else 'is'} set, but "
            f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not; start with `evenload run` or torchrun, which "
            f"set all of them, or unset {', '.join(there)} to run alone"
        )
    if int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1 and "SLURM_PROCID" in os.environ:
        raise LaunchError(
            f"srun started {os.environ['SLURM_STEP_NUM_TASKS']} tasks of this script, each of which would train alone; start "
            "one task a node that starts the others: srun --ntasks-per-node=1 torchrun --nnodes=... train.py, or "
            "`evenload run train.py` on one node"
        )
    return WorkerSpec()


def _from_torchrun() -> WorkerSpec:
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        int(os.environ["MASTER_PORT"])
    except ValueError as error:
        raise LaunchError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be integers: {error}") from error
    if not 0 <= rank < world_size:
        raise LaunchError(f"RANK={rank} with WORLD_SIZE={world_size}: the rank must be from 0 to {world_size - 1}")
    return WorkerSpec(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        node_rank=int(os.environ.get("GROUP_RANK", "0")),
        workers=tuple(f"worker-{index}" for index in range(world_size)),
        store="env://",
        origin="torchrun",
    )
