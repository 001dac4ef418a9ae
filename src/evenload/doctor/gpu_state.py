"""Each GPU as the driver describes it: heat, power, clocks, slots, faults; what hardware.py has no use for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evenload import hardware

SLOWED_BY_HEAT = 0x20 | 0x40
"""Bits of NVML's clock event reasons: software and hardware thermal slowdown."""
SLOWED_BY_SUPPLY = 0x80
"""Power brake: the supply, or the server's own control, asks for less."""
SLOWED_BY_HARDWARE = 0x08
"""Hardware slowdown: heat or power; the two above say which, where they are known."""
SLOWED_BY_SETTING = 0x02
"""Somebody has set or locked the clocks."""

DEFAULT_MODE, PROHIBITED_MODE, EXCLUSIVE_MODE = 0, 2, 3
"""NVML's compute modes."""


@dataclass(frozen=True)
class Card:
    """One GPU that this process may use; None where the driver doesn't tell."""

    index: int
    """The N of its ``cuda:N`` here."""
    name: str
    bus: str = ""
    """Its place, as /sys spells it: ``0000:01:00.0``; commands of nvidia-smi take it by ``-i``."""
    smi_index: int | None = None
    """Its number in nvidia-smi."""
    slowed_by: int | None = None
    """NVML's clock event reasons, bit by bit."""
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """Where it begins to slow down."""
    power_limit_w: float | None = None
    power_default_w: float | None = None
    clock_mhz: int | None = None
    """The SM clock that is set for applications."""
    clock_default_mhz: int | None = None
    width: int | None = None
    """PCIe lanes in use."""
    width_max: int | None = None
    nvlinks: tuple[bool, ...] = ()
    """Which of its NVLinks are up; empty where it has none."""
    ecc_errors: int | None = None
    """Uncorrected errors of its memory since the driver was loaded."""
    is_row_pending: bool | None = None
    """A faulty row of memory waits for a reset to be replaced."""
    is_row_lost: bool | None = None
    """A faulty row could not be replaced."""
    mode: int | None = None
    """Its compute mode."""
    is_split: bool | None = None
    """MIG is on."""

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"cuda:{self.index} ({self.name})"


def read_cards(environ: Mapping[str, str] = os.environ) -> tuple[Card, ...]:
    """The GPUs of `hardware.gpus`, in that order."""
    with hardware.gpu_handles(environ) as (nvml, handles):
        return tuple(_read(nvml, handle, index) for index, handle in enumerate(handles))


def _read(nvml: Any, handle: Any, index: int) -> Card:
    def ask(function: str, *arguments: Any) -> Any:
        """What the driver answers, or None: not every GPU, driver or library knows every question."""
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (nvml.NVMLError, AttributeError, TypeError):
            return None

    rows = ask("nvmlDeviceGetRemappedRows")
    split = ask("nvmlDeviceGetMigMode")
    return Card(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        bus=_bus(ask("nvmlDeviceGetPciInfo")),
        smi_index=ask("nvmlDeviceGetIndex"),
        slowed_by=ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
        temperature_c=ask("nvmlDeviceGetTemperature", 0),
        slowdown_c=ask("nvmlDeviceGetTemperatureThreshold", 1),
        power_limit_w=_watts(ask("nvmlDeviceGetPowerManagementLimit")),
        power_default_w=_watts(ask("nvmlDeviceGetPowerManagementDefaultLimit")),
        clock_mhz=ask("nvmlDeviceGetApplicationsClock", 1),
        clock_default_mhz=ask("nvmlDeviceGetDefaultApplicationsClock", 1),
        width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        nvlinks=_nvlinks(lambda link: ask("nvmlDeviceGetNvLinkState", link)),
        ecc_errors=ask("nvmlDeviceGetTotalEccErrors", 1, 0),
        is_row_pending=None if rows is None else bool(rows[2]),
        is_row_lost=None if rows is None else bool(rows[3]),
        mode=ask("nvmlDeviceGetComputeMode"),
        is_split=None if split is None else bool(split[0]),
    )


def _bus(place: Any) -> str:
    """``00000000:01:00.0`` as /sys has it: ``0000:01:00.0``."""
    if place is None:
        return ""
    raw = place.busId
    spelled = raw.decode() if isinstance(raw, bytes) else str(raw)
    domain, _, rest = spelled.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _nvlinks(state: Callable[[int], Any]) -> tuple[bool, ...]:
    """The links up to the first one that the GPU doesn't have."""
    found = []
    for link in range(36):
        up = state(link)
        if up is None:
            break
        found.append(bool(up))
    return tuple(found)
