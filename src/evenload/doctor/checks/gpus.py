"""Is memory of a GPU already held, and by whom?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evenload import hardware
from evenload.balance.values import ComputeDevice
from evenload.doctor.finding import Finding, Options

SLOWS_FRACTION, STOPS_FRACTION = 0.05, 0.9
GIB = 2**30


def memory_held(options: Options) -> Finding:
    """Asks the driver, of the GPUs this process may use."""
    processes = hardware.gpu_processes(root=options.root_path)
    if options.private:
        processes = tuple(replace(process, name="", user="") for process in processes)
    return judge_memory_held(hardware.gpus(), hardware.gpu_used_bytes(), processes)


def judge_memory_held(
    gpus: Sequence[ComputeDevice], used_bytes: Sequence[int], processes: Sequence[hardware.GpuProcess]
) -> Finding:
    """What held memory means: over SLOWS_FRACTION of a GPU it shrinks micro-batches, over STOPS_FRACTION none fits."""
    name = "GPU memory"
    if not gpus:
        return Finding(name, "skip", "no NVIDIA GPU that can be asked")
    fractions = [
        used / gpu.memory_bytes if gpu.memory_bytes else 0.0 for gpu, used in zip(gpus, used_bytes, strict=True)
    ]
    expected = f"less than {SLOWS_FRACTION:.0%} of each GPU held by others"
    held = [gpu.index for gpu, fraction in zip(gpus, fractions, strict=True) if fraction > SLOWS_FRACTION]
    if not held:
        return Finding(name, "ok", f"at most {max(fractions):.0%} held on {len(gpus)} GPU(s)", expected)
    stories = []
    for index in held:
        holders = [_spell(process) for process in processes if process.gpu_index == index]
        stories.append(
            f"cuda:{index}: {used_bytes[index] / GIB:.1f} of {gpus[index].memory_bytes / GIB:.1f} GiB held by "
            + (", ".join(holders) or "processes that can't be seen from here")
        )
    pids = dict.fromkeys(process.pid for process in processes if process.gpu_index in held and process.name)
    return Finding(
        name,
        "fail" if max(fractions) > STOPS_FRACTION else "warn",
        "; ".join(stories),
        expected,
        f"kill {' '.join(map(str, pids))}" if pids else "nvidia-smi   # on the host, outside this container",
    )


def _spell(process: hardware.GpuProcess) -> str:
    command = process.name if len(process.name) <= 50 else process.name[:47] + "..."
    who = f" ({command}, user {process.user})" if command else ""
    return f"{process.used_bytes / GIB:.1f} GiB by process {process.pid}{who}"
