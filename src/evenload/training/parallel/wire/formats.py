"""The formats by name."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from evenload.balance.wire_bytes import GradientSize, is_compressed
from evenload.training.comm.wire_groups import WireGroups
from evenload.training.parallel.buckets import Bucket, real
from evenload.training.parallel.wire.bf16 import BFloat16
from evenload.training.parallel.wire.bucket_sum import BucketSum, Matrix, WireFormat
from evenload.training.parallel.wire.codec import Codec
from evenload.training.parallel.wire.fp16 import Float16
from evenload.training.parallel.wire.int8 import Int8
from evenload.training.parallel.wire.powersgd import PowerSGD
from evenload.training.parallel.wire.quantised_sum import QuantisedSum

_NUM_TIMED, _NUM_JOBS, _NUM_ROUNDS = 1 << 20, 4, 3
"""Values of a sum that is timed, for a whole embedding might not fit into what is left of a device; sums together on a CPU."""
_LEAST_ROWS = 16
"""Of a matrix that is timed: one with fewer need not shrink to half."""
_REHEARSAL = WireGroups((0, 1), 0, True, None, (), on_gpus=False)
CODECS: tuple[Codec, ...] = (BFloat16(), Float16(), Int8())


def open_format(name: str, seed: int) -> WireFormat | None:
    """Return the format, or None for float32 as it is."""
    if name == PowerSGD.name:
        return PowerSGD(seed)
    return next((QuantisedSum(codec) for codec in CODECS if codec.name == name), None)


def codec_seconds(device: torch.device, size: GradientSize) -> dict[str, float]:
    """Return the seconds for a value that each format computes and copies between two machines, besides what the link takes.

    A step's sums are rehearsed without a link, with as much memory as they take; of PowerSGD one of each shape, as its time is
    proportional to the rows. `size`: of all gradients. Takes about 0.3 s.
    """
    num_jobs = min(_NUM_JOBS if device.type == "cpu" else 1, -(-size.num_values // _NUM_TIMED))
    found = {}
    for codec in CODECS:
        jobs = [_job(torch.randn(_NUM_TIMED, device=device)) for _ in range(num_jobs)]
        found[codec.name] = _seconds(QuantisedSum(codec), jobs) / max(1, num_jobs * _NUM_TIMED)
    total_s = 0.0
    for (num_rows, num_columns), count in Counter(one for one in size.matrices if is_compressed(*one)).items():
        rows = min(num_rows, max(_LEAST_ROWS, _NUM_TIMED // num_columns))
        matrix = Matrix("", 0, rows, num_columns)
        job = _job(torch.ones(rows * num_columns, device=device), matrix)
        total_s += count * _seconds(PowerSGD(0), [job]) * num_rows / rows
    return {**found, PowerSGD.name: total_s / max(1, size.num_values)}


def _job(values: torch.Tensor, *matrices: Matrix) -> BucketSum:
    return BucketSum(values, torch.zeros_like(values[0]), matrices)


def _seconds(wire: WireFormat, jobs: Sequence[BucketSum]) -> float:
    """Return the seconds of sums, with their errors; on a CPU its time beside a computation, which takes from the caches too."""
    on_cpu, is_over = all(job.values.device.type == "cpu" for job in jobs), threading.Event()
    beside = threading.Thread(target=_compute, args=(is_over,), name="evenload-rehearsal", daemon=True)
    if on_cpu:
        beside.start()
    try:
        return _time_sums(wire, jobs, time.thread_time if on_cpu else time.perf_counter)
    finally:
        is_over.set()
        if on_cpu:
            beside.join()


def _compute(is_over: threading.Event) -> None:
    left, right = torch.ones(16, 1024), torch.ones(1024, 1024)
    out = left @ right
    while not is_over.is_set():
        torch.mm(left, right, out=out)


def _time_sums(wire: WireFormat, jobs: Sequence[BucketSum], clock: Callable[[], float]) -> float:
    errors, times = [torch.zeros_like(job.values) for job in jobs], []
    for _ in range(_NUM_ROUNDS):
        began_s = clock()
        for job, error in zip(jobs, errors, strict=True):
            job.values.add_(error)
            for _ in wire.sum(job, _REHEARSAL):
                pass
        for job, error in zip(jobs, errors, strict=True):
            if job.lost is not None:
                error.mul_(0.5).add_(job.lost)
                job.lost = None
        if errors and errors[0].device.type == "cuda":
            torch.cuda.synchronize(errors[0].device)
        times.append(clock() - began_s)
    return sorted(times)[_NUM_ROUNDS // 2]


def wide_dtype(bucket: Bucket) -> torch.dtype:
    """Return the dtype in which a bucket is encoded and its errors are kept."""
    return torch.float64 if real(bucket.flat).dtype == torch.float64 else torch.float32
