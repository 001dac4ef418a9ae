"""Asynchronous beside synchronous and local training on devices at 1 : 0.25 that stall: throughput and loss at equal time.

Method: a small CNN on CPU ranks under quotas of 1 and 0.25 cores; each device becomes five times as slow for two seconds, on
average every ten seconds, at times that are the same in all arms. Arms, one after the other: each device alone, `async` with a
process for the server, `ddp` with measured and with equal shares, `local` with each device as an island. All run for the same
time. The summed speed is that of both devices alone, with their stalls.

Bar: `async` reaches 0.95 of the summed speed, and no update is older than the bound of 4. The losses are reported.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

from benchmarks.launching import SCRIPTS, run_script
from benchmarks.report import rows
from evenload.records.reader import read_steps

_FAST, _SLOW = 1.0, 0.25


def measure(quick: bool) -> dict[str, Any]:
    """Runs each arm once."""
    seconds = 4.0 if quick else 40.0
    arms = {
        "fast alone": _alone(seconds, _FAST),
        "slow alone": _alone(seconds, _SLOW),
        "async": _arm(seconds, "cpu:2", (_FAST, _SLOW), (1, 2), {"strategy": "async"}),
        "ddp": _arm(seconds, "cpu:2", (_FAST, _SLOW), (0, 1)),
        "ddp, equal shares": _arm(seconds, "cpu:2", (_FAST, _SLOW), (0, 1), {"balance": "even"}),
        "local": _arm(
            seconds, "cpu:2", (_FAST, _SLOW), (0, 1), {"strategy": "local", "islands": "0/1", "sync_every": 10}
        ),
    }
    summed = arms["fast alone"]["samples_per_s"] + arms["slow alone"]["samples_per_s"]
    for arm in arms.values():
        arm["of_sum"] = arm["samples_per_s"] / summed
    return {
        "seconds": seconds,
        "arms": arms,
        "bars": {
            f"async reaches {arms['async']['of_sum']:.2f} of the summed speed (0.95)": arms["async"]["of_sum"] >= 0.95,
            f"staleness at most {arms['async']['max_staleness']:g} (4)": arms["async"]["max_staleness"] <= 4,
        },
    }


def _alone(seconds: float, speed: float) -> dict[str, Any]:
    """Measures one device on one core, as it has beside the other."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        return _arm(seconds, "cpu", (speed,), (0,))
    finally:
        os.sched_setaffinity(0, cores)


def _arm(
    seconds: float, devices: str, speeds: tuple[float, ...], stalling: tuple[int, ...], settings: Any = None
) -> dict[str, Any]:
    everywhere = (1.0, *speeds) if 0 not in stalling else speeds  # the server's process comes first
    arguments = ["--seconds", str(seconds), "--speeds", ",".join(map(str, everywhere))]
    arguments += ["--stalling", ",".join(map(str, stalling))]
    folder = run_script(
        SCRIPTS / "train_stalls.py", arguments, throttle=speeds, devices=devices, settings=dict(settings or {})
    )
    try:
        found = json.loads((folder / "stalls.json").read_text())
        staleness = [step.metrics.get("staleness", 0.0) for step in read_steps(folder)]
    finally:
        shutil.rmtree(folder.parent)
    return {
        "samples_per_s": found["samples"] / found["seconds"],
        "loss": found["loss"],
        "curve": found["curve"],
        "updates": len(staleness),
        "max_staleness": max(staleness),
        "mean_staleness": sum(staleness) / len(staleness),
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [
        [
            name,
            f"{arm['samples_per_s']:.0f}",
            f"{arm['of_sum']:.2f}",
            str(arm["updates"]),
            f"{arm['mean_staleness']:.1f}",
            f"{arm['loss']:.3f}",
        ]
        for name, arm in result["arms"].items()
    ]
    return rows(["arm", "samples/s", "of the sum", "updates", "mean staleness", "validation loss"], lines)
