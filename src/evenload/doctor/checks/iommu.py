"""Does an IOMMU, or PCIe access control, stand between the GPUs? Then they copy to each other slowly, or wrongly."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenload.doctor import files
from evenload.doctor.finding import Finding, Options

NAME = "IOMMU and ACS"
VENDORS = ("0x10de", "0x1002")
"""NVIDIA, AMD."""
CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""Display and 3D controllers, processing accelerators."""
ACS_CAPABILITY = 0x000D
REDIRECT = 0x04 | 0x08 | 0x10
"""Of ACS's control word: request redirect, completion redirect, upstream forwarding (PCI Express base spec, 7.7.11.3)."""


@dataclass(frozen=True)
class GpuPath:
    """What lies between one GPU and the others."""

    bus: str
    group: str
    """How the IOMMU treats it: ``DMA``, ``DMA-FQ``, ``identity``; empty without an IOMMU."""
    redirecting: tuple[str, ...]
    """Bridges above it that send what it says to its neighbours through the root."""


def iommu(options: Options) -> Finding:
    """Reads /sys, for GPUs of NVIDIA and AMD."""
    return judge_iommu(read_gpus(options.root_path), files.text(options.root_path / "proc/cmdline"))


def judge_iommu(gpus: Sequence[GpuPath], command_line: str) -> Finding:
    """What IOMMU groups and bridges mean; with one GPU nothing.

    Args:
        gpus: those of the machine, seen from its PCI bus.
        command_line: the kernel's.
    """
    if len(gpus) < 2:
        return Finding(NAME, "skip", f"{len(gpus)} GPU on the PCI bus; it matters from two on")
    translated = [gpu for gpu in gpus if gpu.group.startswith("DMA")]
    bridges = list(dict.fromkeys(bridge for gpu in gpus for bridge in gpu.redirecting))
    expected = "GPUs copy to each other straight: no IOMMU, or one that passes them through (iommu=pt), and no ACS"
    if translated:
        options = " ".join(word for word in command_line.split() if "iommu" in word)
        found = f"an IOMMU translates what {', '.join(gpu.bus for gpu in translated)} copies"
        found += f" (kernel options: {options})" if options else ""
        mend = (
            "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub && sudo update-grub && sudo reboot"
            "   # or off in the BIOS: VT-d, AMD-Vi"
        )
        return Finding(NAME, "warn", found, expected, mend)
    if bridges:
        found = f"PCIe access control (ACS) of {', '.join(bridges)} sends copies between GPUs through the root"
        mend = " && ".join(f"sudo setpci -s {bridge} ECAP_ACS+6.w=0000" for bridge in bridges)
        return Finding(NAME, "warn", found, expected, mend + "   # until the next start; or off in the BIOS")
    passed = any(gpu.group for gpu in gpus)
    found = f"{len(gpus)} GPUs, " + ("the IOMMU passes them through" if passed else "no IOMMU between them")
    return Finding(NAME, "ok", found, expected)


def read_gpus(root: Path) -> tuple[GpuPath, ...]:
    """The GPUs on the PCI bus, by their places."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if files.text(device / "vendor") not in VENDORS or files.text(device / "class")[:6] not in CLASSES:
            continue
        above = [part for part in device.resolve().parts[:-1] if part.count(":") == 2 and "." in part]
        folder = root / "sys/bus/pci/devices"
        redirecting = tuple(bridge for bridge in above if redirects(_config(folder / bridge / "config")))
        found.append(GpuPath(device.name, files.text(device / "iommu_group/type"), redirecting))
    return tuple(found)


def redirects(config: bytes) -> bool:
    """Whether a bridge's configuration space has ACS redirect requests or completions.

    Args:
        config: its 4096 bytes; fewer, which is what an ordinary user may read, tell nothing.
    """
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


def _config(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
