"""The cost of a checkpoint that is written beside the training.

Method: two CPU ranks (or GPUs) train the GPT under Evenload in one set of processes. Blocks with one checkpoint alternate with
blocks without one, in alternating order. The cost is the median over rounds of the difference of the two wall times, with a 95 %
bootstrap interval; `cpu_s` is that of rank 0's CPU time with all threads. A checkpoint every 30 s costs that part of 30 s.

Bar: at most 2 % of throughput with a checkpoint every 30 s (issue "Nothing lost"), by the wall time.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

from benchmarks.launching import SCRIPTS, default_devices, run_script
from benchmarks.models import GPT, TINY_GPT
from benchmarks.report import rows

EVERY_S = 30.0
_LIMIT = 0.02


def measure(quick: bool) -> dict[str, Any]:
    size, block_s, num_rounds = (TINY_GPT, 0.2, 4) if quick else (GPT, 10.0, 12)
    folder = run_script(
        SCRIPTS / "train_saving.py",
        [json.dumps(dataclasses.asdict(size)), "--block-s", str(block_s), "--num-rounds", str(num_rounds)],
        throttle=(1.0, 1.0) if default_devices()[0].startswith("cpu") else (),
    )
    result = json.loads((folder / "saving.json").read_text())
    shutil.rmtree(folder.parent)
    share = result["cost_s"]["value"] / EVERY_S
    bars = {} if quick else {f"gpt: a checkpoint every 30 s costs at most {_LIMIT:.0%}": share <= _LIMIT}
    return {**result, "share_of_30_s": share, "cpu_share_of_30_s": result["cpu_s"]["value"] / EVERY_S, "bars": bars}


def table(result: dict[str, Any]) -> str:
    cost, cpu = result["cost_s"], result["cpu_s"]
    line = [
        f"{result['size_bytes'] / 2**20:.1f} MiB",
        f"{cost['value'] * 1e3:.0f} ms ({cost['low'] * 1e3:.0f} to {cost['high'] * 1e3:.0f})",
        f"{result['share_of_30_s']:.2%}",
        f"{cpu['value'] * 1e3:.0f} ms ({cpu['low'] * 1e3:.0f} to {cpu['high'] * 1e3:.0f})",
        f"{result['held_s'] * 1e3:.1f} ms",
        f"{result['write_s'] * 1e3:.0f} ms",
        f"{result['block_s']:.1f} s",
    ]
    return rows(["checkpoint", "cost", "of 30 s", "CPU of rank 0", "loop held", "written in", "block"], [line])
