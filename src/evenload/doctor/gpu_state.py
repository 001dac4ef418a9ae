"""State of each GPU as reported by its driver: heat, power, clocks, PCIe link width, NVLinks, faults."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenload import hardware
from evenload.balance.values import ComputeDevice
from evenload.doctor.finding import Finding, Options, skip
from evenload.visible_gpus import VisibleGpu, query_gpus

SLOWED_BY_HEAT = 0x20 | 0x40
"""Bits of NVML's clock event reasons: software and hardware thermal slowdown."""
SLOWED_BY_SUPPLY = 0x80
"""Power brake, requested by the power supply or the server's controller."""
SLOWED_BY_HARDWARE = 0x08
"""Hardware slowdown by heat or power; the bits above distinguish them if the driver does."""
SLOWED_BY_SETTING = 0x02
"""Clocks set or locked by a user."""

DEFAULT_MODE, PROHIBITED_MODE, EXCLUSIVE_MODE = 0, 2, 3
"""NVML's compute modes."""
NO_GPU = "no NVIDIA GPU with a responding driver"


@dataclass(frozen=True)
class GpuState:
    """One GPU visible to this process; None for values that the driver does not report."""

    index: int
    """N of its ``cuda:N``."""
    name: str
    bus: str = ""
    """PCI address in the form of /sys, ``0000:01:00.0``; ``nvidia-smi -i`` accepts it."""
    smi_index: int | None = None
    """Its number in nvidia-smi."""
    slowed_by: int | None = None
    """NVML's clock event reasons as bits."""
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """Temperature at which it slows down."""
    power_limit_w: float | None = None
    power_default_w: float | None = None
    clock_mhz: int | None = None
    clock_default_mhz: int | None = None
    width: int | None = None
    """PCIe link width in use."""
    width_max: int | None = None
    nvlinks: tuple[bool, ...] = ()
    """State of each NVLink; empty without NVLink."""
    ecc_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    is_row_pending: bool | None = None
    """A faulty memory row will be replaced at the next reset."""
    is_row_lost: bool | None = None
    """A faulty memory row could not be replaced."""
    mode: int | None = None
    is_part: bool = False
    """A part of a GPU (MIG)."""

    @property
    def label(self) -> str:
        return f"cuda:{self.index} ({self.name})"


def gpu_check(check: Callable[[Sequence[GpuState], Options], Finding]) -> Callable[[Options], Finding]:
    """Turn a function of the GPUs into a check that is skipped without GPUs."""

    @functools.wraps(check)
    def run(options: Options) -> Finding:
        gpus = read_gpu_states()
        return check(gpus, options) if gpus else skip(NO_GPU)

    return run


def usable_gpus() -> tuple[ComputeDevice, ...]:
    """Return the GPUs that this process can use together, and show CUDA no others; call it before CUDA starts.

    A GPU that the driver refuses could stop CUDA, and of parts of GPUs (MIG) a process can use one.
    """
    found = hardware.gpus()
    parts = [gpu.uuid for gpu in found if gpu.is_part]
    if uuids := parts[:1] or [gpu.uuid for gpu in found if gpu.uuid]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
        return hardware.gpus()
    return found


def read_gpu_states(environ: Mapping[str, str] = os.environ) -> tuple[GpuState, ...]:
    """Read the state of the GPUs of `hardware.gpus`, in that order."""
    with query_gpus(environ) as found:
        return tuple(_read(found.nvml, gpu) for gpu in found.gpus)


def _read(nvml: Any, gpu: VisibleGpu) -> GpuState:
    def query(function: str, *arguments: Any) -> Any:
        """Return the driver's value, or None if the GPU, the driver or the library does not support the query."""
        try:
            return getattr(nvml, function)(gpu.handle, *arguments)
        except (nvml.NVMLError, AttributeError, TypeError):
            return None

    rows = query("nvmlDeviceGetRemappedRows")
    return GpuState(
        index=gpu.index,
        name=gpu.name,
        bus=_bus(query("nvmlDeviceGetPciInfo")),
        smi_index=query("nvmlDeviceGetIndex"),
        slowed_by=query("nvmlDeviceGetCurrentClocksThrottleReasons"),
        temperature_c=query("nvmlDeviceGetTemperature", 0),
        slowdown_c=query("nvmlDeviceGetTemperatureThreshold", 1),
        power_limit_w=_watts(query("nvmlDeviceGetPowerManagementLimit")),
        power_default_w=_watts(query("nvmlDeviceGetPowerManagementDefaultLimit")),
        clock_mhz=query("nvmlDeviceGetApplicationsClock", 1),
        clock_default_mhz=query("nvmlDeviceGetDefaultApplicationsClock", 1),
        width=query("nvmlDeviceGetCurrPcieLinkWidth"),
        width_max=query("nvmlDeviceGetMaxPcieLinkWidth"),
        nvlinks=_nvlinks(lambda link: query("nvmlDeviceGetNvLinkState", link)),
        ecc_errors=query("nvmlDeviceGetTotalEccErrors", 1, 0),
        is_row_pending=None if rows is None else bool(rows[2]),
        is_row_lost=None if rows is None else bool(rows[3]),
        mode=query("nvmlDeviceGetComputeMode"),
        is_part=gpu.is_part,
    )


def _bus(info: Any) -> str:
    """Convert NVML's ``00000000:01:00.0`` to the ``0000:01:00.0`` of /sys."""
    if info is None:
        return ""
    spelled = info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)
    domain, _, rest = spelled.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _nvlinks(state: Callable[[int], Any]) -> tuple[bool, ...]:
    found = []
    for link in range(36):
        up = state(link)
        if up is None:
            break
        found.append(bool(up))
    return tuple(found)
