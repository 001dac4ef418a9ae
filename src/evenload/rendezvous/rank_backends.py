"""Name the backends over which the ranks of a run sum gradients: NCCL among GPUs, gloo with other ranks."""

from __future__ import annotations

from collections.abc import Sequence


def common_backend(inner: Sequence[str]) -> str:
    """Return the backend of all ranks together, from `WorkerSpec.inner_backend` of each."""
    return "nccl" if all(backend == "nccl" for backend in inner) else "gloo"


def used_backends(inner: Sequence[str]) -> list[str]:
    """Return what each rank sums over: where there are other ranks, the first of several GPUs uses both."""
    gpus = [rank for rank, backend in enumerate(inner) if backend == "nccl"]
    if len(gpus) < 2 or len(gpus) == len(inner):
        return [common_backend(inner)] * len(inner)
    return ["nccl + gloo" if rank == gpus[0] else backend or "gloo" for rank, backend in enumerate(inner)]
