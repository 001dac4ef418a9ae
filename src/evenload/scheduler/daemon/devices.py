"""Devices of a queue on this machine, and the variables that limit a job's program to its own devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from evenload import hardware
from evenload.scheduler.core.values import Device
from evenload.scheduler.daemon.queue_file import QueueFile
from evenload.visible_gpus import query_gpus

HOST = "local"
"""All devices of a local queue are in one machine, whatever its current name."""

_MOST_SLOTS = 8
_ALONG_THE_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@dataclass(frozen=True, slots=True)
class LocalDevice:
    device: Device
    """A GPU's id is its UUID, which stays the same when other GPUs are added or removed."""
    label: str
    """Name for people: ``gpu0`` as nvidia-smi counts, ``cpu:0-3``."""
    cores: tuple[int, ...] = ()

    @property
    def is_gpu(self) -> bool:
        return not self.cores


def find_devices(settings: QueueFile) -> tuple[LocalDevice, ...]:
    """Return each GPU; without GPUs, or where they are set, also slots of CPU cores."""
    gpus = _gpus()
    slots = settings.cpu_slots
    if slots is None:
        slots = 0 if gpus else min(_MOST_SLOTS, len(hardware.usable_cores()))
    return tuple(kept for found in (*gpus, *_cpu_slots(slots)) if (kept := _with_rules(found, settings)) is not None)


def variables_for(devices: Iterable[LocalDevice]) -> tuple[dict[str, str], tuple[int, ...]]:
    """Return the variables that show a program its GPUs and no others, and the cores it is bound to (none: all)."""
    given = tuple(devices)
    uuids = [found.device.id for found in given if found.is_gpu]
    cores = sorted({core for found in given for core in found.cores})
    return {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}, () if uuids else tuple(cores)


def kind_of(name: str) -> str:
    """Return the short name of a GPU: ``NVIDIA GeForce RTX 2080 Ti`` → ``rtx2080ti``, ``NVIDIA A100-SXM4-80GB`` → ``a100``."""
    words = re.sub(r"NVIDIA|GeForce|Tesla|Quadro|Graphics", " ", name, flags=re.IGNORECASE).split()
    kept = []
    for word in words:
        head = word.partition("-")[0]
        if re.fullmatch(r"\d+GB|PCIe|SXM\d?|HBM\w*|NVL|MIG", head, flags=re.IGNORECASE):
            break
        kept.append(head)
        if head != word:
            break
    return re.sub(r"[^a-z0-9]", "", "".join(kept).lower()) or "gpu"


def _gpus() -> tuple[LocalDevice, ...]:
    """Return all GPUs of NVML; CUDA_VISIBLE_DEVICES of this process is ignored."""
    found = []
    with query_gpus(_ALONG_THE_BUS) as query:
        for gpu in query.gpus:
            device = Device(gpu.uuid, HOST, kind_of(gpu.name), query.used_and_total_bytes(gpu)[1])
            found.append(LocalDevice(device, f"gpu{gpu.index}"))
    return tuple(found)


def _cpu_slots(num: int) -> tuple[LocalDevice, ...]:
    """Divide the usable cores into `num` equal slots; more slots than cores share them in turn."""
    cores = hardware.usable_cores()
    slots = []
    for index in range(num):
        if num <= len(cores):
            own = cores[index * len(cores) // num : (index + 1) * len(cores) // num]
            label = f"cpu:{hardware.spell_numbers(own)}"
        else:
            own = (cores[index % len(cores)],)
            label = f"cpu:{own[0]}.{index // len(cores)}"
        memory_bytes = hardware.cpu(own).memory_bytes // num
        slots.append(LocalDevice(Device(label, HOST, "cpu", memory_bytes), label, own))
    return tuple(slots)


def _with_rules(found: LocalDevice, settings: QueueFile) -> LocalDevice | None:
    changes: Mapping[str, object] = {}
    for rule in settings.devices:
        if rule.match in (found.device.id, found.label, found.device.kind):
            if not rule.use:
                return None
            changes = {**changes, **rule.changes}
    return replace(found, device=replace(found.device, **changes)) if changes else found  # type: ignore[arg-type]
