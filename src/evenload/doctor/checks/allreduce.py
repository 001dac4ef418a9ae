"""Check of an all-reduce between ranks on this machine."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from evenload.doctor.checks.packages import torch_problem
from evenload.doctor.finding import Finding, Options, fail, ok, skip
from evenload.doctor.gpu_state import usable_gpus

NUM_FLOATS = 1_000_000
GLOO_LIMIT_S = 30.0
"""It starts no device; only NCCL needs longer on a cold host."""
EXPORT_DEBUG = {"nccl": "NCCL_DEBUG=INFO", "gloo": "TORCH_DISTRIBUTED_DEBUG=DETAIL"}


@dataclass(frozen=True)
class AllReduceResult:
    rank: int
    seconds: float
    """Of the second all-reduce; the first one includes opening connections."""
    error: str = ""


def allreduce(options: Options) -> Finding:
    began = time.monotonic()
    if (problem := torch_problem()) is not None:
        return skip(problem)
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return fail(f"torch {torch.__version__} is built without torch.distributed", "a build with it")
    num_gpus = len(usable_gpus()) if torch.version.cuda is not None and dist.is_nccl_available() else 0
    backend = options.backend if options.backend != "auto" else "nccl" if num_gpus else "gloo"
    if backend == "nccl" and not num_gpus:
        found = "--backend nccl is set, but there is no GPU that this torch can use with NCCL"
        return fail(found, "a GPU and a build of torch for it", "evenload doctor --backend gloo")
    num_ranks = num_gpus if backend == "nccl" else 2
    limit_s = max(1.0, options.limit_s - (time.monotonic() - began))
    if backend == "gloo":
        limit_s = min(limit_s, GLOO_LIMIT_S)
    return evaluate_allreduce(backend, num_ranks, limit_s, run_ranks(backend, num_ranks, limit_s))


def evaluate_allreduce(
    backend: str, num_ranks: int, limit_s: float, results: list[AllReduceResult], num_floats: int = NUM_FLOATS
) -> Finding:
    """Evaluate the results of the ranks; a rank without a result did not end in time."""
    ranks = f"{num_ranks} ranks" if num_ranks > 1 else "1 rank"
    expected = f"{ranks} over {backend} sum {num_floats:,} numbers within {limit_s:.0f} s"
    failed = [result for result in results if result.error]
    fix = f"{EXPORT_DEBUG[backend]} evenload doctor --backend {backend}"
    if backend == "nccl" and num_ranks > 1:
        fix = f"NCCL_P2P_DISABLE=1 {fix}   # if this helps, GPUs cannot access each other: see IOMMU in the BIOS"
    elif backend == "gloo":
        fix = f"GLOO_SOCKET_IFNAME=lo {fix}   # if this helps, the host name resolves to a wrong address"
    if failed:
        return fail(f"rank {failed[0].rank} over {backend}: {failed[0].error}", expected, fix)
    missing = sorted(set(range(num_ranks)) - {result.rank for result in results})
    if missing:
        found = f"over {backend} rank {', '.join(map(str, missing))} did not end within {limit_s:.0f} s"
        return fail(found, expected, fix)
    slowest_s = max(result.seconds for result in results)
    return ok(f"{ranks} over {backend}: {4 * num_floats / 1e6:g} MB in {slowest_s * 1e3:.1f} ms", expected)


def run_ranks(backend: str, num_ranks: int, limit_s: float, num_floats: int = NUM_FLOATS) -> list[AllReduceResult]:
    """Fork the ranks and collect their results; ranks still running after ``limit_s`` are killed.

    Forking saves the import of torch in each rank. It is safe because this process has not initialized CUDA.
    """
    end = time.monotonic() + limit_s
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="evenload-doctor-") as folder:
        readers: dict[Connection, int] = {}
        processes = []
        for rank in range(num_ranks):
            reader, writer = context.Pipe(duplex=False)
            processes.append(
                context.Process(
                    target=_rank,
                    args=(backend, rank, num_ranks, Path(folder) / "store", limit_s, num_floats, writer),
                )
            )
            processes[-1].start()
            writer.close()
            readers[reader] = rank
        results = []
        try:
            while readers and (left_s := end - time.monotonic()) > 0:
                ready = wait(list(readers), left_s)
                for reader in [reader for reader in readers if reader in ready]:
                    rank = readers.pop(reader)
                    try:
                        results.append(reader.recv())
                    except EOFError:
                        results.append(AllReduceResult(rank, 0.0, "its process died without an error message"))
                if any(result.error for result in results):
                    break  # the others would wait for it
        finally:
            for process in processes:
                process.kill()
                process.join()
    return results


def _rank(
    backend: str, rank: int, num_ranks: int, store: Path, limit_s: float, num_floats: int, writer: Connection
) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            init_method=store.as_uri(),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=limit_s),
            device_id=device if backend == "nccl" else None,
        )
        for _ in range(2):
            numbers = torch.full((num_floats,), rank + 1.0, device=device)
            began = time.perf_counter()
            dist.all_reduce(numbers)
            if backend == "nccl":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - began
            low, high = numbers.min().item(), numbers.max().item()
        true_sum = num_ranks * (num_ranks + 1) / 2
        wrong = f"the sum is {low:g} ... {high:g} instead of {true_sum:g}" if not low == high == true_sum else ""
        writer.send(AllReduceResult(rank, seconds, wrong))
        dist.barrier()  # a rank must not exit while another reads from it
    except Exception as error:
        writer.send(AllReduceResult(rank, 0.0, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
    finally:
        writer.close()
        os._exit(0)  # a normal exit may be aborted by the threads of gloo
