"""Replicas of one process against separate processes, and a GPU with the CPU beside it against the GPU alone.

Method, two CPU cores: a small GPT (steps of about 0.4 s) and the CNN (steps of about 25 ms), once as strategy dp (one process,
two replicas) and once as ddp (two processes), each replica or rank bound to one core with one thread. At speeds of 1:1, and of
1:0.5 by repeated computation, which slows replicas and ranks alike; shares are measured, so the scatter is 2:1 there. Every arm
is a run of its own from the start; the arms alternate, dp first in one round and ddp first in the next. Told is the ratio of
samples/s over the last steps of each run (the balancer has settled by then, and what dp tries is over), the median over rounds
with a 95 % bootstrap interval; and what dp itself measured of its contention.

Method, with a GPU: the same GPT on the GPU alone (plain), and as dp on the GPU and the CPU; the same figures.

Bars: dp at least 0.85 of ddp's throughput, GPT, both speeds; GPU with CPU at least 0.98 of the GPU alone.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.models import CHANGING, CNN, GPT, TINY_GPT, Size
from benchmarks.report import rows
from evenload.hardware import gpus
from evenload.records.measurement import bootstrap
from evenload.records.reader import read_events
from evenload.testing import run_ranks
from evenload.training.launch.devices import parse_devices, plan_workers, read_host

_BAR_CPU, _BAR_GPU = 0.85, 0.98
_TIMEOUT_S = 1800.0


@dataclasses.dataclass(frozen=True)
class Case:
    """Two arms to be compared."""

    name: str
    size: Size
    above: str
    """``-d`` of the arm that is judged, under dp."""
    below: str
    """``-d`` of the arm it is compared with; ranks of ddp."""
    factors: tuple[float, ...] = ()
    bar: float | None = None


def measure(quick: bool) -> dict[str, Any]:
    """All cases."""
    cases = _cases(quick)
    num_rounds, num_steps, num_last = (1, 30, 8) if quick else (5, 90, 30)
    found = []
    for case in cases:
        found.append(_measure(case, num_rounds, num_steps, num_last))
        # Told at once: each case takes minutes.
        print(_lines(found[-1:]), flush=True)
    bars = {}
    for case, result in zip(cases, found, strict=True):
        if case.bar is not None and not quick:
            bars[f"{case.name}: >= {case.bar}"] = result["ratio"]["value"] >= case.bar
    return {"cases": found, "bars": bars}


def _cases(quick: bool) -> list[Case]:
    if quick:
        return [Case("tiny gpt 1:0.5", TINY_GPT, "cpu:2", "cpu:2", (1.0, 0.5))]
    cases = []
    for size, name, bar in ((CHANGING, "gpt", _BAR_CPU), (CNN, "cnn", None)):
        cases.append(Case(f"{name} 1:1", size, "cpu:2", "cpu:2", (), bar))
        cases.append(Case(f"{name} 1:0.5", size, "cpu:2", "cpu:2", (1.0, 0.5), bar))
    if gpus():
        cases.append(Case("gpt, GPU and CPU over GPU", GPT, "0,cpu", "0", (), _BAR_GPU))
    return cases


def _measure(case: Case, num_rounds: int, num_steps: int, num_last: int) -> dict[str, Any]:
    rounds: list[dict[str, float]] = []
    told: dict[str, Any] = {}
    for index in range(num_rounds):
        speeds: dict[str, float] = {}
        for arm in ("dp", "ddp")[:: 1 if index % 2 == 0 else -1]:
            speeds[arm], told[arm] = _run(case, arm, num_steps, num_last)
        rounds.append(speeds)
    ratio = bootstrap([one["dp"] / one["ddp"] for one in rounds])
    return {
        "case": case.name,
        "size": dataclasses.asdict(case.size),
        "factors": list(case.factors),
        "samples_per_s": {arm: median(one[arm] for one in rounds) for arm in ("dp", "ddp")},
        "rounds": rounds,
        "ratio": dataclasses.asdict(ratio),
        "told": told,
    }


def _run(case: Case, arm: str, num_steps: int, num_last: int) -> tuple[float, dict[str, Any]]:
    """Samples/s over the last steps of one run, with the shares it ended with."""
    host = read_host()
    devices = case.above if arm == "dp" else case.below
    workers = plan_workers(parse_devices(devices, host), host)
    folder = Path(tempfile.mkdtemp(prefix="evenload-bench-"))
    options: dict[str, Any] = {"timeout_s": _TIMEOUT_S}
    if arm == "dp":
        options["replicas"] = tuple(
            {"device": w.device, "name": w.device_names[w.rank], "cores": list(w.cores), "num_threads": w.num_threads}
            for w in workers
        )
        options["num_threads"] = sum(w.num_threads for w in workers if w.device == "cpu")
        options["throttle"] = {"factors": case.factors, "means": "compute"} if case.factors else {}
    else:
        options["cores"] = lambda rank: workers[rank].cores
        options["num_threads"] = lambda rank: workers[rank].num_threads
        options["device"] = lambda rank: workers[rank].device
        options["throttle"] = lambda rank: {"factor": case.factors[rank], "means": "compute"} if case.factors else {}
    try:
        results = run_ranks(
            train, 1 if arm == "dp" else len(workers), dataclasses.asdict(case.size), str(folder), arm, num_steps, num_last,
            **options,
        )  # fmt: skip
        contention = [e.fields for e in read_events(folder) if e.kind == "contention"]
        return results[0]["per_s"], {"shares": results[0]["shares"], "contention": contention[:1]}
    finally:
        shutil.rmtree(folder)


def train(size: dict[str, Any], folder: str, strategy: str, num_steps: int, num_last: int) -> dict[str, Any]:
    """One run, on each rank: samples/s over its last steps."""
    import torch
    from torch.utils.data import DataLoader

    import evenload
    from benchmarks.models import build, loss_of

    shape = Size(**size)
    run = evenload.init(project_dir=folder, strategy=strategy, log_every_s=1e9)
    torch.manual_seed(0)
    model, data = build(shape)
    model, loader = run.prepare(model, DataLoader(data, batch_size=shape.batch_size, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ends: list[float] = []
    shares: tuple[int, ...] = ()
    while len(ends) < num_steps:
        for step in loader:
            step.backward(lambda batch: loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if run.device.type == "cuda":
                torch.cuda.synchronize()
            shares = step.shares
            ends.append(time.perf_counter())
            if len(ends) == num_steps:
                break
    run.close()
    return {"per_s": num_last * shape.batch_size / (ends[-1] - ends[-1 - num_last]), "shares": list(shares)}


def table(result: dict[str, Any]) -> str:
    """For people."""
    return _lines(result["cases"])


def _lines(cases: list[dict[str, Any]]) -> str:
    lines = []
    for case in cases:
        ratio = case["ratio"]
        found = case["told"].get("dp", {}).get("contention") or [{}]
        gain = found[0].get("gain")
        lines.append(
            [
                case["case"],
                f"{case['samples_per_s']['dp']:.4g}",
                f"{case['samples_per_s']['ddp']:.4g}",
                f"{ratio['value']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
                json.dumps(case["told"]["dp"]["shares"]).replace(" ", ""),
                json.dumps(case["told"]["ddp"]["shares"]).replace(" ", ""),
                f"{gain:.2f}×" if gain else "",
            ]
        )
    header = ["case", "dp /s", "other /s", "dp/other", "dp shares", "other shares", "dp says: apart"]
    return rows(header, lines)
