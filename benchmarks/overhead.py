"""What Evenload costs where equal shares are best, against plain DDP.

Method: two equal CPU ranks (or two GPUs, or one GPU that they share), one set of processes. Blocks of about 3 s alternate
in rotating order: Evenload (as a user runs it, balancing on), plain DDP, and plain DDP once more with a replica of its own
(the A/A run). A block lasts from a barrier to a barrier. The ratio is the median over rounds of the ratio inside a round,
with a 95 % bootstrap interval; rounds go on until its half-width is at most 0.5 %, or to a time limit.

Evenload's own CPU time: a profile by thread CPU time of one block; the self time of all functions in evenload/, without
what they call in torch and less what the profiler adds to a call of an empty function. What it adds to the calls they make
stays in, so it is an upper bound. `thread_cpu_s` is all CPU time of the training thread a step, by arm.

Bars, for the GPT: the lower bound of the interval of Evenload/DDP at least 0.985; own CPU time at most 1 % of a step. The
CNN, with steps of about 25 ms, shows what a step costs at least.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

from benchmarks.launching import SCRIPTS, default_devices, run_script
from benchmarks.models import CNN, GPT, TINY_GPT
from benchmarks.report import rows


def measure(quick: bool) -> dict[str, Any]:
    """Both models."""
    cases = {}
    for size in (TINY_GPT,) if quick else (GPT, CNN):
        block_s, limit_s = (0.1, 0.5) if quick else (3.0 if size is GPT else 1.0, 420.0)
        folder = run_script(
            SCRIPTS / "train_beside_ddp.py",
            [json.dumps(dataclasses.asdict(size)), "--block-s", str(block_s), "--limit-s", str(limit_s)],
            throttle=(1.0, 1.0) if default_devices()[0].startswith("cpu") else (),
        )
        cases[size.model] = json.loads((folder / "overhead.json").read_text())
        shutil.rmtree(folder.parent)
    bars = {}
    if "gpt" in cases and not quick:
        bars["gpt: lower bound of Evenload/DDP >= 0.985"] = cases["gpt"]["evenload_over_ddp"]["low"] >= 0.985
        bars["gpt: own CPU time <= 1 % of a step"] = cases["gpt"]["own_cpu_share"] <= 0.01
    return {"cases": cases, "bars": bars}


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = []
    for model, case in result["cases"].items():
        ours, same = case["evenload_over_ddp"], case["ddp_over_ddp"]
        lines.append(
            [
                model,
                f"{case['step_s'] * 1e3:.1f} ms",
                f"{ours['value']:.4f} ({ours['low']:.4f} to {ours['high']:.4f})",
                f"{same['value']:.4f} ({same['low']:.4f} to {same['high']:.4f})",
                case["num_rounds"],
                f"{case['own_cpu_s'] * 1e3:.3f} ms",
                f"{case['own_cpu_share'] * 100:.2f} %",
            ]
        )
    return rows(["model", "step", "Evenload/DDP", "DDP/DDP", "rounds", "own CPU a step", "share"], lines)
