"""Parse the devices that a model is split over, and find the memory that it may use on each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from evenload import hardware
from evenload.errors import ConfigError
from evenload.training.launch.environment import WorkerSpec

_USABLE = 0.9
"""Usable part of free memory: the rest is for workspaces, fragmentation, and the script's own tensors."""
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*$")
_EXPECTED = (
    'expected a list such as ["cuda:0", "cuda:1"] or ["cuda:0", "cpu"], or memory limits by device such as '
    '{"cuda:0": "6GiB", "cpu": "20GiB"}'
)


@dataclass(frozen=True)
class DeviceCapacity:
    device: torch.device
    limit_bytes: int
    is_set: bool
    """True for a limit that the user set; else it is a part of the free memory."""

    def describe(self) -> str:
        return f"{self.device} {format_bytes(self.limit_bytes)} ({'as set' if self.is_set else '90 % of what is free'})"


def choose(devices: Any, spec: WorkerSpec) -> list[tuple[torch.device, int | None]]:
    """Return the devices, each with the limit that the user set, or None; this rank's own devices for None.

    Raises:
        ConfigError: Fewer than two or unknown devices, or other devices than the command line assigned to this rank.
    """
    if devices is None:
        return [(device, None) for device in _own_devices(spec)]
    chosen = [_entry(entry, devices) for entry in _entries(devices)]
    if len(chosen) < 2:
        names = ", ".join(str(device) for device, _ in chosen) or "none"
        raise ConfigError(
            f"place(devices={_repr(devices)}): a model is split over at least two devices, but got {names}; {_EXPECTED}, or "
            "leave place out and let run.prepare(model) or model.to(device) move the model"
        )
    _check_against(chosen, devices, spec)
    return chosen


def measure_capacities(
    chosen: Sequence[tuple[torch.device, int | None]], held_bytes: Mapping[torch.device, int], num_ranks_here: int
) -> list[DeviceCapacity]:
    """Return the memory that the model may use on each device: the user's limit, or nine tenths of the free memory.

    `held_bytes`, the model's memory now, counts as free; the `num_ranks_here` ranks of this machine share its memory.
    """
    counts = Counter(device for device, limit in chosen if limit is None)
    capacities = []
    for device, limit in chosen:
        if limit is not None:
            capacities.append(DeviceCapacity(device, limit, is_set=True))
            continue
        free = _free_bytes(device) // (num_ranks_here if device.type == "cpu" else 1) + held_bytes.get(device, 0)
        capacities.append(DeviceCapacity(device, int(free * _USABLE) // counts[device], is_set=False))
    return capacities


def parse_bytes(text: Any, where: str) -> int:
    """Return the bytes of ``6GiB``, ``500MB`` or an integer; ConfigError for any other value."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = _SIZE.match(text) if isinstance(text, str) else None
    if match is None or float(match[1]) <= 0:
        raise ConfigError(
            f'{where}: expected an amount of memory such as "6GiB", "500MB" or a number of bytes, got {text!r}'
        )
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))


def parse_device(entry: Any, where: str, expected: str) -> torch.device:
    """Return a GPU with its index, or the CPU; ConfigError for any other device, or a GPU that torch doesn't see."""
    try:
        if not isinstance(entry, str | torch.device):
            raise TypeError
        device = torch.device(entry)
    except (RuntimeError, TypeError):
        raise ConfigError(f"{where}: {entry!r} is not a device; {expected}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"{where}: {device} is neither a GPU (cuda:0) nor the CPU (cpu); {expected}")
    count = torch.cuda.device_count()
    index = device.index if device.index is not None else (torch.cuda.current_device() if count else 0)
    if index >= count:
        raise ConfigError(f"{where}: there is no cuda:{index}; torch sees {count} GPUs; run `evenload doctor`")
    return torch.device("cuda", index)


def format_bytes(num_bytes: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def _own_devices(spec: WorkerSpec) -> list[torch.device]:
    if len(spec.devices) > 1:
        return [parse_device(name, "the command line's -d", _EXPECTED) for name in spec.devices]
    if spec.origin == "alone" and torch.cuda.device_count() > 1:
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    here = spec.device if spec.device != "auto" else ("cuda:0" if torch.cuda.device_count() else "cpu")
    raise ConfigError(
        f"place(model): this process has one device ({here}), but a model is split over several; start it with several per "
        "rank (evenload run -d 0+1 train.py, or -d 0+1,2+3 for two ranks), or name them: "
        'place(model, ["cuda:0", "cuda:1"])'
    )


def _entries(devices: Any) -> list[Any]:
    if isinstance(devices, Mapping):
        return list(devices.items())
    if isinstance(devices, Sequence) and not isinstance(devices, str | bytes):
        return list(devices)
    raise ConfigError(f"place(devices={_repr(devices)}): {_EXPECTED}")


def _entry(entry: Any, devices: Any) -> tuple[torch.device, int | None]:
    where = f"place(devices={_repr(devices)})"
    if isinstance(entry, tuple):
        if len(entry) != 2:
            raise ConfigError(f"{where}: {entry!r} is not a pair (device, limit); {_EXPECTED}")
        limit = None if entry[1] is None else parse_bytes(entry[1], where)
        return parse_device(entry[0], where, _EXPECTED), limit
    return parse_device(entry, where, _EXPECTED), None


def _check_against(chosen: Sequence[tuple[torch.device, int | None]], devices: Any, spec: WorkerSpec) -> None:
    names = tuple(str(device) for device, _ in chosen)
    if len(spec.devices) > 1:
        if names != spec.devices:
            raise ConfigError(
                f"devices are set twice, differently: place(devices={_repr(devices)}) in the script, and -d gave rank "
                f"{spec.rank} {'+'.join(spec.devices)}; write place(model), which uses the rank's own"
            )
    elif spec.device not in ("auto", names[0]):
        raise ConfigError(
            f"place(devices={_repr(devices)}) begins on {names[0]}, but -d gave rank {spec.rank} {spec.device}; start it "
            f"with -d {'+'.join(name.removeprefix('cuda:') for name in names)} and write place(model)"
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch has reserved but not allocated is free for the model too.
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(psutil.virtual_memory().available, hardware.cpu().memory_bytes or 1 << 62)


def _repr(devices: Any) -> str:
    return str(devices) if isinstance(devices, str) else repr(devices)
