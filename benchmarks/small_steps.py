"""What a step of Evenload costs where steps are short, or parameters are many and small.

Method: that of `overhead`: blocks of Evenload and of plain DDP alternate in one set of processes, two equal CPU ranks; the
median over rounds of the ratio inside a round, with a 95 % bootstrap interval. No model has BatchNorm. `one device`: one
rank; blocks alternate with those of a plain loop, and the difference of their times is Evenload's own cost.

Bars: at least 0.99 of DDP, the lower bound at least 0.985, for each model on two ranks; own cost on one device at most
0.25 ms a step.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

from benchmarks.launching import SCRIPTS, run_script
from benchmarks.models import BERT, CNN, MANY, ONE_MS
from benchmarks.report import rows

CASES = {
    "25 ms": (CNN, 2, 1.0),
    "500 ms": (BERT, 2, 2.0),
    "800 parameters": (MANY, 2, 1.0),
    "one device": (ONE_MS, 1, 0.5),
}
"""Size, ranks, seconds of a block."""


def measure(quick: bool, only: str | None = None) -> dict[str, Any]:
    """All cases, or some of them (their names, separated by commas)."""
    cases = {}
    names = only.split(",") if only else [name for name in CASES if name != "500 ms" or not quick]
    for name in names:
        size, num_ranks, block_s = CASES[name]
        block_s, limit_s = (0.1, 0.5) if quick else (block_s, 240.0)
        folder = run_script(
            SCRIPTS / "train_beside_ddp.py",
            [json.dumps(dataclasses.asdict(size)), "--block-s", str(block_s), "--limit-s", str(limit_s)],
            devices=f"cpu:{num_ranks}",
        )
        cases[name] = json.loads((folder / "overhead.json").read_text())
        shutil.rmtree(folder.parent)
    return {"cases": cases, "bars": {} if quick else _bars(cases)}


def _bars(cases: dict[str, Any]) -> dict[str, bool]:
    bars = {}
    for name, case in cases.items():
        if name == "one device":
            bars["one device: own cost <= 0.25 ms"] = case["own_wall_s"]["value"] <= 0.25e-3
        else:
            ours = case["evenload_over_ddp"]
            bars[f"{name}: Evenload/DDP >= 0.99, lower bound >= 0.985"] = ours["value"] >= 0.99 and ours["low"] >= 0.985
    return bars


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = []
    for name, case in result["cases"].items():
        ours, same, own = case["evenload_over_ddp"], case["ddp_over_ddp"], case["own_wall_s"]
        lines.append(
            [
                name,
                f"{case['step_s'] * 1e3:.2f} ms",
                f"{ours['value']:.4f} ({ours['low']:.4f} to {ours['high']:.4f})",
                f"{same['value']:.4f} ({same['low']:.4f} to {same['high']:.4f})",
                f"{own['value'] * 1e3:.3f} ms ({own['low'] * 1e3:.3f} to {own['high'] * 1e3:.3f})",
                case["num_rounds"],
            ]
        )
    return rows(["case", "step", "Evenload/plain", "plain/plain", "own cost a step", "rounds"], lines)
