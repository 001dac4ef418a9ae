"""Does the installed torch fit the driver, the GPUs, and the libraries it was built with?"""

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
from evenload.doctor.checks.packages import REQUIRED, pip_install, release
from evenload.doctor.finding import Finding, Options

WHEEL, LIBRARIES = "wheel and driver", "CUDA libraries"
TORCH = f"torch>={REQUIRED['torch']}"
NO_TORCH = "torch is missing (see packages)"
OLDEST_CUDA_13 = (7, 5)
"""CUDA 13 knows no GPU older than Turing; wheels for CUDA 12.6 still do."""
ONLY_CUDA_13_SINCE = (10, 0)
"""Blackwell and newer came after CUDA 12.6."""


@dataclass(frozen=True)
class Wheel:
    """What the installed torch was built for."""

    version: str
    cuda: str | None
    """Such as ``13.0``; None for a build without CUDA."""
    architectures: tuple[str, ...]
    """``sm_80`` is machine code for compute capability 8.0 to 8.9, ``compute_90`` is PTX for 9.0 and all newer."""
    is_rocm: bool = False


@dataclass(frozen=True)
class Libraries:
    """The libraries torch was built with, and those it finds when it runs; None where there is none."""

    cuda: str
    cudnn_built: tuple[int, ...] | None
    cudnn_loaded: tuple[int, ...] | None
    nccl_packaged: tuple[int, ...] | None
    nccl_loaded: tuple[int, ...] | None


def wheel(options: Options) -> Finding:
    """The wheel against the driver and the GPUs."""
    if importlib.util.find_spec("torch") is None:
        return Finding(WHEEL, "skip", NO_TORCH)
    try:
        import torch
    except Exception as error:
        return broken_torch(error)
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()  # get_arch_list() would begin CUDA
    built = Wheel(
        str(torch.__version__), torch.version.cuda, tuple((flags or "").split()), torch.version.hip is not None
    )
    return judge_wheel(built, hardware.gpu_driver(), hardware.gpus(), hardware.nvml_problem(options.root_path))


def broken_torch(error: Exception) -> Finding:
    """A torch that is installed and can't be imported."""
    found = f"import torch raised {type(error).__name__}: {error}"
    return Finding(WHEEL, "fail", found, "torch can be imported", pip_install("--force-reinstall", TORCH))


def judge_wheel(
    built: Wheel, driver: hardware.GpuDriver | None, gpus: Sequence[ComputeDevice], nvml_problem: str = ""
) -> Finding:
    """What a wheel means on a machine with this driver and these GPUs."""
    if built.is_rocm:
        return Finding(WHEEL, "skip", f"torch {built.version} for ROCm; this check knows NVIDIA only")
    if nvml_problem:
        mend = "nvidia-smi   # what the driver itself says"
        if "mismatch" in nvml_problem:
            mend = "sudo reboot   # the kernel still runs the driver from before an update"
        elif "nvidia-ml-py" in nvml_problem:
            mend = pip_install(f"nvidia-ml-py>={REQUIRED['nvidia-ml-py']}")
        found = f"an NVIDIA GPU is here, but its driver can't be asked: {nvml_problem}"
        return Finding(WHEEL, "fail", found, "the driver answers", mend)
    if driver is None or not gpus:
        why = (
            "no NVIDIA GPU here" if driver is None else "the environment (CUDA_VISIBLE_DEVICES) leaves no GPU in sight"
        )
        return Finding(WHEEL, "ok", f"torch {built.version}, {why}: runs use the CPU")
    cuda = f"{driver.cuda[0]}.{driver.cuda[1]}"
    here = f"driver {driver.version} (CUDA up to {cuda}), {_spell_gpus(gpus, driver.capabilities)}"
    reinstall = _install_build(_tag(driver))
    if built.cuda is None:
        found = f"torch {built.version}, a build for the CPU alone, beside {here}"
        return Finding(WHEEL, "warn", found, "a build for CUDA: without it the GPUs stay idle", reinstall)
    found = f"torch {built.version} for CUDA {built.cuda}, {here}"
    # Within one major version any driver runs any wheel: https://docs.nvidia.com/deploy/cuda-compatibility/
    if release(built.cuda)[0] > driver.cuda[0]:
        expected = f"a driver for CUDA {release(built.cuda)[0]}, or a wheel for CUDA {driver.cuda[0]}"
        return Finding(WHEEL, "fail", found, expected, reinstall)
    unfit = [
        gpu.name
        for gpu, capability in zip(gpus, driver.capabilities, strict=True)
        if not runs_on(built.architectures, capability)
    ]
    if unfit:
        expected = f"code for {', '.join(dict.fromkeys(unfit))}; this wheel holds {' '.join(built.architectures)}"
        return Finding(WHEEL, "fail", found, expected, reinstall)
    return Finding(WHEEL, "ok", found)


def runs_on(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether code built for these architectures runs on a GPU of this compute capability.

    Machine code (``sm_86``) runs on its own major version from its minor upwards, unless it ends in a letter
    (``sm_90a``: that one alone; ``sm_100f``: its family). PTX (``compute_90``) is compiled, when it is first used, for
    anything as new or newer.
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
    """CUDA, cuDNN and NCCL: as torch was built with them, against those it loads."""
    del options
    if importlib.util.find_spec("torch") is None:
        return Finding(LIBRARIES, "skip", NO_TORCH)
    try:
        import torch
    except Exception:
        return Finding(LIBRARIES, "skip", f"torch can't be imported (see {WHEEL})")
    if torch.version.cuda is None:
        return Finding(LIBRARIES, "skip", f"torch {torch.__version__} is built without CUDA and uses none")
    cudnn = getattr(torch._C, "_cudnn", None)
    raw_nccl = torch._C._nccl_version() if hasattr(torch._C, "_nccl_version") else None
    return judge_libraries(
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


def judge_libraries(libraries: Libraries, *, num_gpus: int, library_path: str) -> Finding:
    """What a set of library versions means."""
    found = f"CUDA {libraries.cuda}, cuDNN {_dots(libraries.cudnn_loaded)}, NCCL {_dots(libraries.nccl_loaded)}"
    mend = "unset LD_LIBRARY_PATH" if library_path else pip_install("--force-reinstall", TORCH)
    built, loaded = libraries.cudnn_built, libraries.cudnn_loaded
    if built and (not loaded or loaded[0] != built[0] or loaded[:2] < built[:2]):
        expected = f"cuDNN {built[0]}.{built[1]} or a newer {built[0]}.x, as torch was built with"
        return Finding(LIBRARIES, "fail", found, expected, mend)
    packaged = libraries.nccl_packaged
    if packaged and libraries.nccl_loaded and libraries.nccl_loaded[:2] < packaged[:2]:
        expected = f"NCCL {_dots(packaged)}, the one installed beside torch; another one is found first"
        return Finding(LIBRARIES, "fail", found, expected, mend)
    if libraries.nccl_loaded is None and num_gpus > 1:
        expected = f"NCCL, to reduce between {num_gpus} GPUs; gloo goes through the CPU"
        return Finding(LIBRARIES, "warn", found, expected, pip_install("--force-reinstall", TORCH))
    return Finding(LIBRARIES, "ok", found)


def _install_build(tag: str) -> str:
    """The command that installs torch's build for one CUDA; uv knows where each build is."""
    install = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    build = shlex.join([*install, "--reinstall-package", "torch", TORCH, f"--torch-backend={tag}"])
    return f"{pip_install('uv')} && {build}"


def _tag(driver: hardware.GpuDriver) -> str:
    """The wheels to install: for CUDA 13 where driver and GPUs all allow it, else for a CUDA 12 that knows the GPUs."""
    if driver.cuda[0] >= 13 and all(capability >= OLDEST_CUDA_13 for capability in driver.capabilities):
        return "cu130"
    return "cu128" if any(capability >= ONLY_CUDA_13_SINCE for capability in driver.capabilities) else "cu126"


def _packaged(name: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in metadata.version(name).split(".")[:3])
    except (metadata.PackageNotFoundError, ValueError):
        return None


def _spell_gpus(gpus: Sequence[ComputeDevice], capabilities: Sequence[tuple[int, int]]) -> str:
    names = [f"{gpu.name} ({major}.{minor})" for gpu, (major, minor) in zip(gpus, capabilities, strict=True)]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _dots(version: tuple[int, ...] | None) -> str:
    return "missing" if version is None else ".".join(map(str, version))
