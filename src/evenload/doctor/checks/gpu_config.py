"""Checks of the GPUs visible to a run, their order, and whether one installation serves them all."""

from __future__ import annotations

import os
from collections.abc import Sequence

from evenload import hardware
from evenload.doctor.checks.torch_build import BLACKWELL, TURING
from evenload.doctor.finding import Finding, Options, fail, ok, skip, warn
from evenload.doctor.gpu_state import DEFAULT_MODE, NO_GPU, PROHIBITED_MODE, GpuState, gpu_check, read_gpu_states
from evenload.visible_gpus import query_gpus

ORDERS = ("FASTEST_FIRST", "PCI_BUS_ID")
FIRST_WITH_BFLOAT16 = (8, 0)
GENERATION_NAMES = {
    (5, 0): "Maxwell",
    (6, 0): "Pascal",
    (7, 0): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere",
    (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
}
"""By the first compute capability of the generation."""


def order(options: Options) -> Finding:
    """Check that ``cuda:N`` is nvidia-smi's GPU N, and that all GPUs of CUDA_VISIBLE_DEVICES are visible."""
    gpus = read_gpu_states()
    if hardware.gpu_driver() is None:
        return skip(NO_GPU)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = [part.strip() for part in visible.split(",")] if visible else []
    if len(gpus) < len(entries) and any(entry not in ("-1", "") for entry in entries):
        found = f"CUDA_VISIBLE_DEVICES={visible} names {len(entries)} GPUs, CUDA sees {len(gpus) or 'none'}"
        expected = "each entry names an existing GPU, once; CUDA ignores the list from the first invalid entry on"
        kept = ",".join(entries[: len(gpus)])
        return fail(found, expected, f"export CUDA_VISIBLE_DEVICES={kept}" if kept else "unset CUDA_VISIBLE_DEVICES")
    if not gpus:
        return skip(f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs")
    by_bus = "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    device_order = os.environ.get("CUDA_DEVICE_ORDER")
    if device_order is not None and device_order not in ORDERS:
        return warn(f"CUDA_DEVICE_ORDER={device_order} is unknown to CUDA", f"one of {', '.join(ORDERS)}", by_bus)
    numbers = [gpu.smi_index for gpu in gpus if gpu.smi_index is not None]
    if not entries and numbers != sorted(numbers):
        pairs = [f"{gpu.label} is nvidia-smi's {gpu.smi_index}" for gpu in gpus if gpu.smi_index != gpu.index]
        return warn("; ".join(pairs), "the same number in CUDA and nvidia-smi", by_bus)
    return ok(", ".join(f"cuda:{gpu.index} is {gpu.name}" for gpu in gpus))


def access(options: Options) -> Finding:
    """Check that the driver gives access to every GPU; a run leaves the others out."""
    with query_gpus() as found:
        refused, num_gpus = found.refused, len(found.gpus)
    if refused:
        reasons = "; ".join(f"GPU {gpu.index}: {gpu.reason}" for gpu in refused)
        lost = any("lost" in gpu.reason.lower() or "unknown" in gpu.reason.lower() for gpu in refused)
        fix = "sudo reboot   # then, if it is lost again: power cables, riser, slot" if lost else "ls -l /dev/nvidia*"
        return fail(reasons, f"access to all {num_gpus + len(refused)} GPUs; a run uses the other {num_gpus}", fix)
    return ok(f"the driver gives access to {num_gpus} GPU(s)") if num_gpus else skip(NO_GPU)


def generations(options: Options) -> Finding:
    """Check that one wheel of torch has code for all GPUs, and that one precision suits them."""
    gpus, driver = hardware.gpus(), hardware.gpu_driver()
    if not gpus or driver is None:
        return skip(NO_GPU)
    capabilities = driver.capabilities
    names = [
        f"{gpu.name} ({_generation(capability)}, {capability[0]}.{capability[1]})"
        for gpu, capability in zip(gpus, capabilities, strict=True)
    ]
    found = ", ".join(dict.fromkeys(names))
    old = {index for index, capability in enumerate(capabilities) if capability < TURING}
    new = {index for index, capability in enumerate(capabilities) if capability >= BLACKWELL}
    if old and new:  # no wheel has code for both

        def memory_bytes(indices: set[int]) -> int:
            return sum(gpus[index].memory_bytes for index in indices)

        dropped = new if memory_bytes(old) > memory_bytes(new) else old
        kept = ",".join(str(index) for index in range(len(gpus)) if index not in dropped)
        expected = "GPUs supported by one wheel of torch: older than Turing needs CUDA 12.6, Blackwell a newer one"
        return fail(found, expected, f"evenload run -d {kept} train.py")
    slow = [gpu.name for gpu, own in zip(gpus, capabilities, strict=True) if own < FIRST_WITH_BFLOAT16]
    if slow and len(slow) < len(gpus):
        expected = f"one precision that is fast on all: {', '.join(dict.fromkeys(slow))} computes bfloat16 slowly"
        return warn(found, expected, "evenload run --precision fp16 train.py")
    return ok(found)


@gpu_check
def mode(gpus: Sequence[GpuState], options: Options) -> Finding:
    expected = "compute mode Default and no MIG on each GPU"
    closed = [gpu for gpu in gpus if gpu.mode not in (None, DEFAULT_MODE)]
    if closed:
        is_prohibited = [gpu.mode == PROHIBITED_MODE for gpu in closed]
        found = "; ".join(
            f"{gpu.label} accepts {'no process' if prohibited else 'only one process'}"
            for gpu, prohibited in zip(closed, is_prohibited, strict=True)
        )
        fix = " && ".join(f"sudo nvidia-smi -i {gpu.bus} -c DEFAULT" for gpu in closed)
        return (fail if any(is_prohibited) else warn)(found, expected, fix)
    parts = [gpu for gpu in gpus if gpu.is_part]
    if len(parts) > 1:
        found = f"{', '.join(gpu.label for gpu in parts)} are parts of GPUs (MIG)"
        fix = "sudo nvidia-smi -mig 0   # or keep them: each is a rank of its own, and the ranks sum over gloo"
        return warn(found, "whole GPUs: NCCL does not sum between parts of one", fix)
    return ok(f"{len(gpus)} GPU(s) accept all processes")


def _generation(capability: tuple[int, int]) -> str:
    return next((name for first, name in reversed(GENERATION_NAMES.items()) if capability >= first), "older")
