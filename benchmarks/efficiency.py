"""How much of the devices' speed a training gets, when one of two is slower.

Method: two models, the example's GPT (1.9 million parameters, global batch 90 of 128 bytes, steps of about a second on two
CPU cores) and a small CNN (54,000 parameters, global batch 270, steps of about 25 ms), each with two CPU ranks of one core
and one thread, at speeds of 1:1, 1:0.5 and 1:0.25 by CPU quota. On a machine with GPUs: two of them as they are, or one that
two ranks share.

In one set of processes (training/measure.py), after the balancer has settled, short blocks alternate: equal shares,
Evenload's shares as ruled, fixed shares around the ideal (the sweep), and solo: each rank alone on full global batches,
optimizer included, while the other does the same. A block lasts from a barrier to a barrier. Reported are medians over rounds,
and 95 % bootstrap intervals over rounds of the median ratio inside a round. Efficiency is the speed over the sum of the solo
speeds of the same round. The best fixed split of a round is the one that was fastest in the other rounds.

The peers (plain DDP, Accelerate, Lightning; equal shares, for they know no others) run the same model right before, in
processes of their own on the same cores and quotas: median over blocks, without the first. Their efficiency is their speed
over the sum of solo speeds of the Evenload run: two runs, so true to about 3 %.

Bars: GPT: efficiency at least 0.95, and 0.98 of the best fixed split. CNN: at least 0.95 of the best fixed split.
"""

from __future__ import annotations

import dataclasses
import shutil
from statistics import median
from typing import Any

from benchmarks.launching import EXAMPLE, SCRIPTS, default_devices, read_arms, run_script
from benchmarks.models import CNN, GPT, TINY_GPT, Size
from benchmarks.peers import PEERS, SkippedError, measure_peer
from benchmarks.report import rows
from evenload.records.measurement import EVENLOAD, Estimate, MeasurementResult

RATIOS = (1.0, 0.5, 0.25)
_SCRIPT = {"gpt": EXAMPLE, "cnn": SCRIPTS / "train_cnn.py"}
_BAR_EFFICIENCY, _BAR_STATIC = {"gpt": 0.95}, {"gpt": 0.98, "cnn": 0.95}


def measure(quick: bool, peers: tuple[str, ...] = PEERS) -> dict[str, Any]:
    """All models at all ratios."""
    on_cpu = default_devices()[0].startswith("cpu")
    cases = []
    for size in (TINY_GPT,) if quick else (GPT, CNN):
        for ratio in (0.5,) if quick else RATIOS if on_cpu else (None,):
            cases.append(_measure(size, ratio, ("ddp",) if quick else peers, quick))
            # Told at once: what comes later may fail, and each case takes minutes.
            print(_lines(cases[-1:]), flush=True)
    return {"cases": cases, "bars": _bars(cases)}


def _measure(size: Size, ratio: float | None, peers: tuple[str, ...], quick: bool) -> dict[str, Any]:
    factors = (1.0, ratio) if ratio is not None else ()
    block_s, num_rounds = (0.2, 1) if quick else (2.5, 5)
    told: dict[str, Any] = {}
    for peer in peers if factors else ():
        try:
            told[peer] = {"per_s": median(measure_peer(peer, size, factors, block_s, 3 if quick else 4))}
        except SkippedError as reason:
            told[peer] = {"skipped": str(reason)}
    ideal = size.batch_size / (1 + (ratio or 1.0))
    unit = max(1, size.batch_size // 60)
    sweep = {min(max(1, round(ideal) + unit * off), size.batch_size - 1) for off in ((0,) if quick else range(-1, 2))}
    after = 8 if quick else 40 if size.model == "gpt" else 400
    folder = run_script(
        _SCRIPT[size.model],
        [*size.arguments, "--steps", str(after + 4)],
        throttle=factors,
        options={
            "after_steps": after,
            "num_rounds": num_rounds,
            "block_s": block_s,
            "arms": ["even", "evenload", "solo", *(f"static:{n},{size.batch_size - n}" for n in sorted(sweep))],
        },
    )
    found = read_arms(folder)
    shutil.rmtree(folder.parent)
    for peer in told.values():
        if "per_s" in peer and found.solo_sum is not None:
            peer["efficiency"] = peer["per_s"] / found.solo_sum.value
    delivered = found.solo[1].value / found.solo[0].value
    return {
        "model": size.model,
        "size": dataclasses.asdict(size),
        "ratio": ratio,
        "peers": told,
        "step_s": size.batch_size / found.speeds[EVENLOAD].value,
        "throttle_delivered": delivered,
        "throttle_error": delivered / ratio - 1 if ratio else None,
        "arms": _plain(found),
    }


def _plain(found: MeasurementResult) -> dict[str, Any]:
    return dataclasses.asdict(found) | {"efficiency": dataclasses.asdict(found.of_sum[EVENLOAD])}


def _bars(cases: list[dict[str, Any]]) -> dict[str, bool]:
    bars = {}
    for case in cases:
        model, name = case["model"], f"{case['model']} at 1:{case['ratio']:g}" if case["ratio"] else case["model"]
        if model in _BAR_EFFICIENCY:
            bar = _BAR_EFFICIENCY[model]
            bars[f"{name}: efficiency >= {bar}"] = case["arms"]["efficiency"]["value"] >= bar
        over = case["arms"]["over_best_static"]
        if over is not None:
            bars[f"{name}: >= {_BAR_STATIC[model]} of the best fixed split"] = over["value"] >= _BAR_STATIC[model]
    return bars


def table(result: dict[str, Any]) -> str:
    """For people."""
    return _lines(result["cases"])


def _lines(cases: list[dict[str, Any]]) -> str:
    header = ["case", "arm", "shares", "samples/s", "of the sum", "95 %"]
    lines: list[list[object]] = []
    for case in cases:
        arms = case["arms"]
        name = f"{case['model']} 1:{case['ratio']:g}" if case["ratio"] else case["model"]
        total = arms["solo_sum"]["value"]
        for rank, speed in enumerate(arms["solo"]):
            lines.append([name, f"rank {rank} alone", "", f"{speed['value']:.4g}", f"{speed['value'] / total:.3f}", ""])
        lines.append([name, "sum of these", "", f"{total:.4g}", "1.000", ""])
        for peer, told in case["peers"].items():
            if "skipped" in told:
                lines.append([name, f"{peer} (skipped: {told['skipped'][:60]})", "", "", "", ""])
            else:
                lines.append([name, peer, "equal", f"{told['per_s']:.4g}", f"{told['efficiency']:.3f}", ""])
        for arm, speed in arms["speeds"].items():
            part = Estimate(**arms["of_sum"][arm])
            best = "  <- best fixed" if arm == arms["best_static"] else ""
            lines.append(
                [
                    name,
                    arm.split(":")[0] + best,
                    ":".join(map(str, arms["shares"][arm])),
                    f"{speed['value']:.4g}",
                    f"{part.value:.3f}",
                    f"{part.low:.3f} to {part.high:.3f}",
                ]
            )
        over = arms["over_best_static"]
        if over is not None:
            lines.append(
                [
                    name,
                    "evenload over the best fixed",
                    "",
                    "",
                    f"{over['value']:.3f}",
                    f"{over['low']:.3f} to {over['high']:.3f}",
                ]
            )
        lines.append([name, "step, s", "", f"{case['step_s']:.3g}", "", ""])
        if case["throttle_error"] is not None:
            lines.append([name, "throttle error", "", "", f"{case['throttle_error']:+.3f}", ""])
    return rows(header, lines)
