"""Checks of the installed torch against the driver, the GPUs, and the CUDA libraries it was built with."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from evenload import hardware
from evenload.balance.values import ComputeDevice
from evenload.doctor.checks.packages import NO_TORCH, REQUIRED, pip_install, release, torch_problem
from evenload.doctor.finding import Finding, Options, fail, ok, skip, warn
from evenload.visible_gpus import nvml_problem

TORCH = f"torch>={REQUIRED['torch']}"
TURING = (7, 5)
"""Compute capability; CUDA 13 does not support older GPUs, but wheels for CUDA 12.6 do."""
BLACKWELL = (10, 0)
"""Compute capability; CUDA 12.6 does not support it and newer GPUs."""


@dataclass(frozen=True)
class Wheel:
    version: str
    cuda: str | None
    """Such as ``13.0``; None for a build without CUDA."""
    architectures: tuple[str, ...]
    """``sm_80`` is machine code for compute capability 8.0 to 8.9, ``compute_90`` is PTX for 9.0 and newer."""
    is_rocm: bool = False


@dataclass(frozen=True)
class Libraries:
    """Versions of the libraries that torch was built with and that it loads; None if there is none."""

    cuda: str
    cudnn_built: tuple[int, ...] | None
    cudnn_loaded: tuple[int, ...] | None
    nccl_packaged: tuple[int, ...] | None
    nccl_loaded: tuple[int, ...] | None


def wheel(options: Options) -> Finding:
    if importlib.util.find_spec("torch") is None:
        return skip(NO_TORCH)
    try:
        import torch
    except Exception as error:
        found = f"import torch raised {type(error).__name__}: {error}"
        return fail(found, "torch can be imported", pip_install("--force-reinstall", TORCH))
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()  # get_arch_list() would initialize CUDA
    built = Wheel(
        str(torch.__version__), torch.version.cuda, tuple((flags or "").split()), torch.version.hip is not None
    )
    return evaluate_wheel(built, hardware.gpu_driver(), hardware.gpus(), nvml_problem(options.root_path))


def evaluate_wheel(
    built: Wheel, driver: hardware.GpuDriver | None, gpus: Sequence[ComputeDevice], nvml_problem: str = ""
) -> Finding:
    if built.is_rocm:
        return skip(f"torch {built.version} for ROCm; this check supports NVIDIA only")
    if nvml_problem:
        fix = "nvidia-smi   # shows the error of the driver"
        if "mismatch" in nvml_problem:
            fix = "sudo reboot   # the kernel still runs the driver from before an update"
        elif "nvidia-ml-py" in nvml_problem:
            fix = pip_install(f"nvidia-ml-py>={REQUIRED['nvidia-ml-py']}")
        return fail(
            f"there is an NVIDIA GPU, but its driver does not respond: {nvml_problem}", "the driver responds", fix
        )
    if driver is None or not gpus:
        reason = "no NVIDIA GPU" if driver is None else "the environment (CUDA_VISIBLE_DEVICES) hides all GPUs"
        return ok(f"torch {built.version}, {reason}: runs use the CPU")
    names = [f"{gpu.name} ({major}.{minor})" for gpu, (major, minor) in zip(gpus, driver.capabilities, strict=True)]
    listed = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    machine = f"driver {driver.version} (CUDA up to {driver.cuda[0]}.{driver.cuda[1]}), {listed}"
    reinstall = _install_command(driver)
    if built.cuda is None:
        found = f"torch {built.version}, a CPU build, with {machine}"
        return warn(found, "a build for CUDA: without it the GPUs stay idle", reinstall)
    found = f"torch {built.version} for CUDA {built.cuda}, {machine}"
    # Any driver runs any wheel of its major version: https://docs.nvidia.com/deploy/cuda-compatibility/
    if release(built.cuda)[0] > driver.cuda[0]:
        expected = f"a driver for CUDA {release(built.cuda)[0]}, or a wheel for CUDA {driver.cuda[0]}"
        return fail(found, expected, reinstall)
    unsupported = [
        gpu.name
        for gpu, capability in zip(gpus, driver.capabilities, strict=True)
        if not runs_on(built.architectures, capability)
    ]
    if unsupported:
        needed, included = ", ".join(dict.fromkeys(unsupported)), " ".join(built.architectures)
        return fail(found, f"code for {needed}; this wheel has {included}", reinstall)
    return ok(found)


def runs_on(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether code built for these architectures runs on a GPU of this compute capability.

    Machine code (``sm_86``) runs on its major version from its minor version upwards, unless it ends in a letter
    (``sm_90a``: only that one; ``sm_100f``: its family). PTX (``compute_90``) is compiled at first use for anything as new
    or newer.
    """
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if match is None:
            continue
        kind, built, suffix = match[1], (int(match[2]), int(match[3])), match[4]
        if suffix == "a":
            fits = built == capability
        elif kind == "sm" or suffix == "f":
            fits = built[0] == capability[0] and built <= capability
        else:
            fits = built <= capability
        if fits:
            return True
    return False


def libraries(options: Options) -> Finding:
    """Check the loaded versions of cuDNN and NCCL against those that torch was built with."""
    if (problem := torch_problem()) is not None:
        return skip(problem)
    import torch

    if torch.version.cuda is None:
        return skip(f"torch {torch.__version__} is built without CUDA")
    cudnn = getattr(torch._C, "_cudnn", None)
    raw_nccl = torch._C._nccl_version() if hasattr(torch._C, "_nccl_version") else None
    return evaluate_libraries(
        Libraries(
            cuda=torch.version.cuda,
            cudnn_built=tuple(cudnn.getCompileVersion()) if cudnn else None,
            cudnn_loaded=tuple(cudnn.getRuntimeVersion()) if cudnn else None,
            nccl_packaged=_packaged(f"nvidia-nccl-cu{release(torch.version.cuda)[0]}"),
            nccl_loaded=None if raw_nccl is None else (raw_nccl >> 32, raw_nccl >> 16 & 0xFFFF, raw_nccl & 0xFFFF),
        ),
        num_gpus=len(hardware.gpus()),
        library_path=os.environ.get("LD_LIBRARY_PATH", ""),
    )


def evaluate_libraries(libraries: Libraries, *, num_gpus: int, library_path: str) -> Finding:
    found = f"CUDA {libraries.cuda}, cuDNN {_dots(libraries.cudnn_loaded)}, NCCL {_dots(libraries.nccl_loaded)}"
    reinstall = pip_install("--force-reinstall", TORCH)
    fix = "unset LD_LIBRARY_PATH" if library_path else reinstall
    built, loaded = libraries.cudnn_built, libraries.cudnn_loaded
    if built and (not loaded or loaded[0] != built[0] or loaded[:2] < built[:2]):
        expected = f"cuDNN {built[0]}.{built[1]} or a newer {built[0]}.x, as torch was built with"
        return fail(found, expected, fix)
    packaged = libraries.nccl_packaged
    if packaged and libraries.nccl_loaded and libraries.nccl_loaded[:2] < packaged[:2]:
        return fail(found, f"NCCL {_dots(packaged)}, which is installed with torch; another one is found first", fix)
    if libraries.nccl_loaded is None and num_gpus > 1:
        return warn(found, f"NCCL, to reduce between {num_gpus} GPUs; gloo copies through the CPU", reinstall)
    return ok(found)


def _install_command(driver: hardware.GpuDriver) -> str:
    """Return the command that installs the build of torch for this driver and its GPUs; uv knows where it is."""
    tag = "cu128" if any(capability >= BLACKWELL for capability in driver.capabilities) else "cu126"
    if driver.cuda[0] >= 13 and all(capability >= TURING for capability in driver.capabilities):
        tag = "cu130"
    install = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    build = shlex.join([*install, "--reinstall-package", "torch", TORCH, f"--torch-backend={tag}"])
    return f"{pip_install('uv')} && {build}"


def _packaged(name: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in metadata.version(name).split(".")[:3])
    except (metadata.PackageNotFoundError, ValueError):
        return None


def _dots(version: tuple[int, ...] | None) -> str:
    return "missing" if version is None else ".".join(map(str, version))
