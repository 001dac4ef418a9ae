"""Which GPUs there are to a run, in which order, and whether one installation serves them all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from evenload import hardware
from evenload.balance.values import ComputeDevice
from evenload.doctor.checks.wheel import OLDEST_CUDA_13, ONLY_CUDA_13_SINCE
from evenload.doctor.finding import Finding, Options, Status
from evenload.doctor.gpu_state import DEFAULT_MODE, PROHIBITED_MODE, Card, read_cards

ORDER, GENERATIONS, MODE = "GPU order", "GPU generations", "GPU mode"
NO_GPU = "no NVIDIA GPU that can be asked"
ORDERS = ("FASTEST_FIRST", "PCI_BUS_ID")
FIRST_WITH_BFLOAT16 = (8, 0)
GENERATION_NAMES = {
    (5, 0): "Maxwell",
    (6, 0): "Pascal",
    (7, 0): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere",
    (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
}
"""From this compute capability on."""


def order(options: Options) -> Finding:
    """Whether ``cuda:N`` is the GPU that nvidia-smi calls N, and whether all that are named can be seen."""
    del options
    return judge_order(read_cards(), os.environ, has_driver=hardware.gpu_driver() is not None)


def judge_order(cards: Sequence[Card], environ: Mapping[str, str], *, has_driver: bool = True) -> Finding:
    """What the order means; the same number for two GPUs sends a job, or ``nvidia-smi -i``, to the wrong one."""
    if not has_driver:
        return Finding(ORDER, "skip", NO_GPU)
    named = environ.get("CUDA_VISIBLE_DEVICES")
    entries = [part.strip() for part in named.split(",")] if named else []
    if len(cards) < len(entries) and any(entry not in ("-1", "") for entry in entries):
        seen = f"CUDA sees {len(cards)}" if cards else "CUDA sees none"
        found = f"CUDA_VISIBLE_DEVICES={named} names {len(entries)} GPUs, {seen}"
        expected = "each entry is a GPU that is here, and is named once; the list ends at the first that is not"
        kept = ",".join(entries[: len(cards)])
        mend = f"export CUDA_VISIBLE_DEVICES={kept}" if kept else "unset CUDA_VISIBLE_DEVICES"
        return Finding(ORDER, "fail", found, expected, mend)
    if not cards:
        return Finding(ORDER, "skip", f"CUDA_VISIBLE_DEVICES={named} hides all GPUs")
    way = environ.get("CUDA_DEVICE_ORDER")
    by_bus = "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    if way is not None and way not in ORDERS:
        found = f"CUDA_DEVICE_ORDER={way}, which CUDA doesn't know and passes over"
        return Finding(ORDER, "warn", found, f"one of {', '.join(ORDERS)}", by_bus)
    numbers = [card.smi_index for card in cards if card.smi_index is not None]
    if not entries and numbers != sorted(numbers):
        pairs = [f"{card.label} is nvidia-smi's {card.smi_index}" for card in cards if card.smi_index != card.index]
        return Finding(ORDER, "warn", "; ".join(pairs), "one number for a GPU in both", by_bus)
    found = ", ".join(f"cuda:{card.index} is {card.name}" for card in cards)
    return Finding(ORDER, "ok", found)


def generations(options: Options) -> Finding:
    """Whether one wheel holds code for all GPUs, and one precision suits them."""
    del options
    driver = hardware.gpu_driver()
    return judge_generations(hardware.gpus(), driver.capabilities if driver else ())


def judge_generations(gpus: Sequence[ComputeDevice], capabilities: Sequence[tuple[int, int]]) -> Finding:
    """What a mix of generations means. No wheel of torch holds code for both ends of what is still in use."""
    if not gpus:
        return Finding(GENERATIONS, "skip", NO_GPU)
    spelled = dict.fromkeys(
        f"{gpu.name} ({_generation(capability)}, {capability[0]}.{capability[1]})"
        for gpu, capability in zip(gpus, capabilities, strict=True)
    )
    found = ", ".join(spelled)
    old = [index for index, capability in enumerate(capabilities) if capability < OLDEST_CUDA_13]
    new = [index for index, capability in enumerate(capabilities) if capability >= ONLY_CUDA_13_SINCE]
    if old and new:
        kept = old if _memory(gpus, old) > _memory(gpus, new) else new
        left = [index for index in range(len(gpus)) if index not in (new if kept is old else old)]
        expected = "GPUs that one wheel of torch serves: older than Turing needs CUDA 12.6, Blackwell a newer one"
        return Finding(GENERATIONS, "fail", found, expected, f"evenload run -d {_list(left)} train.py")
    slow = [gpu.name for gpu, own in zip(gpus, capabilities, strict=True) if own < FIRST_WITH_BFLOAT16]
    if slow and len(slow) < len(gpus):
        expected = f"one precision that is fast on all: {', '.join(dict.fromkeys(slow))} computes bfloat16 slowly"
        return Finding(GENERATIONS, "warn", found, expected, "evenload run --precision fp16 train.py")
    return Finding(GENERATIONS, "ok", found)


def mode(options: Options) -> Finding:
    """Whether each GPU lets programs in, and shows all of itself."""
    del options
    return judge_mode(read_cards(), os.environ)


def judge_mode(cards: Sequence[Card], environ: Mapping[str, str]) -> Finding:
    """What the compute modes and MIG mean."""
    if not cards:
        return Finding(MODE, "skip", NO_GPU)
    expected = "compute mode Default and no MIG, on each GPU"
    closed = [card for card in cards if card.mode not in (None, DEFAULT_MODE)]
    if closed:
        stories = [
            f"{card.label} lets {'no program' if card.mode == PROHIBITED_MODE else 'only one process'} in"
            for card in closed
        ]
        mend = " && ".join(f"sudo nvidia-smi -i {card.bus} -c DEFAULT" for card in closed)
        status: Status = "fail" if any(card.mode == PROHIBITED_MODE for card in closed) else "warn"
        return Finding(MODE, status, "; ".join(stories), expected, mend)
    whole = [card for card in cards if card.is_split and "MIG-" not in environ.get("CUDA_VISIBLE_DEVICES", "")]
    if whole:
        found = "; ".join(f"{card.label} is split by MIG, and a process sees one part of it" for card in whole)
        mend = "sudo nvidia-smi -i {} -mig 0   # or name parts: CUDA_VISIBLE_DEVICES=MIG-..., see nvidia-smi -L"
        return Finding(MODE, "warn", found, expected, mend.format(",".join(card.bus for card in whole)))
    return Finding(MODE, "ok", f"{len(cards)} GPU(s) open to all programs")


def _generation(capability: tuple[int, int]) -> str:
    return next((name for first, name in reversed(GENERATION_NAMES.items()) if capability >= first), "older")


def _memory(gpus: Sequence[ComputeDevice], indices: Sequence[int]) -> int:
    return sum(gpus[index].memory_bytes for index in indices)


def _list(indices: Sequence[int]) -> str:
    return ",".join(map(str, indices))
