"""Variables of the environment that slow or stop a run, often left over from another day."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from evenload import hardware
from evenload.doctor.finding import Finding, Options

VARIABLES, THREADS = "variables", "threads"

SLOW: Mapping[str, tuple[str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel waits for the one before"),
    "NCCL_P2P_DISABLE": ("1", "GPUs copy through the host"),
    "NCCL_SHM_DISABLE": ("1", "GPUs of one machine talk over the network"),
    "NCCL_DEBUG": ("INFO|TRACE", "NCCL writes a line for every call"),
    "NCCL_LAUNCH_MODE": ("GROUP", "kernels of all GPUs wait for each other"),
    "NVIDIA_TF32_OVERRIDE": ("0", "float32 matmuls lose the tensor cores"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor is asked of the driver"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked twice"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host waits in every collective"),
    "TORCHDYNAMO_DISABLE": ("1", "torch.compile does nothing"),
    "PYTORCH_JIT": ("0", "scripted functions run in Python"),
    "PYTHONDEVMODE": (".+", "Python checks everything it does"),
    "PYTHONMALLOC": ("debug|malloc_debug|pymalloc_debug", "every allocation is checked"),
    "PYTHONTRACEMALLOC": ("[1-9][0-9]*", "every allocation is recorded"),
    "MALLOC_CHECK_": ("[1-9]", "every allocation is checked"),
}
"""For each variable the values (a pattern) that slow a run, and why."""

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for its workers; TORCHELASTIC_RUN_ID tells that it really did."""

PINNING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Tie threads to cores by number: the same ones in every rank."""


def variables(options: Options) -> Finding:
    """Looks at the environment that a run started from here would get."""
    del options
    return judge_variables(os.environ)


def judge_variables(environ: Mapping[str, str]) -> Finding:
    """What variables mean; those that make a lone script wait for ranks nobody starts would stop it."""
    own = [name for name in TORCHRUN if name in environ]
    world_size = environ.get("WORLD_SIZE", "1")
    is_worker = "TORCHELASTIC_RUN_ID" in environ or "EVENLOAD_WORKER" in environ
    if not is_worker and {"RANK", "WORLD_SIZE"} <= environ.keys() and world_size != "1":
        found = f"RANK={environ['RANK']} and WORLD_SIZE={world_size} are left over from a launch"
        expected = f"none of {', '.join(TORCHRUN)}: `python train.py` would wait for {world_size} ranks"
        return Finding(VARIABLES, "fail", found, expected, f"unset {' '.join(own)}")
    slow = {name: why for name, (bad, why) in SLOW.items() if re.fullmatch(bad, environ.get(name, ""), re.IGNORECASE)}
    if slow:
        found = "; ".join(f"{name}={environ[name]}: {why}" for name, why in slow.items())
        return Finding(VARIABLES, "warn", found, "none that slows a run", f"unset {' '.join(slow)}")
    return Finding(VARIABLES, "ok", "none is set that would slow or stop a run")


def threads(options: Options) -> Finding:
    """Looks at what is said to OpenMP and MKL."""
    del options
    return judge_threads(os.environ, num_cores=len(hardware.usable_cores()))


def judge_threads(environ: Mapping[str, str], *, num_cores: int) -> Finding:
    """What settings of OpenMP mean; Evenload itself gives each rank its threads."""
    text = environ.get("OMP_NUM_THREADS", "")
    first = text.partition(",")[0].strip()  # one number for each level of nesting
    expected = f"no setting, or 1 to {num_cores} threads"
    if text and (not first.isdigit() or int(first) == 0):
        return Finding(THREADS, "warn", f"OMP_NUM_THREADS={text} is no number", expected, "unset OMP_NUM_THREADS")
    if text and int(first) > num_cores:
        found = f"OMP_NUM_THREADS={text}, but {num_cores} cores may be used: threads stop each other"
        return Finding(THREADS, "warn", found, expected, "unset OMP_NUM_THREADS")
    bound = [name for name in PINNING if environ.get(name)]
    if environ.get("OMP_PROC_BIND", "").lower() in ("true", "close", "spread", "primary", "master"):
        bound.append("OMP_PROC_BIND")
    if bound:
        found = ", ".join(f"{name}={environ[name]}" for name in bound)
        why = "no setting that ties threads to cores: every rank would take the same ones"
        return Finding(THREADS, "warn", found, why, f"unset {' '.join(bound)}")
    if environ.get("KMP_DUPLICATE_LIB_OK", "").upper() in ("TRUE", "1"):
        found = "KMP_DUPLICATE_LIB_OK=TRUE hides that two OpenMP libraries are loaded: wrong results may follow"
        return Finding(THREADS, "warn", found, "one OpenMP library", "unset KMP_DUPLICATE_LIB_OK")
    return Finding(THREADS, "ok", f"OMP_NUM_THREADS={text}" if text else "OpenMP is left alone")
