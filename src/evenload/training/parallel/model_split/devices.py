"""Which devices a model is cut over, and how much of each it may have."""

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
"""Of free memory: the rest is for workspaces, fragments, and what the script itself holds."""
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*$")
_EXPECTED = (
    'expected a list such as ["cuda:0", "cuda:1"] or ["cuda:0", "cpu"], or memory limits by device such as '
    '{"cuda:0": "6GiB", "cpu": "20GiB"}'
)


@dataclass(frozen=True)
class Room:
    """One device, and the memory a model may have there."""

    device: torch.device
    limit_bytes: int
    is_set: bool
    """Whether the limit was set; else it is what is free."""

    def describe(self) -> str:
        """For an error."""
        return f"{self.device} {spell_bytes(self.limit_bytes)} ({'as set' if self.is_set else '90 % of what is free'})"


def choose(devices: Any, spec: WorkerSpec) -> list[tuple[torch.device, int | None]]:
    """The devices, each with its limit where one is set.

    Args:
        devices: what `place` was given; None takes this rank's own.
        spec: who this rank is.

    Raises:
        ConfigError: none, one, or unknown devices; or others than the command line gave this rank.
    """
    if devices is None:
        return [(device, None) for device in _own_devices(spec)]
    chosen = [_entry(entry, devices) for entry in _entries(devices)]
    if len(chosen) < 2:
        names = ", ".join(str(device) for device, _ in chosen) or "none"
        raise ConfigError(
            f"place(devices={_spell(devices)}): a model is cut over at least two devices, this is {names}; {_EXPECTED}, or "
            "leave place out and let run.prepare(model) or model.to(device) move the model"
        )
    _check_against(chosen, devices, spec)
    return chosen


def measure_rooms(
    chosen: Sequence[tuple[torch.device, int | None]], held_bytes: Mapping[torch.device, int], num_ranks_here: int
) -> list[Room]:
    """How much of each device the model may have: as set, or nine tenths of what is free.

    Args:
        chosen: devices with limits.
        held_bytes: what the model holds now; it counts as free.
        num_ranks_here: ranks of this machine, which share its memory.
    """
    counts = Counter(device for device, limit in chosen if limit is None)
    rooms = []
    for device, limit in chosen:
        if limit is not None:
            rooms.append(Room(device, limit, is_set=True))
            continue
        free = _free_bytes(device) // (num_ranks_here if device.type == "cpu" else 1) + held_bytes.get(device, 0)
        rooms.append(Room(device, int(free * _USABLE) // counts[device], is_set=False))
    return rooms


def parse_bytes(text: Any, where: str) -> int:
    """Bytes of ``6GiB``, ``500MB`` or an integer.

    Raises:
        ConfigError: something else.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = _SIZE.match(text) if isinstance(text, str) else None
    if match is None or float(match[1]) <= 0:
        raise ConfigError(
            f'{where}: expected an amount of memory such as "6GiB", "500MB" or a number of bytes, got {text!r}'
        )
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))


def spell_bytes(num_bytes: float) -> str:
    """For people: ``1.2 GiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def _own_devices(spec: WorkerSpec) -> list[torch.device]:
    if len(spec.devices) > 1:
        return [_device(name, "the command line's -d") for name in spec.devices]
    if spec.origin == "alone" and torch.cuda.device_count() > 1:
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    here = spec.device if spec.device != "auto" else ("cuda:0" if torch.cuda.device_count() else "cpu")
    raise ConfigError(
        f"place(model): this process has one device ({here}), and a model is cut over several; start it with several for each "
        "rank (evenload run -d 0+1 train.py, or -d 0+1,2+3 for two ranks), or name them: "
        'place(model, ["cuda:0", "cuda:1"])'
    )


def _entries(devices: Any) -> list[Any]:
    if isinstance(devices, Mapping):
        return list(devices.items())
    if isinstance(devices, Sequence) and not isinstance(devices, str | bytes):
        return list(devices)
    raise ConfigError(f"place(devices={_spell(devices)}): {_EXPECTED}")


def _entry(entry: Any, devices: Any) -> tuple[torch.device, int | None]:
    where = f"place(devices={_spell(devices)})"
    if isinstance(entry, tuple):
        if len(entry) != 2:
            raise ConfigError(f"{where}: {entry!r} is no (device, limit); {_EXPECTED}")
        limit = None if entry[1] is None else parse_bytes(entry[1], where)
        return _device(entry[0], where), limit
    return _device(entry, where), None


def _device(entry: Any, where: str) -> torch.device:
    try:
        if not isinstance(entry, str | torch.device):
            raise TypeError(f"{entry!r} is no device")
        device = torch.device(entry)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}; {_EXPECTED}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"{where}: {device} is neither a GPU (cuda:0) nor the CPU (cpu); {_EXPECTED}")
    count = torch.cuda.device_count()
    index = device.index if device.index is not None else (torch.cuda.current_device() if count else 0)
    if index >= count:
        raise ConfigError(f"{where}: there is no cuda:{index}; torch sees {count} GPUs. `evenload doctor` tells why")
    return torch.device("cuda", index)


def _check_against(chosen: Sequence[tuple[torch.device, int | None]], devices: Any, spec: WorkerSpec) -> None:
    """The command line said which devices are this rank's; the script must not say otherwise."""
    names = tuple(str(device) for device, _ in chosen)
    if len(spec.devices) > 1:
        if names != spec.devices:
            raise ConfigError(
                f"devices are set twice, differently: place(devices={_spell(devices)}) in the script, and -d gave rank "
                f"{spec.rank} {'+'.join(spec.devices)}; write place(model), which takes the rank's own"
            )
    elif spec.device not in ("auto", names[0]):
        raise ConfigError(
            f"place(devices={_spell(devices)}) begins on {names[0]}, but -d gave rank {spec.rank} {spec.device}; start it "
            f"with -d {'+'.join(name.removeprefix('cuda:') for name in names)} and write place(model)"
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds in reserve for this process is free for the model too.
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(psutil.virtual_memory().available, hardware.cpu().memory_bytes or 1 << 62)


def _spell(devices: Any) -> str:
    return str(devices) if isinstance(devices, str) else repr(devices)
