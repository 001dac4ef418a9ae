"""A Ray cluster of several nodes on one host, in a process of its own; it ends when its standard input does.

``python ray_cluster_process.py NUM_NODES CPUS`` prints the address. Ray's files lie below RAY_TMPDIR.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import psutil


def main() -> None:
    from ray.cluster_utils import Cluster

    num_nodes, cpus = int(sys.argv[1]), int(sys.argv[2])
    node = {"num_cpus": cpus, "num_gpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    for _ in range(num_nodes - 1):
        cluster.add_node(**{name: value for name, value in node.items() if name != "include_dashboard"})
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    sys.stdin.read()
    below = psutil.Process().children(recursive=True)
    with contextlib.suppress(Exception):
        cluster.shutdown()
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
