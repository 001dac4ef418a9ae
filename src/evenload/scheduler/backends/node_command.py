"""Adapt a command that is started once on each node of a job.

`evenload run train.py` on two nodes becomes `evenload run --nodes 2 --host ADDRESS:PORT train.py` on both, so that one job
file works for one node and for several. Any other command is unchanged and finds `NUM_NODES`, `NODE_RANK`, `MASTER_ADDR` and
`MASTER_PORT` in its environment.
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
"""Ports 25000 to 31999: above those used between tasks of srun (15000 to 24999), below Linux's ephemeral ports (32768)."""
_OWN_WORDS = ("--nodes", "--nnodes", "--host", "--master-addr", "--rdzv-endpoint")


@dataclass(frozen=True, slots=True)
class NodeContext:
    """A node's rank in its job, and the address of the first node."""

    num_nodes: int
    node_rank: int
    host: str
    """Address of node 0."""
    port: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables for a command other than `evenload run`."""
        return {
            "NUM_NODES": str(self.num_nodes),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def command_on_node(command: Sequence[str], node: NodeContext) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command and the variables for one node."""
    verb = _index_of_run(command)
    if node.num_nodes == 1:
        return tuple(command), {}
    if verb is None or any(word.partition("=")[0] in _OWN_WORDS for word in command[verb + 1 :]):
        return tuple(command), node.variables()
    host = f"[{node.host}]" if ":" in node.host else node.host
    own = (f"--nodes={node.num_nodes}", f"--host={host}:{node.port}", f"--node-rank={node.node_rank}")
    return (*command[: verb + 1], *own, *command[verb + 1 :]), {}


def port_for(number: int) -> int:
    """Return a port derived from the job's number, so that jobs on the same node use different ports."""
    return _FIRST_PORT + number % _NUM_PORTS


def node_of_task(variables: Mapping[str, str]) -> NodeContext:
    """Return the node of this task of srun; raise a `QueueError` in any other process."""
    try:
        return NodeContext(
            num_nodes=int(variables["SLURM_STEP_NUM_NODES"]),
            node_rank=int(variables["SLURM_NODEID"]),
            host=variables["SLURM_LAUNCH_NODE_IPADDR"],
            port=port_for(int(variables["SLURM_JOB_ID"])),
        )
    except (KeyError, ValueError) as error:
        raise QueueError(
            f"this process is not a task of srun, which sets SLURM_STEP_NUM_NODES and SLURM_NODEID: {error}"
        ) from None


def _index_of_run(command: Sequence[str]) -> int | None:
    """The position of `run` in `evenload run`; None for any other command."""
    words = list(command)
    if len(words) > 1 and Path(words[0]).name == "evenload" and words[1] == "run":
        return 1
    if len(words) > 3 and words[1] == "-m" and words[2] in ("evenload", "evenload.cli.main") and words[3] == "run":
        return 3
    return None


def main() -> None:
    """As one task of srun: exec the command given after `--`."""
    command, variables = command_on_node(sys.argv[2:], node_of_task(os.environ))
    os.environ.update(variables)
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    main()
