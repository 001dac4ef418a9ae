"""What BatchNorm over ranks costs where equal shares are best, against plain DDP with BatchNorm of each rank.

Method: that of the benchmark `overhead`, with equal shares fixed and three arms in one set of processes: Evenload's default
(statistics over all ranks), Evenload with statistics of each rank alone, and plain DDP, whose BatchNorm on a CPU is that of
each rank (torch's SyncBatchNorm needs GPUs).

Bars: default/DDP at least 0.90 for ResNet-50 (64 x 64 images, global batch 32, 53 BatchNorms) and for the small CNN with two
BatchNorms and steps of about 30 ms; the default's step at most 1.06 times that with local statistics for ResNet-50.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

from benchmarks.launching import SCRIPTS, default_devices, run_script
from benchmarks.models import NORMED_CNN, RESNET50, TINY_RESNET
from benchmarks.report import rows


def measure(quick: bool) -> dict[str, Any]:
    """Both models."""
    cases = {}
    for size in (TINY_RESNET,) if quick else (RESNET50, NORMED_CNN):
        block_s, limit_s = (0.1, 0.5) if quick else (2.0 if size is RESNET50 else 0.7, 45.0)
        folder = run_script(
            SCRIPTS / "train_beside_ddp.py",
            [
                json.dumps(dataclasses.asdict(size)),
                *("--block-s", str(block_s), "--limit-s", str(limit_s), "--goal", "0.01", "--warm-steps", "4"),
                *("--arms", "evenload,local,ddp"),
            ],
            throttle=(1.0, 1.0) if default_devices()[0].startswith("cpu") else (),
            # The local arm lets the running statistics of the ranks differ.
            settings={"balance": "even", "check_every": "off"},
        )
        cases[size.model] = json.loads((folder / "overhead.json").read_text())
        shutil.rmtree(folder.parent)
    bars = {}
    if not quick:
        resnet, cnn = cases["resnet50"], cases["normed_cnn"]
        bars["resnet50: default/DDP >= 0.90"] = resnet["evenload_over_ddp"]["value"] >= 0.90
        bars["resnet50: default's step <= 1.06 of the local one's"] = resnet["local_over_evenload"]["value"] <= 1.06
        bars["normed_cnn: default/DDP >= 0.90"] = cnn["evenload_over_ddp"]["value"] >= 0.90
    return {"cases": cases, "bars": bars}


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = []
    for model, case in result["cases"].items():
        seconds = [
            f"{case['step_s_of'][arm] * 1e3:.1f} ({case['thread_cpu_s'][arm] * 1e3:.1f})"
            for arm in ("ddp", "local", "evenload")
        ]
        ratios = [
            f"{case[name]['value']:.3f} ({case[name]['low']:.3f} to {case[name]['high']:.3f})"
            for name in ("evenload_over_ddp", "local_over_ddp", "local_over_evenload")
        ]
        lines.append([model, *seconds, *ratios, case["num_rounds"]])
    return "a step in ms, in brackets the CPU time of the training thread, which a busy machine changes less\n" + rows(
        ["model", "DDP", "local", "default", "default/DDP", "local/DDP", "local/default", "rounds"], lines
    )
