"""Measurements of the speed of each device and each link with torch (``--full``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from evenload import hardware
from evenload.doctor.checks.allreduce import evaluate_allreduce, run_ranks
from evenload.doctor.checks.packages import torch_problem
from evenload.doctor.finding import Figure, Finding, Options, ok, skip, warn
from evenload.doctor.gpu_state import usable_gpus

if TYPE_CHECKING:
    import torch

MIN_S = 0.3
"""Of each measurement, without warm-up; the fastest round counts."""
CPU_SIZE, GPU_SIZE = 1024, 8192
"""Rows of the square matrices."""
CPU_BYTES, GPU_BYTES = 2**27, 2**29
"""Size of the copied buffer, larger than any cache."""
LINK_BYTES = 2**26
UNEVEN_FRACTION = 0.8
"""Of the fastest one of the same kind; a device or link below it has a problem."""
NUM_FLOATS = 2**24


def device_speeds(options: Options) -> Finding:
    if (problem := torch_problem()) is not None:
        return skip(problem)
    import torch

    end = time.monotonic() + options.limit_s - 2.0
    figures: list[Figure] = []
    names = _devices()
    for device, name in names.items():
        kind = torch.device(device).type
        dtypes = (torch.float32, torch.bfloat16) if kind == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
        for dtype in dtypes:
            if time.monotonic() < end:
                figures.append(matmul(device, name, dtype, CPU_SIZE if kind == "cpu" else GPU_SIZE))
        if time.monotonic() < end:
            figures.append(memory(device, name, CPU_BYTES if kind == "cpu" else GPU_BYTES))
    return evaluate_speeds(figures, f"{len(names)} device(s)")


def link_speeds(options: Options) -> Finding:
    if (problem := torch_problem()) is not None:
        return skip(problem)
    gpus = [device for device in _devices() if device != "cpu"]
    if not gpus:
        return skip("no GPU that torch can use")
    end = time.monotonic() + options.limit_s - 2.0
    pairs = [(source, target) for gpu in gpus for source, target in (("cpu", gpu), (gpu, "cpu"))]
    pairs += [(source, target) for source in gpus for target in gpus if source != target]
    figures = [copy(source, target) for source, target in pairs if time.monotonic() < end]
    return evaluate_speeds(figures, f"{len(figures)} of {len(pairs)} links")


def allreduce_speed(options: Options) -> Finding:
    """Measure the bus bandwidth of an all-reduce over all GPUs (NCCL), or over two CPU ranks (gloo)."""
    if (problem := torch_problem()) is not None:
        return skip(problem)
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return skip(f"torch {torch.__version__} is built without torch.distributed")
    num_gpus = len(_devices()) - 1
    backend = options.backend if options.backend != "auto" else "nccl" if num_gpus > 1 else "gloo"
    num_ranks = num_gpus if backend == "nccl" else 2
    if num_ranks < 2:
        return skip(f"{num_ranks} rank over {backend}: nothing to reduce")
    results = run_ranks(backend, num_ranks, options.limit_s - 2.0, NUM_FLOATS)
    finding = evaluate_allreduce(backend, num_ranks, options.limit_s - 2.0, results, NUM_FLOATS)
    if finding.status != "ok":
        return finding
    slowest_s = max(result.seconds for result in results)
    # Each rank sends and receives 2 (n - 1) / n of the bytes: https://github.com/NVIDIA/nccl-tests, PERFORMANCE.md.
    gigabytes = 2 * (num_ranks - 1) / num_ranks * 4 * NUM_FLOATS / 1e9
    figure = Figure(f"all-reduce {num_ranks} ranks {backend}", gigabytes / slowest_s, "GB/s")
    return ok(f"{4 * NUM_FLOATS / 1e6:.0f} MB in {slowest_s * 1e3:.1f} ms", figures=(figure,))


def evaluate_speeds(figures: Sequence[Figure], measured: str) -> Finding:
    """Compare devices of the same name, and links of the same kind (in brackets in ``what``), with the fastest of them."""
    by_kind: dict[str, list[Figure]] = {}
    for figure in figures:
        by_kind.setdefault(_kind(figure.what), []).append(figure)
    slow = []
    for kind, group in by_kind.items():
        fastest = max(figure.value for figure in group)
        slow += [
            f"{figure.what}: {figure.value:.3g} of {fastest:.3g} {figure.unit} for {kind}"
            for figure in group
            if figure.value < UNEVEN_FRACTION * fastest
        ]
    if slow:
        expected = f"devices and links of one kind within {1 - UNEVEN_FRACTION:.0%} of each other"
        fix = "evenload doctor --only 'GPU throttling' --only 'GPU clocks' --only 'GPU links' --only 'GPU memory'"
        return warn("; ".join(slow), expected, fix, figures)
    return ok(f"{measured} measured", figures=figures)


def matmul(device: str, name: str, dtype: torch.dtype, size: int) -> Figure:
    """Measure a product of square matrices, which takes 2 size^3 operations."""
    import torch

    left = torch.randn(size, size, dtype=dtype, device=device)
    right = torch.randn(size, size, dtype=dtype, device=device)
    seconds = fastest_s(lambda: torch.mm(left, right), device)
    return Figure(
        f"{device} ({name}) matmul {str(dtype).removeprefix('torch.')}", 2 * size**3 / seconds / 1e12, "TFLOP/s"
    )


def memory(device: str, name: str, size_bytes: int) -> Figure:
    """Measure a copy within the device's memory; each byte is read and written."""
    import torch

    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = fastest_s(lambda: target.copy_(source), device)
    return Figure(f"{device} ({name}) memory", 2 * size_bytes / seconds / 1e9, "GB/s")


def copy(source: str, target: str) -> Figure:
    """Measure one direction of a link, from or to pinned memory on the host."""
    import torch

    is_pinned = "cpu" in (source, target)
    numbers = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=source, pin_memory=is_pinned and source == "cpu")
    received = torch.empty(LINK_BYTES, dtype=torch.uint8, device=target, pin_memory=is_pinned and target == "cpu")
    gpu = source if source != "cpu" else target
    seconds = fastest_s(lambda: received.copy_(numbers, non_blocking=True), gpu, also=target)
    between = (
        f"between {min(source, target)} and {max(source, target)}"  # a kind of its own: other pairs may have NVLink
    )
    kind = "from host" if source == "cpu" else "to host" if target == "cpu" else between
    return Figure(f"{source} to {target} ({kind}) copy", LINK_BYTES / seconds / 1e9, "GB/s")


def fastest_s(work: Callable[[], object], device: str, also: str = "cpu") -> float:
    """Return the seconds of the fastest round, including synchronization; takes about `MIN_S` in total."""
    import torch

    def finish() -> None:
        for name in {device, also} - {"cpu"}:
            torch.cuda.synchronize(name)

    work()
    finish()
    best = float("inf")
    end = time.perf_counter() + MIN_S
    while True:
        began = time.perf_counter()
        work()
        finish()
        now = time.perf_counter()
        best = min(best, now - began)
        if now > end:
            return best


def _devices() -> dict[str, str]:
    """Return the names of the CPU and of the GPUs that torch can use, by their torch device."""
    import torch

    found = {"cpu": hardware.cpu_model()}
    if torch.version.cuda is not None:
        found |= {f"cuda:{gpu.index}": gpu.name for gpu in usable_gpus()}
    return found


def _kind(what: str) -> str:
    """Return the kind of a figure: ``RTX 3090 memory`` for ``cuda:0 (RTX 3090) memory``."""
    _, _, rest = what.partition("(")
    kind, _, measured = rest.rpartition(")")
    return f"{kind}{measured}"
