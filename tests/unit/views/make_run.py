"""Run folders with faults, written as a run would: for the tests of the page and of the trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from evenload.records.lines import EVENTS_FILE, STEPS_FILE, event_line, header_line, step_line
from evenload.records.values import RankTimes, RunEvent, StepRecord

START_S = 1_790_000_000.0

FAULTS = (
    (0.20, "stalled", "rank 2 on box1 has not moved for 6.2 s, last in collate (train.py:31); it is left out",
     {"rank": 2, "seconds": 6.2, "reason": "collate (train.py:31)"}),
    (0.30, "lost", "rank 1 on box2 is gone", {"rank": 1, "host": "box2", "seconds": 1.4, "reason": "killed by signal 9"}),
    (0.45, "joined", "rank 1 on box2 joins with the state of rank 0", {"rank": 1, "seconds": 0.9}),
    (0.50, "memory", "rank 0 ran out of memory in step {step}: micro-batches 2 → 3; the step is repeated", {"num_micro": 3}),
    (0.60, "fallback", "checkpoint step-00000400 is torn (tensors/__0_0.distcp), step-00000300 is loaded",
     {"seconds": 2.5}),
    (0.70, "checkpoint", "checkpoint at step {step}", {"took_s": 0.4}),
    (0.75, "quorum_dropped", "a kind from the future <b>&</b> 'its' message", {"seconds": 3.25, "rank": 3}),
    (0.80, "balance", "rank 3 slowed 2.9× since step 412: share 64 → 30 of 256",
     {"shares": [100, 66, 60, 30], "over_equal": 1.52, "over_best_alone": 2.3}),
)  # fmt: skip
"""Where in the run (a part of its steps), kind, message and fields."""


def write_run(
    folder: Path,
    num_steps: int,
    speeds: Sequence[float] = (4.0, 2.0, 2.0, 1.0),
    *,
    faults: Sequence[tuple[float, str, str, dict[str, object]]] = FAULTS,
    start_s: float = START_S,
    solo: bool = True,
    closed: bool = True,
) -> None:
    """Write a run of ``num_steps`` half-second steps of 256 samples; rank 1 is missing while it is lost."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"GPU {rank} of box{1 + rank % 2}" for rank in range(len(speeds))]
    at = {round(part * num_steps): (kind, text, fields) for part, kind, text, fields in faults}
    with (folder / EVENTS_FILE).open("wb") as events, (folder / STEPS_FILE).open("wb") as steps:
        events.write(header_line(start_s))
        steps.write(header_line(start_s))

        def event(kind: str, message: str, time_s: float, step: int | None = None, **fields: object) -> None:
            events.write(event_line(RunEvent(kind, message, time_s, step, fields)))

        event("open", "", start_s, total_steps=num_steps)
        event("loader", "global batch 256", start_s + 0.5, devices=names)
        if solo:
            event("solo_speeds", "", start_s + 0.6, speeds_per_s=[60.0 * speed for speed in speeds])
        time_s, is_missing = start_s + 3.0, False
        for step in range(num_steps):
            extra_s = 0.0
            if step in at:
                kind, text, fields = at[step]
                cost = fields.get("seconds", 0.0)
                extra_s = float(cost) if isinstance(cost, int | float) else 0.0
                event(kind, text.format(step=step), time_s + 0.1, step, **fields)
                is_missing = {"lost": len(speeds) > 2, "joined": False}.get(kind, is_missing)
                if kind in ("lost", "joined"):
                    kept = [name for rank, name in enumerate(names) if not is_missing or rank != 1]
                    event("rebuilt", "", time_s + 0.2, step, devices=kept)
            ranks = [rank for rank in range(len(speeds)) if not is_missing or rank != 1]
            total = sum(speeds[rank] for rank in ranks)
            shares = [round(256 * speeds[rank] / total) for rank in ranks]
            shares[0] += 256 - sum(shares)
            wave = 0.03 * math.sin(step / 40)
            times = tuple(
                RankTimes(0.01, 0.42 + wave * (-1) ** rank, 0.04 - wave * (-1) ** rank, 0.01, 0.02, 0.0, 0.0, 3 << 30)
                for rank in ranks
            )
            seconds = 0.5 + extra_s
            time_s += seconds
            loss = 4.0 / (1 + step / (num_steps / 20)) + 0.1 * math.sin(step * 12.9)
            record = StepRecord(step, step // 400, step % 400, 256, loss, tuple(shares), 2, seconds, times, time=time_s)
            steps.write(step_line(record, {"val_loss": loss * 1.1} if step % 50 == 0 else {}))
        if closed:
            event("close", "", time_s + 0.3)
    (folder / "config.toml").write_text('project_dir = "runs/x"\nseed = 0\n[logger_options.wandb]\napi_key = "abc"\n')
