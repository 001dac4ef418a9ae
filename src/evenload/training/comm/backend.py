"""Choose the backends of the gradients: NCCL among GPUs, gloo with other ranks; end what GPUs have queued over NCCL."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from evenload.training.comm.host_exchange import Gather

_BACKENDS = ("", "nccl", "gloo")
_END_S = 10.0


@dataclass(frozen=True)
class InnerRanks:
    """The ranks whose gradients are summed first, and over which backend; the others join them over gloo."""

    ranks: tuple[int, ...] = ()
    backend: str = "gloo"

    def backend_of(self, ranks: Sequence[int]) -> str:
        """Return the backend of a group of these ranks alone."""
        return self.backend if set(ranks) <= set(self.ranks) else "gloo"


def find_inner(backend: str, gpu: str, gather: Gather) -> InnerRanks:
    """Find which ranks sum first; all ranks call it with their `WorkerSpec.inner_backend` and the identifier of their GPU."""
    # Whether a rank has a GPU of its own is known only by comparison: machines may differ.
    number = int.from_bytes(hashlib.sha256(gpu.encode()).digest()[:7])
    rows = gather(torch.tensor([_BACKENDS.index(backend), number])).tolist()
    return inner_ranks([(_BACKENDS[index], number) for index, number in rows])


def inner_ranks(rows: Sequence[tuple[str, int]]) -> InnerRanks:
    """Return the ranks that sum first from each rank's (`WorkerSpec.inner_backend`, GPU): NCCL refuses two on one GPU."""
    num_ranks = Counter(rows)
    ranks = tuple(
        rank for rank, row in enumerate(rows) if row[0] == "gloo" or (row[0] == "nccl" and num_ranks[row] == 1)
    )
    return InnerRanks(ranks, rows[ranks[0]][0]) if ranks else InnerRanks()


def end_queued(groups: Iterable[dist.ProcessGroup]) -> None:
    """End the collectives that GPUs have queued over NCCL in these groups, which can't be used afterwards.

    A GPU waits in a kernel for a rank that is lost, and the host behind it, also where the group is destroyed; see
    docs/decisions/torn-sums.md. All groups end at once, since the end of one may wait for the kernels of another.
    """
    threads = []
    for group in groups:
        # It has no backend for GPUs, or is the number that stands for a group of other ranks.
        with contextlib.suppress(RuntimeError, AttributeError):
            backend = group._get_backend(torch.device("cuda"))
            if backend.name() == "nccl":
                threads.append(threading.Thread(target=backend.abort, name="evenload-abort", daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_END_S)
