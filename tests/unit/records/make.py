"""Records as a run of two unequal ranks would write them."""

from __future__ import annotations

from typing import Any

from evenload.records.values import RankTimes, StepRecord

START_S = 1_700_000_000.0


def make_step(step: int, **changes: Any) -> StepRecord:
    """Half a second a step, 256 samples split 171 : 85; rank 0 computes 0.45 s, rank 1 0.36 s."""
    values: dict[str, Any] = {
        "step": step,
        "epoch": step // 40,
        "epoch_step": step % 40,
        "num_samples": 256,
        "loss": 4.0 / (1 + step / 10),
        "shares": (171, 85),
        "num_micro": 2,
        "seconds": 0.5,
        "ranks": (
            RankTimes(data_s=0.01, compute_s=0.45, wait_s=0.02, optimizer_s=0.02, memory_bytes=3 << 30),
            RankTimes(data_s=0.01, compute_s=0.36, wait_s=0.1, comm_s=0.01, optimizer_s=0.02, memory_bytes=2 << 30),
        ),
        "time": START_S + 0.5 * (step + 1),
    }
    return StepRecord(**{**values, **changes})
