"""Do ranks on this machine come together, and sum?"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from evenload import hardware
from evenload.doctor.finding import Finding, Options

NAME = "all-reduce"
NUM_FLOATS = 1_000_000
EXPORT_DEBUG = {"nccl": "NCCL_DEBUG=INFO", "gloo": "TORCH_DISTRIBUTED_DEBUG=DETAIL"}


@dataclass(frozen=True)
class RankStory:
    """What a rank of the trial reported."""

    rank: int
    seconds: float
    """Of the second all-reduce; the first one also opens connections."""
    error: str = ""


def allreduce(options: Options) -> Finding:
    """Starts ranks on the backend a run would choose, and lets them sum NUM_FLOATS numbers twice."""
    began = time.monotonic()
    if importlib.util.find_spec("torch") is None:
        return Finding(NAME, "skip", "torch is missing (see packages)")
    try:
        import torch
        import torch.distributed as dist
    except Exception:
        return Finding(NAME, "skip", "torch can't be imported (see wheel and driver)")
    if not dist.is_available():
        return Finding(NAME, "fail", f"torch {torch.__version__} is built without torch.distributed", "a build with it")
    num_gpus = len(hardware.gpus()) if torch.version.cuda is not None and dist.is_nccl_available() else 0
    backend = options.backend if options.backend != "auto" else "nccl" if num_gpus else "gloo"
    if backend == "nccl" and not num_gpus:
        found = "nccl was asked for, but there is no GPU that this torch can use with NCCL"
        return Finding(NAME, "fail", found, "a GPU and a build of torch for it", "evenload doctor --backend gloo")
    num_ranks = num_gpus if backend == "nccl" else 2
    limit_s = max(1.0, options.limit_s - (time.monotonic() - began))
    return judge_allreduce(backend, num_ranks, limit_s, run_ranks(backend, num_ranks, limit_s))


def judge_allreduce(
    backend: str, num_ranks: int, limit_s: float, stories: list[RankStory], num_floats: int = NUM_FLOATS
) -> Finding:
    """What the ranks' stories mean; a rank without a story did not end in time."""
    ranks = f"{num_ranks} ranks" if num_ranks > 1 else "1 rank"
    expected = f"{ranks} over {backend} sum {num_floats:,} numbers within {limit_s:.0f} s"
    failed = [story for story in stories if story.error]
    mend = f"{EXPORT_DEBUG[backend]} evenload doctor --backend {backend}"
    if backend == "nccl" and num_ranks > 1:
        mend = f"NCCL_P2P_DISABLE=1 {mend}   # where this helps, GPUs can't read each other: see the BIOS's IOMMU"
    elif backend == "gloo":
        mend = f"GLOO_SOCKET_IFNAME=lo {mend}   # where this helps, the host name leads astray"
    if failed:
        return Finding(NAME, "fail", f"rank {failed[0].rank} over {backend}: {failed[0].error}", expected, mend)
    silent = sorted(set(range(num_ranks)) - {story.rank for story in stories})
    if silent:
        found = f"over {backend} rank {', '.join(map(str, silent))} had not ended after {limit_s:.0f} s"
        return Finding(NAME, "fail", found, expected, mend)
    slowest_s = max(story.seconds for story in stories)
    return Finding(
        NAME, "ok", f"{ranks} over {backend}: {4 * num_floats / 1e6:g} MB in {slowest_s * 1e3:.1f} ms", expected
    )


def run_ranks(backend: str, num_ranks: int, limit_s: float, num_floats: int = NUM_FLOATS) -> list[RankStory]:
    """Forks the ranks and collects their stories; what has not ended after ``limit_s`` is killed.

    Forking saves each rank the import of torch. It is sound here because this process has begun no CUDA.
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
        stories = []
        try:
            while readers and (left_s := end - time.monotonic()) > 0:
                ready = wait(list(readers), left_s)
                for reader in [reader for reader in readers if reader in ready]:
                    rank = readers.pop(reader)
                    try:
                        stories.append(reader.recv())
                    except EOFError:
                        stories.append(RankStory(rank, 0.0, "its process died without a word"))
                if any(story.error for story in stories):
                    break  # the others would only wait for it
        finally:
            for process in processes:
                process.kill()
                process.join()
    return stories


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
        wrong = f"sums to {low:g} ... {high:g}, the true sum is {true_sum:g}" if not low == high == true_sum else ""
        writer.send(RankStory(rank, seconds, wrong))
        dist.barrier()  # nobody leaves while another still reads from it
    except Exception as error:
        writer.send(RankStory(rank, 0.0, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
    finally:
        writer.close()
        os._exit(0)  # gloo's threads may abort an ordinary exit
