"""Does what one GPU copies to another arrive? Compared by value, because a wrong IOMMU setting changes it silently."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenload import hardware
from evenload.doctor.finding import Finding, Options

if TYPE_CHECKING:
    import torch

NAME = "peer copies"
NUM_VALUES = 4_000_000
NUM_ROUNDS = 2
"""Each with other values: a copy that never arrived may still hold those of the round before."""
MEND = (
    "export NCCL_P2P_DISABLE=1   # slower, but right, until the BIOS's IOMMU (VT-d, AMD-Vi) and ACS are off: see the check "
    "IOMMU and ACS"
)


@dataclass(frozen=True)
class Copies:
    """What came of the copies between all pairs of devices."""

    num_pairs: int
    num_done: int
    """Pairs that were reached before the time was over."""
    wrong: tuple[str, ...]
    """A sentence for each pair whose values differ."""


def peer_copies(options: Options) -> Finding:
    """Copies numbers between all pairs of GPUs, both ways, and compares what arrived on the host."""
    began = time.monotonic()
    num_gpus = len(hardware.gpus())
    if num_gpus < 2:
        return Finding(NAME, "skip", f"{num_gpus} NVIDIA GPU here; two or more copy to each other")
    if importlib.util.find_spec("torch") is None:
        return Finding(NAME, "skip", "torch is missing (see packages)")
    try:
        import torch
    except Exception:
        return Finding(NAME, "skip", "torch can't be imported (see wheel and driver)")
    if torch.version.cuda is None:
        return Finding(NAME, "skip", f"torch {torch.__version__} is built without CUDA")
    devices = [torch.device("cuda", index) for index in range(num_gpus)]
    end = began + options.limit_s - 1.0
    try:
        return judge_copies(copy_between(devices, lambda numbers, device: numbers.to(device), end_s=end))
    except RuntimeError as error:  # CUDA's errors
        first = str(error).splitlines()[0]
        return Finding(NAME, "fail", f"copies between the GPUs raised: {first}", "every value arrives", MEND)


def copy_between(
    devices: Sequence[torch.device],
    copy: Callable[[torch.Tensor, torch.device], torch.Tensor],
    end_s: float = float("inf"),
) -> Copies:
    """Copies known numbers from each device to each other one, and compares them on the host.

    Args:
        devices: at least two.
        copy: copies a tensor to a device; a test's own may fail.
        end_s: of `time.monotonic`; pairs that are not begun by then are left out.
    """
    import torch

    wrong: dict[str, None] = {}
    pairs = [(source, target) for source in range(len(devices)) for target in range(len(devices)) if source != target]
    num_done = 0
    for source, target in pairs:
        if time.monotonic() > end_s:
            break
        for round_index in range(NUM_ROUNDS):
            numbers = torch.arange(NUM_VALUES, dtype=torch.int32) * (7 + round_index) + 31 * source + target
            arrived = copy(numbers.to(devices[source]), devices[target]).cpu()
            num_differing = int((arrived != numbers).sum())
            if num_differing:
                story = f"{devices[source]} to {devices[target]}: {num_differing:,} of {NUM_VALUES:,} values differ"
                wrong.setdefault(story)
                break
        num_done += 1
    return Copies(len(pairs), num_done, tuple(wrong))


def judge_copies(copies: Copies) -> Finding:
    """What the copies mean; one wrong value makes training on these GPUs worthless."""
    expected = f"every value arrives, on all {copies.num_pairs} ways between the GPUs"
    if copies.wrong:
        return Finding(NAME, "fail", "; ".join(copies.wrong), expected, MEND)
    megabytes = 4 * NUM_VALUES // 10**6
    found = (
        f"{copies.num_done} of {copies.num_pairs} ways copied, {NUM_ROUNDS} x {megabytes} MB each: every value arrived"
    )
    return Finding(NAME, "ok", found, expected)
