"""The task of a Slurm job step that this process is, and its rendezvous, from the variables that `srun` sets.

No Slurm command is called, so a node without them can train too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evenload.errors import LaunchError

_FIRST_PORT = 15000
_NUM_PORTS = 10000
"""Ports 15000 to 24999: above those of services, below those that Linux assigns to clients (32768)."""
_STEP_STRIDE = 7919
"""A prime: simultaneous steps of one job get ports far apart."""


@dataclass(frozen=True)
class SlurmTask:
    """One of several tasks of a job step; each is a rank."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    num_nodes: int
    host: str
    """Host on which rank 0 listens, as all tasks reach it."""
    port: int


def read_task(variables: Mapping[str, str]) -> SlurmTask | None:
    """Return the task that this process is, or None if `srun` started only one.

    A batch script, the shell of `salloc` and `srun --pty bash` are single processes, whatever the job has requested: a
    process started there by hand is a world of one. In a step the number of tasks is that of the step. LaunchError: a
    variable is missing, not a number, or contradicts another.
    """
    if "SLURM_PROCID" not in variables:
        return None
    tasks = "SLURM_STEP_NUM_TASKS"
    if tasks not in variables:
        if "SLURM_STEP_ID" not in variables and variables.get("ENVIRONMENT") == "BATCH":
            return None  # sbatch sets SLURM_NTASKS for the steps to come
        tasks = "SLURM_NTASKS"
    rank = _number(variables, "SLURM_PROCID")
    if tasks not in variables:
        if rank == 0:
            return None
        raise LaunchError(
            f"SLURM_PROCID={rank} is set, but neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS; start the tasks with srun, which "
            "sets all of them, or unset SLURM_PROCID to run alone"
        )
    world_size = _number(variables, tasks)
    if rank >= world_size:
        raise LaunchError(f"SLURM_PROCID={rank} with {tasks}={world_size}: the rank must be from 0 to {world_size - 1}")
    if world_size == 1:
        return None
    _check_torch_variables(variables, rank, world_size)
    hosts = _hosts(variables)
    num_nodes = _number(variables, "SLURM_STEP_NUM_NODES", default=len(hosts) or 1)
    return SlurmTask(
        rank=rank,
        world_size=world_size,
        local_rank=_number(variables, "SLURM_LOCALID", default=rank if num_nodes == 1 else 0),
        node_rank=_number(variables, "SLURM_NODEID", default=0),
        num_nodes=num_nodes,
        host=variables.get("MASTER_ADDR") or _first(hosts),
        port=_port(variables),
    )


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the names in Slurm's list of hosts: ``node[01-03,07],login`` has five; LaunchError if it is no such list."""
    try:
        return tuple(name for item in _split(text) for name in _expand(item))
    except ValueError:
        raise LaunchError(f"{text!r} is not a list of hosts in Slurm's form, such as node[01-03,07],login") from None


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    items, depth, begin = [], 0, 0
    for index, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError(text)
        if character == "," and not depth:
            items.append(text[begin:index])
            begin = index + 1
    items.append(text[begin:])
    if depth or not all(items) or any(item.split() != [item] for item in items):
        raise ValueError(text)
    return items


def _expand(item: str) -> list[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    inner, _, tail = rest.partition("]")
    return [f"{head}{number}{end}" for part in inner.split(",") for number in _range(part) for end in _expand(tail)]


def _range(part: str) -> list[str]:
    """Expand ``07`` or ``01-03``; leading zeros are kept."""
    low, dash, high = part.partition("-")
    if not dash:
        int(low)
        return [low]
    if int(low) > int(high):
        raise ValueError(part)
    return [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]


def _hosts(variables: Mapping[str, str]) -> tuple[str, ...]:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if variables.get(name):
            return expand_hosts(variables[name])
    return ()


def _first(hosts: tuple[str, ...]) -> str:
    # Slurm numbers the tasks from the first host on, so rank 0 runs there.
    if not hosts:
        raise LaunchError(
            "srun's SLURM_STEP_NODELIST is not set, so the tasks have no rendezvous; start them with srun, or set MASTER_ADDR to "
            "the host of rank 0"
        )
    # A machine may not resolve its own name.
    return hosts[0] if len(hosts) > 1 else "127.0.0.1"


def _port(variables: Mapping[str, str]) -> int:
    """Return the user's port, else one reserved by `srun --resv-ports`, else one derived from job and step."""
    if "MASTER_PORT" in variables:
        return _number(variables, "MASTER_PORT")
    if reserved := variables.get("SLURM_STEP_RESV_PORTS"):
        first = reserved.partition(",")[0].partition("-")[0]
        if first.isdecimal():
            return int(first)
    if "SLURM_JOB_ID" not in variables:
        raise LaunchError(
            "SLURM_JOB_ID is not set, from which the port of the rendezvous is derived; start the tasks with srun, or set "
            "MASTER_PORT to a free port of rank 0's host"
        )
    step = variables.get("SLURM_STEP_ID", "0")
    # A step's id may be a word ("interactive").
    number = _number(variables, "SLURM_JOB_ID") + _STEP_STRIDE * (int(step) if step.isdecimal() else 0)
    return _FIRST_PORT + number % _NUM_PORTS


def _check_torch_variables(variables: Mapping[str, str], rank: int, world_size: int) -> None:
    """Check that RANK and WORLD_SIZE, if a batch script exports them, agree with srun."""
    for name, value, variable in (
        ("RANK", rank, "SLURM_PROCID"),
        ("WORLD_SIZE", world_size, "the number of tasks"),
    ):
        if name in variables and variables[name] != str(value):
            raise LaunchError(
                f"{name}={variables[name]} is set, but {variable} of srun is {value}; unset {name}: Evenload takes srun's own "
                "variables"
            )


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise LaunchError(f"{name}={text!r}: expected a number, as srun sets it")
    return int(text)
