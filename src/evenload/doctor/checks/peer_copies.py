"""Check of copies between GPUs by value, because a wrong IOMMU setting corrupts them silently."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from evenload.doctor.checks.packages import torch_problem
from evenload.doctor.finding import Finding, Options, fail, ok, skip
from evenload.doctor.gpu_state import usable_gpus

if TYPE_CHECKING:
    import torch

NUM_VALUES = 4_000_000
NUM_ROUNDS = 2
"""With different values, because a copy that was lost may leave those of the previous round."""
DISABLE_P2P = (
    "export NCCL_P2P_DISABLE=1   # slower, but correct, until IOMMU (VT-d, AMD-Vi) and ACS are disabled in the BIOS: see the "
    "check IOMMU and ACS"
)


def peer_copies(options: Options) -> Finding:
    """Copy numbers between all pairs of GPUs, both ways, and compare the results on the host."""
    began = time.monotonic()
    num_gpus = len(usable_gpus())
    if num_gpus < 2:
        return skip(f"{num_gpus} NVIDIA GPU; the check needs two")
    if (problem := torch_problem()) is not None:
        return skip(problem)
    import torch

    if torch.version.cuda is None:
        return skip(f"torch {torch.__version__} is built without CUDA")
    devices = [torch.device("cuda", index) for index in range(num_gpus)]
    end = began + options.limit_s - 1.0
    try:
        return compare_copies(devices, lambda numbers, device: numbers.to(device), end_s=end)
    except RuntimeError as error:  # CUDA's errors
        found = f"copies between GPUs raised: {str(error).splitlines()[0]}"
        return fail(found, "every value is copied correctly", DISABLE_P2P)


def compare_copies(
    devices: Sequence[torch.device],
    copy: Callable[[torch.Tensor, torch.device], torch.Tensor],
    end_s: float = float("inf"),
) -> Finding:
    """Copy known numbers between all pairs of devices; start no pair after ``end_s`` (by `time.monotonic`)."""
    import torch

    wrong = []
    pairs = [(source, target) for source in range(len(devices)) for target in range(len(devices)) if source != target]
    num_done = 0
    for source, target in pairs:
        if time.monotonic() > end_s:
            break
        for round_index in range(NUM_ROUNDS):
            numbers = torch.arange(NUM_VALUES, dtype=torch.int32) * (7 + round_index) + 31 * source + target
            received = copy(numbers.to(devices[source]), devices[target]).cpu()
            num_differing = int((received != numbers).sum())
            if num_differing:
                names = f"{devices[source]} to {devices[target]}"
                wrong.append(f"{names}: {num_differing:,} of {NUM_VALUES:,} values differ")
                break
        num_done += 1
    expected = f"correct values for all {len(pairs)} pairs of GPUs"
    if wrong:
        return fail("; ".join(dict.fromkeys(wrong)), expected, DISABLE_P2P)
    megabytes = 4 * NUM_VALUES // 10**6
    found = f"{num_done} of {len(pairs)} pairs copied {NUM_ROUNDS} x {megabytes} MB: all values are correct"
    return ok(found, expected)
