"""How near the balancer's shares come to the best, under CPU quotas that are set from outside the program.

Method: two models without BatchNorm, Hugging Face's BERT (4.3 million parameters, global batch 64, steps of about half a second)
and a small CNN (global batch 270, steps of about 25 ms), each with two CPU ranks of one core and one thread. A control group
with a period of 10 ms holds rank 1 to 0.5 and 0.25 of its core (benchmarks/quota.py); Evenload knows nothing of it.

In one set of processes (training/measure.py), after some steps in which the balancer settles, short blocks alternate: Evenload's
shares, fixed shares around the ideal, and each rank alone on whole global batches. Efficiency is the speed over the sum of the
solo speeds of the same round. BERT runs five times at each ratio, the CNN once. The best fixed split of a round is the one that
was fastest in the other rounds (records/measurement.py): the fastest of three in the same rounds would be so by chance, too.

Bars: BERT: efficiency at least 0.95 at 1:0.5 and 0.92 at 1:0.25 in the median of the runs, 0.85 in the worst; at least 0.98 of
the best fixed split. CNN: at least 0.97 of the best fixed split.
"""

from __future__ import annotations

import dataclasses
import shutil
from functools import partial
from statistics import median
from typing import Any

from benchmarks.launching import SCRIPTS, read_arms, run_script
from benchmarks.models import UNEVEN
from benchmarks.quota import quotas
from benchmarks.report import kept, rows
from evenload.records.measurement import EVENLOAD, SOLO
from evenload.records.reader import read_events

RATIOS = (0.5, 0.25)
_NUM_RUNS = {"bert": 5, "cnn": 1}
_STEPS_BEFORE = {"bert": 40, "cnn": 400}
_BLOCK_S, _NUM_ROUNDS = {"bert": 3.0, "cnn": 0.8}, {"bert": 6, "cnn": 12}
_SWEEP = {
    ("bert", 0.5): (43, 44, 45),
    ("bert", 0.25): (52, 53, 54),
    ("cnn", 0.5): (180, 186, 192),
    ("cnn", 0.25): (220, 226, 232),
}
_BAR_EFFICIENCY, _BAR_WORST = {("bert", 0.5): 0.95, ("bert", 0.25): 0.92}, 0.85
_BAR_STATIC = {"bert": 0.98, "cnn": 0.97}


def measure(quick: bool, only: str = "", keep: str = "") -> dict[str, Any]:
    """All models at all ratios; run by run, so that a slow change of the machine meets all cases.

    `only`: cases such as bert/0.5, with commas; `keep`: a folder for what each run finds.
    """
    cases = [(model, ratio) for model in (("cnn",) if quick else ("bert", "cnn")) for ratio in RATIOS]
    if only:
        cases = [(model, ratio) for model, ratio in cases if f"{model}/{ratio:g}" in only.split(",")]
    found: dict[tuple[str, float], list[dict[str, Any]]] = {case: [] for case in cases}
    for index in range(1 if quick else max(_NUM_RUNS.values())):
        for model, ratio in cases:
            if index < _NUM_RUNS[model]:
                one = partial(_run, model, ratio, index, quick)
                run = kept(keep, f"uneven-{model}-{ratio:g}-{index}", one) if keep and not quick else one()
                found[model, ratio].append(run)
                print(_line(model, ratio, index, run), flush=True)
    results = [{"model": model, "ratio": ratio, "runs": runs} for (model, ratio), runs in found.items()]
    return {"cases": results, "bars": _bars(results)}


def _run(model: str, ratio: float, seed: int, quick: bool) -> dict[str, Any]:
    size, before = UNEVEN[model], 60 if quick else _STEPS_BEFORE[model]
    arms = [EVENLOAD, SOLO, *(f"static:{n},{size.batch_size - n}" for n in _SWEEP[model, ratio])]
    with quotas({1: ratio}) as pids:
        folder = run_script(
            SCRIPTS / "train_uneven.py",
            [model, "--steps", str(before + 4), "--pids", str(pids)],
            options={
                "after_steps": before,
                "num_rounds": 1 if quick else _NUM_ROUNDS[model],
                "block_s": 0.3 if quick else _BLOCK_S[model],
                "arms": arms,
            },
            devices="cpu:2",
            settings={"seed": seed},
        )
    arms_found = read_arms(folder)
    moves = [[event.step, event.message] for event in read_events(folder) if event.kind == "balance"]
    shutil.rmtree(folder.parent)
    assert arms_found.over_best_static is not None
    return {
        "efficiency": arms_found.of_sum[EVENLOAD].value,
        "over_best_static": arms_found.over_best_static.value,
        "shares": arms_found.shares[EVENLOAD],
        "best_static": arms_found.best_static,
        "step_s": size.batch_size / arms_found.speeds[EVENLOAD].value,
        "arms": dataclasses.asdict(arms_found),
        "moves": moves,
    }


def _bars(cases: list[dict[str, Any]]) -> dict[str, bool]:
    bars = {}
    for case in cases:
        model, ratio, runs = case["model"], case["ratio"], case["runs"]
        name, parts = f"{model} at 1:{ratio:g}", [run["efficiency"] for run in runs]
        if (bar := _BAR_EFFICIENCY.get((model, ratio))) is not None:
            bars[f"{name}: efficiency >= {bar} in the median of {len(runs)} runs"] = median(parts) >= bar
            bars[f"{name}: efficiency >= {_BAR_WORST} in the worst run"] = min(parts) >= _BAR_WORST
        over = median(run["over_best_static"] for run in runs)
        bars[f"{name}: >= {_BAR_STATIC[model]} of the best fixed split in the median"] = over >= _BAR_STATIC[model]
    return bars


def _line(model: str, ratio: float, index: int, run: dict[str, Any]) -> str:
    return (
        f"{model} 1:{ratio:g} run {index}: shares {':'.join(map(str, run['shares']))}, {run['efficiency']:.3f} of the sum, "
        f"{run['over_best_static']:.3f} of the best fixed ({run['best_static']}), step {run['step_s']:.3g} s"
    )


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = []
    for case in result["cases"]:
        parts, over = ([run[key] for run in case["runs"]] for key in ("efficiency", "over_best_static"))
        lines.append(
            [
                f"{case['model']} 1:{case['ratio']:g}",
                len(parts),
                f"{median(parts):.3f}",
                f"{min(parts):.3f}",
                f"{median(over):.3f}",
                f"{min(over):.3f}",
                " ".join(":".join(map(str, run["shares"])) for run in case["runs"]),
            ]
        )
    return rows(["case", "runs", "of the sum", "worst", "of the best fixed", "worst", "shares"], lines)
