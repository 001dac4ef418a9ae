"""Read what a device and the compiler have done so far, and prolong the computation of a throttled rank."""

from __future__ import annotations

import resource
import sys
import time

import torch

from evenload.training.launch.throttle import ComputeThrottle


def slow_down(throttle: ComputeThrottle, device: torch.device, since_s: float) -> None:
    """Compute on, if this rank is throttled, for what it computed since `since_s` (`time.perf_counter`)."""
    if not throttle.active:
        return
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # queued kernels have not taken their time yet
    throttle.slow_down(time.perf_counter() - since_s)


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of the GPU, or of this process."""
    if device.type == "cuda":
        # `max_memory_allocated` flattens all statistics first: 0.1 ms in each step.
        found = torch.cuda.memory_stats_as_nested_dict(device)
        return int(found["allocated_bytes"]["all"]["peak"]) if found else 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has made so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"].get("unique_graphs", 0)) if dynamo is not None else 0
