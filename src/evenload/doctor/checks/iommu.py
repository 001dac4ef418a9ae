"""Check for an IOMMU or PCIe access control between GPUs, which makes copies between them slow or wrong."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evenload.doctor import system_files
from evenload.doctor.finding import Finding, Options, ok, skip, warn

VENDORS = ("0x10de", "0x1002")
"""NVIDIA, AMD."""
CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""Display and 3D controllers, processing accelerators."""
ACS_CAPABILITY = 0x000D
REDIRECT = 0x04 | 0x08 | 0x10
"""Bits of ACS's control word: request and completion redirect, upstream forwarding (PCIe base spec, 7.7.11.3)."""


@dataclass(frozen=True)
class GpuPath:
    bus: str
    iommu_type: str
    """``DMA``, ``DMA-FQ``, ``identity``; empty without an IOMMU."""
    redirecting: tuple[str, ...]
    """Bridges above the GPU that route its peer traffic through the root."""


def iommu(options: Options) -> Finding:
    gpus = [_read_path(options.root_path, device) for device in gpu_devices(options.root_path)]
    if len(gpus) < 2:
        return skip(f"{len(gpus)} GPU on the PCI bus; the check needs two")
    expected = "direct copies between GPUs: no IOMMU, or one in passthrough mode (iommu=pt), and no ACS"
    translated = [gpu.bus for gpu in gpus if gpu.iommu_type.startswith("DMA")]
    if translated:
        command_line = system_files.text(options.root_path / "proc/cmdline")
        kernel_options = " ".join(word for word in command_line.split() if "iommu" in word)
        found = f"an IOMMU translates the copies of {', '.join(translated)}"
        found += f" (kernel options: {kernel_options})" if kernel_options else ""
        fix = (
            "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub && sudo update-grub && sudo reboot"
            "   # or disable VT-d, AMD-Vi in the BIOS"
        )
        return warn(found, expected, fix)
    bridges = list(dict.fromkeys(bridge for gpu in gpus for bridge in gpu.redirecting))
    if bridges:
        found = f"PCIe access control (ACS) of {', '.join(bridges)} routes copies between GPUs through the root"
        fix = " && ".join(f"sudo setpci -s {bridge} ECAP_ACS+6.w=0000" for bridge in bridges)
        return warn(found, expected, fix + "   # until the next reboot; or disable it in the BIOS")
    passthrough = any(gpu.iommu_type for gpu in gpus)
    return ok(f"{len(gpus)} GPUs, {'IOMMU in passthrough mode' if passthrough else 'no IOMMU between them'}", expected)


def gpu_devices(root: Path) -> Iterator[Path]:
    """Yield the folders of the GPUs on the PCI bus in /sys, by address."""
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if system_files.text(device / "vendor") in VENDORS and system_files.text(device / "class")[:6] in CLASSES:
            yield device


def _read_path(root: Path, device: Path) -> GpuPath:
    above = [part for part in device.resolve().parts[:-1] if part.count(":") == 2 and "." in part]
    folder = root / "sys/bus/pci/devices"
    redirecting = tuple(bridge for bridge in above if _redirects(folder / bridge / "config"))
    return GpuPath(device.name, system_files.text(device / "iommu_group/type"), redirecting)


def _redirects(path: Path) -> bool:
    """Return whether ACS in a bridge's configuration space redirects; False if only root may read that far."""
    try:
        config = path.read_bytes()
    except OSError:
        return False
    offset = 0x100
    seen = set()
    while offset and offset not in seen and offset + 8 <= len(config):
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == ACS_CAPABILITY:
            (control,) = struct.unpack_from("<H", config, offset + 6)
            return bool(control & REDIRECT)
        offset = header >> 20
    return False
