"""Checks of environment variables that slow or stop a run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from evenload import hardware
from evenload.doctor.finding import Finding, Options, fail, ok, warn

SLOW: Mapping[str, tuple[str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel waits for the previous one"),
    "NCCL_P2P_DISABLE": ("1", "GPUs copy through the host"),
    "NCCL_SHM_DISABLE": ("1", "GPUs of one machine communicate over the network"),
    "NCCL_DEBUG": ("INFO|TRACE", "NCCL logs every call"),
    "NCCL_LAUNCH_MODE": ("GROUP", "kernels of all GPUs wait for each other"),
    "NVIDIA_TF32_OVERRIDE": ("0", "float32 matmuls do not use tensor cores"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor is allocated by the driver"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host waits in every collective"),
    "TORCHDYNAMO_DISABLE": ("1", "torch.compile has no effect"),
    "PYTORCH_JIT": ("0", "scripted functions run in Python"),
    "PYTHONDEVMODE": (".+", "Python runs additional checks"),
    "PYTHONMALLOC": ("debug|malloc_debug|pymalloc_debug", "every allocation is checked"),
    "PYTHONTRACEMALLOC": ("[1-9][0-9]*", "every allocation is traced"),
    "MALLOC_CHECK_": ("[1-9]", "every allocation is checked"),
}
"""For each variable, a pattern of the values that slow a run, and the reason."""

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for its workers, together with TORCHELASTIC_RUN_ID."""

PINNING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that pin threads to the same cores in every rank."""


def variables(options: Options) -> Finding:
    environ = os.environ
    own = [name for name in TORCHRUN if name in environ]
    world_size = environ.get("WORLD_SIZE", "1")
    is_worker = "TORCHELASTIC_RUN_ID" in environ or "EVENLOAD_WORKER" in environ
    if not is_worker and {"RANK", "WORLD_SIZE"} <= environ.keys() and world_size != "1":
        found = f"RANK={environ['RANK']} and WORLD_SIZE={world_size} are left over from a launch"
        expected = f"none of {', '.join(TORCHRUN)}: `python train.py` would wait for {world_size} ranks"
        return fail(found, expected, f"unset {' '.join(own)}")
    slow = {name: why for name, (bad, why) in SLOW.items() if re.fullmatch(bad, environ.get(name, ""), re.IGNORECASE)}
    if slow:
        found = "; ".join(f"{name}={environ[name]}: {why}" for name, why in slow.items())
        return warn(found, "no variable that slows a run", f"unset {' '.join(slow)}")
    return ok("no variable that slows or stops a run")


def threads(options: Options) -> Finding:
    """Check the settings of OpenMP and MKL; Evenload itself sets the number of threads of each rank."""
    environ, num_cores = os.environ, len(hardware.usable_cores())
    text = environ.get("OMP_NUM_THREADS", "")
    first = text.partition(",")[0].strip()  # one number for each level of nesting
    expected = f"not set, or 1 to {num_cores} threads"
    if text and (not first.isdigit() or int(first) == 0):
        return warn(f"OMP_NUM_THREADS={text} is not a number", expected, "unset OMP_NUM_THREADS")
    if text and int(first) > num_cores:
        found = f"OMP_NUM_THREADS={text}, but only {num_cores} cores are usable: threads compete for cores"
        return warn(found, expected, "unset OMP_NUM_THREADS")
    bound = [name for name in PINNING if environ.get(name)]
    if environ.get("OMP_PROC_BIND", "").lower() in ("true", "close", "spread", "primary", "master"):
        bound.append("OMP_PROC_BIND")
    if bound:
        found = ", ".join(f"{name}={environ[name]}" for name in bound)
        return warn(found, "threads not pinned: every rank would use the same cores", f"unset {' '.join(bound)}")
    if environ.get("KMP_DUPLICATE_LIB_OK", "").upper() in ("TRUE", "1"):
        found = "KMP_DUPLICATE_LIB_OK=TRUE allows two OpenMP libraries to be loaded: results may be wrong"
        return warn(found, "one OpenMP library", "unset KMP_DUPLICATE_LIB_OK")
    return ok(f"OMP_NUM_THREADS={text}" if text else "no OpenMP settings")
