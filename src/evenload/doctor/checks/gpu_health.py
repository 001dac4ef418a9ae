"""Checks for GPUs slowed by heat or settings, with missing links, or with hardware faults."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from evenload.doctor.finding import Finding, Options, fail, ok, warn
from evenload.doctor.gpu_state import (
    SLOWED_BY_HARDWARE,
    SLOWED_BY_HEAT,
    SLOWED_BY_SETTING,
    SLOWED_BY_SUPPLY,
    GpuState,
    gpu_check,
)

LOW_POWER_FRACTION = 0.95
NARROW_FACTOR = 4
"""x4 of x16 slows every step; x8 of x16 hardly matters and is normal with two GPUs."""
HARDWARE_XIDS = {
    48: "uncorrected memory error",
    61: "internal fault",
    62: "internal fault",
    63: "memory row being replaced",
    64: "memory row cannot be replaced",
    74: "NVLink error",
    79: "fell off the bus",
    92: "many corrected memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its firmware (GSP) does not respond",
    120: "its firmware (GSP) failed",
}
"""Xid errors caused by hardware; 13, 31, 43 and others come from faulty programs.
https://docs.nvidia.com/deploy/xid-errors/"""
REBOOT_XIDS = frozenset({79, 119, 120})
"""After these only a reboot helps."""


@gpu_check
def throttling(gpus: Sequence[GpuState], options: Options) -> Finding:
    """Check whether heat or the power supply slows a GPU right now; a power cap under load is not a problem."""
    hot = [gpu for gpu in gpus if (gpu.slowed_by or 0) & SLOWED_BY_HEAT]
    weak = [gpu for gpu in gpus if gpu not in hot and (gpu.slowed_by or 0) & (SLOWED_BY_SUPPLY | SLOWED_BY_HARDWARE)]
    if hot or weak:
        parts = [f"{gpu.label} is slowed by heat{_temperature(gpu)}" for gpu in hot]
        parts += [f"{gpu.label} is slowed by its power supply{_temperature(gpu)}" for gpu in weak]
        buses = ",".join(gpu.bus for gpu in (*hot, *weak))
        reason = "fans, dust, air in the case" if hot else "power cables and supply"
        fix = f"nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE -i {buses}   # then check: {reason}"
        return warn("; ".join(parts), "no GPU slowed by heat or power supply", fix)
    warmest = max((gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None), default=None)
    return ok("no GPU is slowed" + (f", the warmest is at {warmest} °C" if warmest else ""))


@gpu_check
def clocks(gpus: Sequence[GpuState], options: Options) -> Finding:
    parts, fixes = [], []
    for gpu in gpus:
        limit, default = gpu.power_limit_w, gpu.power_default_w
        if limit is not None and default and limit < LOW_POWER_FRACTION * default:
            parts.append(f"{gpu.label} is limited to {limit:.0f} of {default:.0f} W")
            fixes.append(f"sudo nvidia-smi -i {gpu.bus} -pl {default:.0f}")
        clock, default_clock = gpu.clock_mhz, gpu.clock_default_mhz
        is_lowered = clock is not None and default_clock is not None and clock < default_clock
        if is_lowered:
            parts.append(f"{gpu.label} is set to {clock} MHz, the default is {default_clock} MHz")
        elif (gpu.slowed_by or 0) & SLOWED_BY_SETTING:
            parts.append(f"the clocks of {gpu.label} are locked")
            is_lowered = True
        if is_lowered:
            fixes.append(f"sudo nvidia-smi -i {gpu.bus} -rgc && sudo nvidia-smi -i {gpu.bus} -rac")
    if parts:
        return warn("; ".join(parts), "the default power limit and clocks of the GPUs", " && ".join(fixes))
    watts = [f"{gpu.power_limit_w:.0f} W" for gpu in gpus if gpu.power_limit_w is not None]
    return ok(f"default limits: {', '.join(watts)}" if watts else "the driver reports no limits")


@gpu_check
def links(gpus: Sequence[GpuState], options: Options) -> Finding:
    """Check the PCIe link width (unlike the speed, it does not depend on load), and the NVLinks."""
    narrow = [
        gpu for gpu in gpus if gpu.width is not None and gpu.width_max and gpu.width * NARROW_FACTOR <= gpu.width_max
    ]
    broken = [gpu for gpu in gpus if any(gpu.nvlinks) and not all(gpu.nvlinks)]
    parts = [f"{gpu.label} uses PCIe x{gpu.width} of x{gpu.width_max}" for gpu in narrow]
    parts += [f"{gpu.label} has {sum(gpu.nvlinks)} of {len(gpu.nvlinks)} NVLinks up" for gpu in broken]
    if narrow:
        command = f"sudo lspci -vv -s {narrow[0].bus} | grep -E 'LnkCap|LnkSta'"
        fix = f"{command}   # then: another slot, no riser, the PCIe settings in the BIOS"
        return warn("; ".join(parts), "the full width of the GPU", fix)
    if broken:
        fix = f"nvidia-smi nvlink --status -i {broken[0].bus}   # then: the bridge between the GPUs, or a reboot"
        return warn("; ".join(parts), "all NVLinks of a GPU up, or none", fix)
    widths = [
        f"cuda:{gpu.index} x{gpu.width}" + (f" and {sum(gpu.nvlinks)} NVLinks" if any(gpu.nvlinks) else "")
        for gpu in gpus
        if gpu.width is not None
    ]
    return ok("PCIe " + ", ".join(widths) if widths else "the driver reports no PCIe link")


@gpu_check
def errors(gpus: Sequence[GpuState], options: Options) -> Finding:
    """Check for memory errors, and for Xid errors in the kernel log since the start of the machine."""
    expected = "no uncorrected memory errors, no Xid errors of the hardware since the start"
    lost = [gpu for gpu in gpus if gpu.is_row_lost]
    if lost:
        found = "; ".join(f"{gpu.label} has faulty memory that cannot be replaced" for gpu in lost)
        rest = ",".join(str(gpu.index) for gpu in gpus if gpu not in lost)
        return fail(found, expected, f"evenload run -d {rest or 'cpu'} train.py   # and replace the GPU")
    parts, faulty = [], []
    for gpu in gpus:
        if gpu.ecc_errors:
            parts.append(f"{gpu.label} has had {gpu.ecc_errors} uncorrected memory errors")
            faulty.append(gpu.bus)
        elif gpu.is_row_pending:
            parts.append(f"{gpu.label} has faulty memory that a reset replaces")
            faulty.append(gpu.bus)
    xids = read_xids(options.root_path)
    by_address = {gpu.bus.rpartition(".")[0]: gpu for gpu in gpus}
    bad = {(bus, xid): None for bus, xid in xids or () if xid in HARDWARE_XIDS}
    for bus, xid in bad:
        known = by_address.get(bus.lower())
        parts.append(f"Xid {xid} ({HARDWARE_XIDS[xid]}) of {known.label if known else bus}")
        faulty.append(bus + ".0")
    if parts:
        reset = f"sudo nvidia-smi --gpu-reset -i {','.join(dict.fromkeys(faulty))}   # while nothing runs on it"
        needs_reboot = any(xid in REBOOT_XIDS for _, xid in bad)
        return warn("; ".join(parts), expected, "sudo reboot" if needs_reboot else reset)
    log = "" if xids is not None else "; this user may not read the kernel log"
    return ok(f"none reported by {len(gpus)} GPU(s){log}")


def read_xids(root: Path) -> tuple[tuple[str, int], ...] | None:
    """Read the Xid errors (bus, number) from the kernel log since the start; None if this user may not read it."""
    log = _kernel_log(root / "dev/kmsg")
    if log is None and (journal := shutil.which("journalctl")) and root == Path("/"):
        command = [journal, "--dmesg", "--boot", "--output=cat", "--grep=NVRM: Xid", "--quiet"]
        try:
            log = subprocess.run(command, capture_output=True, text=True, timeout=3).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    if log is None:
        return None
    return tuple((bus.lower(), int(xid)) for bus, xid in re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)\): (\d+)", log))


def _kernel_log(path: Path) -> str | None:
    """Read all records of the kernel's ring buffer without waiting for more."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    parts = []
    try:
        while True:
            try:
                block = os.read(file, 1 << 16)  # one record per read
            except BrokenPipeError:
                continue  # the oldest record was overwritten
            if not block:
                break
            parts.append(block)
    except BlockingIOError:
        pass  # end of the log
    except OSError:
        return None
    finally:
        os.close(file)
    return b"".join(parts).decode(errors="replace")


def _temperature(gpu: GpuState) -> str:
    if gpu.temperature_c is None:
        return ""
    limit = f", it slows down at {gpu.slowdown_c} °C" if gpu.slowdown_c else ""
    return f" ({gpu.temperature_c} °C{limit})"
