"""Check of GPU memory that other processes use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evenload import hardware
from evenload.balance.values import ComputeDevice
from evenload.doctor.finding import Finding, Options, fail, ok, skip, warn
from evenload.doctor.gpu_state import NO_GPU
from evenload.doctor.system_files import GIB

SLOWS_FRACTION, STOPS_FRACTION = 0.05, 0.9
"""More than the first fraction shrinks micro-batches, more than the second leaves no space for any."""


def memory_held(options: Options) -> Finding:
    processes = hardware.gpu_processes(root=options.root_path)
    if options.private:
        processes = tuple(replace(process, name="", user="") for process in processes)
    return evaluate_memory(hardware.gpus(), hardware.gpu_used_bytes(), processes)


def evaluate_memory(
    gpus: Sequence[ComputeDevice], used_bytes: Sequence[int], processes: Sequence[hardware.GpuProcess]
) -> Finding:
    if not gpus:
        return skip(NO_GPU)
    fractions = [
        used / gpu.memory_bytes if gpu.memory_bytes else 0.0 for gpu, used in zip(gpus, used_bytes, strict=True)
    ]
    expected = f"less than {SLOWS_FRACTION:.0%} of each GPU used by other processes"
    held = [gpu.index for gpu, fraction in zip(gpus, fractions, strict=True) if fraction > SLOWS_FRACTION]
    if not held:
        return ok(f"at most {max(fractions):.0%} used on {len(gpus)} GPU(s)", expected)
    parts = []
    for index in held:
        users = [_format(process) for process in processes if process.gpu_index == index]
        parts.append(
            f"cuda:{index}: {used_bytes[index] / GIB:.1f} of {gpus[index].memory_bytes / GIB:.1f} GiB used by "
            + (", ".join(users) or "processes that are not visible from here")
        )
    pids = dict.fromkeys(process.pid for process in processes if process.gpu_index in held and process.name)
    fix = f"kill {' '.join(map(str, pids))}" if pids else "nvidia-smi   # on the host, outside this container"
    return (fail if max(fractions) > STOPS_FRACTION else warn)("; ".join(parts), expected, fix)


def _format(process: hardware.GpuProcess) -> str:
    command = process.name if len(process.name) <= 50 else process.name[:47] + "..."
    owner = f" ({command}, user {process.user})" if command else ""
    return f"{process.used_bytes / GIB:.1f} GiB by process {process.pid}{owner}"
