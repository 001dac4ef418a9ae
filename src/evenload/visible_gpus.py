"""GPUs that CUDA shows a process, in CUDA's order, found by NVML (`nvidia-ml-py`) or, without it, by torch in a child.

NVML creates no CUDA context and uses no GPU memory. This module imports no torch.

Note [Names instead of numbers]
  On most machines ``cuda:N`` is the Nth GPU. Where a GPU is split into parts (MIG), CUDA shows a process one part and nothing
  else; where the driver refuses a GPU (lost, no permission), CUDA may or may not count it. There a process sees the right
  GPU only by its UUID in CUDA_VISIBLE_DEVICES, and the number counts the entries found here, refused GPUs included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

TORCH_LIMIT_S = 120.0
"""For torch's import and the start of CUDA on a cold machine."""


@dataclass(frozen=True)
class VisibleGpu:
    index: int
    handle: Any
    """NVML's; of a part, the part's."""
    name: str
    uuid: str
    is_part: bool = False
    """A part of a GPU (MIG)."""


@dataclass(frozen=True)
class RefusedGpu:
    index: int
    reason: str
    """Why the driver refuses it."""


@dataclass(frozen=True)
class GpuQuery:
    """GPUs of a process, with NVML open for further queries; without NVML all is empty."""

    nvml: Any = None
    gpus: tuple[VisibleGpu, ...] = ()
    refused: tuple[RefusedGpu, ...] = ()

    @property
    def needs_uuids(self) -> bool:
        """True where numbers are not enough, see Note [Names instead of numbers]."""
        return bool(self.refused) or any(gpu.is_part for gpu in self.gpus)

    def used_and_total_bytes(self, gpu: VisibleGpu) -> tuple[int, int]:
        """Return zeros for a GPU without memory of its own."""
        nvml = self.nvml
        try:
            try:
                memory = nvml.nvmlDeviceGetMemoryInfo(gpu.handle, version=nvml.nvmlMemory_v2)
            except (nvml.NVMLError, AttributeError, TypeError):
                memory = nvml.nvmlDeviceGetMemoryInfo(gpu.handle)
        except nvml.NVMLError:
            return 0, 0
        return int(memory.used), int(memory.total)

    def compute_capability(self, gpu: VisibleGpu) -> tuple[int, int]:
        handle = self.nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu.handle) if gpu.is_part else gpu.handle
        major, minor = self.nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return major, minor


@contextmanager
def query_gpus(environ: Mapping[str, str] = os.environ) -> Iterator[GpuQuery]:
    """Open NVML and yield the GPUs that a process with these variables sees."""
    nvml, _ = _begin_nvml()
    try:
        yield GpuQuery() if nvml is None else _query(nvml, environ)
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def nvml_problem(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> str:
    """Return why NVML fails although there are signs of NVIDIA hardware; empty if it works or there are none."""
    asked_for = environ.get("CUDA_VISIBLE_DEVICES", "-1")
    devices = any((root / "dev").glob("nvidia[0-9]*")) or (root / "dev/nvhost-gpu").exists()
    if not devices and not (root / "proc/driver/nvidia/version").exists() and asked_for in ("", "-1"):
        return ""
    nvml, problem = _begin_nvml()
    if nvml is not None:
        nvml.nvmlShutdown()
    return problem


def _begin_nvml() -> tuple[Any, str]:
    """Return the initialised module `pynvml`, or None and the reason."""
    try:
        import pynvml
    except ImportError:
        return None, "the package nvidia-ml-py is missing"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, str(error)
    return pynvml, ""


def _query(nvml: Any, environ: Mapping[str, str]) -> GpuQuery:
    """Select the GPUs that CUDA_VISIBLE_DEVICES lists by number or by the beginning of a UUID.

    As in the driver, an unknown entry ends the list, and a device named twice empties it. A part may be named by its UUID.
    """
    cards = _ordered_cards(nvml, environ)
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return _numbered(nvml, cards)
    visible: list[VisibleGpu | RefusedGpu] = []
    for entry in (part.strip() for part in wanted.split(",")):
        matching = [card for card in cards if isinstance(card, VisibleGpu) and card.uuid.startswith(entry)]
        if entry.isdigit() and int(entry) < len(cards):
            visible.append(cards[int(entry)])
        elif entry.startswith("GPU-") and len(matching) == 1:
            visible.append(matching[0])
        elif entry.startswith("MIG-"):
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(entry)
                visible.append(VisibleGpu(0, handle, nvml.nvmlDeviceGetName(handle), entry, is_part=True))
            except nvml.NVMLError:
                break
        else:
            break
        if _key(visible[-1]) in [_key(card) for card in visible[:-1]]:
            return GpuQuery(nvml)
    return _numbered(nvml, visible)


def _key(card: VisibleGpu | RefusedGpu) -> str | int:
    return card.uuid if isinstance(card, VisibleGpu) else card.index


def _numbered(nvml: Any, cards: list[VisibleGpu | RefusedGpu]) -> GpuQuery:
    """Replace each GPU that is split by its parts, and count."""
    split = [part for card in cards for part in _parts(nvml, card)]
    counted = [replace(card, index=index) for index, card in enumerate(split)]
    return GpuQuery(
        nvml,
        tuple(card for card in counted if isinstance(card, VisibleGpu)),
        tuple(card for card in counted if isinstance(card, RefusedGpu)),
    )


def _parts(nvml: Any, card: VisibleGpu | RefusedGpu) -> list[VisibleGpu | RefusedGpu]:
    if isinstance(card, RefusedGpu) or card.is_part:
        return [card]
    try:
        if not nvml.nvmlDeviceGetMigMode(card.handle)[0]:
            return [card]
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(card.handle)
    except (nvml.NVMLError, AttributeError):  # not supported by the GPU, or by an old library
        return [card]
    parts: list[VisibleGpu | RefusedGpu] = []
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card.handle, index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            parts.append(VisibleGpu(0, handle, nvml.nvmlDeviceGetName(handle), uuid, is_part=True))
        except nvml.NVMLError:
            continue  # no part has this number
    return parts or [RefusedGpu(0, f"{card.name} is in MIG mode, but has no parts; nvidia-smi mig -cgi creates them")]


def _ordered_cards(nvml: Any, environ: Mapping[str, str]) -> list[VisibleGpu | RefusedGpu]:
    """Return all GPUs in CUDA's order.

    NVML numbers GPUs by PCI bus, CUDA only with CUDA_DEVICE_ORDER=PCI_BUS_ID. By default CUDA puts the fastest first by a rule
    of its own, so the driver is queried where models differ; if that fails, the order is that of the bus.
    """
    cards = [_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    usable = [card for card in cards if isinstance(card, VisibleGpu)]
    if environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({card.name for card in usable}) < 2:
        return cards
    order = _cuda_uuids(environ)
    by_uuid = {card.uuid: card for card in usable}
    if set(order) != set(by_uuid):
        return cards
    return [*(by_uuid[uuid] for uuid in order), *(card for card in cards if isinstance(card, RefusedGpu))]


def _card(nvml: Any, index: int) -> VisibleGpu | RefusedGpu:
    """Return one GPU of NVML; a lost one may refuse its handle or only what is asked of it."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        return VisibleGpu(index, handle, nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError as error:
        return RefusedGpu(index, str(error))


_DRIVER_QUERY = """
import ctypes, uuid
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
count = ctypes.c_int()
assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for index in range(count.value):
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0
    assert cuda.cuDeviceGetUuid(ctypes.byref(raw), device) == 0
    print("GPU-" + str(uuid.UUID(bytes=bytes(raw))))
"""

_TORCH_QUERY = """
import json, torch
count = torch.cuda.device_count()
found = [torch.cuda.get_device_properties(index) for index in range(count)]
built = torch.version.cuda or torch.version.hip
print(json.dumps([torch.__version__ + ("" if built else " (built without CUDA)"), [[p.name, p.total_memory] for p in found]]))
"""


@dataclass(frozen=True)
class TorchGpus:
    """GPUs that torch finds in a child process."""

    gpus: tuple[tuple[str, int], ...] = ()
    """Name and bytes of memory of each."""
    text: str = ""
    """``torch`` with its version, or with the reason that it could not be asked."""


def gpus_of_torch(environ: Mapping[str, str]) -> TorchGpus:
    try:
        (text,) = _in_child(_TORCH_QUERY, tuple(sorted(environ.items())), TORCH_LIMIT_S)
        version, rows = json.loads(text)
    except subprocess.TimeoutExpired:
        return TorchGpus(text=f"torch (no answer within {TORCH_LIMIT_S:g} s)")
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        return TorchGpus(text=f"torch ({lines[-1]})")
    except (OSError, ValueError) as error:
        return TorchGpus(text=f"torch ({error})")
    return TorchGpus(tuple((name, total_bytes) for name, total_bytes in rows), f"torch {version}")


def _cuda_uuids(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of all GPUs in CUDA's order; empty if the driver fails."""
    variables = {key: value for key, value in environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    try:
        return _in_child(_DRIVER_QUERY, tuple(sorted(variables.items())), 20.0)
    except (OSError, subprocess.SubprocessError):
        return ()


@cache
def _in_child(program: str, environ: tuple[tuple[str, str], ...], limit_s: float) -> tuple[str, ...]:
    """Return the lines of a child that initialises CUDA, since a process that has done so must not fork; takes a second."""
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=limit_s, check=True)
    return tuple(done.stdout.splitlines())
