"""A command that is started once on each node of a job, told with which others: ``evenload run`` gets the options for it.

``evenload run train.py`` on two nodes becomes ``evenload run --nodes 2 --host ADDRESS:PORT train.py`` on both, so the same job
file does for one node and for several. Another command is left as it is and finds ``NUM_NODES``, ``NODE_RANK``,
``MASTER_ADDR`` and ``MASTER_PORT``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenload.errors import QueueError

_FIRST_PORT = 25000
_NUM_PORTS = 7000
"""Ports 25000 to 31999: above those that tasks of srun meet at (15000 to 24999), below what Linux hands out (32768)."""
_OWN_WORDS = ("--nodes", "--nnodes", "--host", "--master-addr", "--rdzv-endpoint")


@dataclass(frozen=True, slots=True)
class Place:
    """Which node of a job this is."""

    num_nodes: int
    node_rank: int
    host: str
    """Of node 0, as the others reach it."""
    port: int

    def variables(self) -> dict[str, str]:
        """What a command that isn't ``evenload run`` can find out about it."""
        return {
            "NUM_NODES": str(self.num_nodes),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def spread(command: Sequence[str], place: Place) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and the variables for one node."""
    verb = _index_of_run(command)
    if place.num_nodes == 1:
        return tuple(command), {}
    if verb is None or any(word.partition("=")[0] in _OWN_WORDS for word in command[verb + 1 :]):
        return tuple(command), place.variables()
    host = f"[{place.host}]" if ":" in place.host else place.host
    own = (f"--nodes={place.num_nodes}", f"--host={host}:{place.port}", f"--node-rank={place.node_rank}")
    return (*command[: verb + 1], *own, *command[verb + 1 :]), {}


def port_for(number: int) -> int:
    """A port that follows from a job's number, so that jobs on one node meet apart."""
    return _FIRST_PORT + number % _NUM_PORTS


def place_in_step(variables: Mapping[str, str]) -> Place:
    """Which node this is, by what srun set.

    Raises:
        QueueError: this isn't a task of srun.
    """
    try:
        return Place(
            num_nodes=int(variables["SLURM_STEP_NUM_NODES"]),
            node_rank=int(variables["SLURM_NODEID"]),
            host=variables["SLURM_LAUNCH_NODE_IPADDR"],
            port=port_for(int(variables["SLURM_JOB_ID"])),
        )
    except (KeyError, ValueError) as error:
        raise QueueError(
            f"this isn't a task of srun: {error}; srun sets SLURM_STEP_NUM_NODES, SLURM_NODEID, ..."
        ) from None


def _index_of_run(command: Sequence[str]) -> int | None:
    """Where ``run`` of ``evenload run`` stands; None where the command is another."""
    words = list(command)
    if len(words) > 1 and Path(words[0]).name == "evenload" and words[1] == "run":
        return 1
    if len(words) > 3 and words[1] == "-m" and words[2] in ("evenload", "evenload.cli.main") and words[3] == "run":
        return 3
    return None


def main() -> None:
    """As one task of srun: becomes the command given after ``--``."""
    command, variables = spread(sys.argv[2:], place_in_step(os.environ))
    os.environ.update(variables)
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    main()
