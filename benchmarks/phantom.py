"""Whether short steps show an imbalance that isn't there, and whether they still find one that is.

Method, equal devices: the tutorials (the script of docs/start.md and examples/tabular.py, with more epochs, and examples/gan.py)
and the 23 scripts of scripts/train_short.py with steps of 0.05 to 5 ms, each as `evenload run -d cpu:2` runs it, two ranks over
gloo. After some seconds of training, in which the balancer may move what it likes, short blocks alternate in the same processes
(training/measure.py): equal shares, and Evenload's. Counted are the farthest share from equal in any full step, the moves, and
the gains that were announced ("expected 1.30x equal shares") against the upper end of the 95 % interval of the paired blocks.

Method, unequal devices: two ranks, of which a control group holds one to half of its core from outside (benchmarks/quota.py,
period 10 ms); a small CNN (global batch 54) and an MLP (global batch 96) with steps of about 5 ms. Blocks alternate between
Evenload's shares and fixed ones around the ideal. The best of these in a round is the one that was fastest in the other rounds.

Bars: on equal devices no share farther than 10 % from equal, and no announced gain above the measured one; at 1:0.5 at least
0.95 of the best fixed split, in the median of the runs.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.launching import SCRIPTS, read_arms, run_script
from benchmarks.models import SHORT, SHORT_MLP
from benchmarks.quota import quotas
from benchmarks.report import rows
from benchmarks.scripts.train_short import SCRIPTS as SHORT_SCRIPTS
from evenload.balance.split import even_shares
from evenload.records.measurement import EVEN, EVENLOAD
from evenload.records.reader import read_events, read_steps

_ROOT = Path(__file__).parents[1]
_TRAINING_STEPS = 1200
_NUM_UNEQUAL_RUNS = 2
_SETTLING_STEPS = 1000
_SWEEP = {"short_cnn": (34, 35, 36, 37), "short_mlp": (60, 62, 64, 66)}
_BAR_SHARE, _BAR_STATIC = 0.1, 0.95


def measure(quick: bool) -> dict[str, Any]:
    """All scripts on equal devices, then both models at 1:0.5."""
    equal = []
    for name, script, arguments in _equal_cases(quick):
        equal.append({"name": name, **_run_equal(script, arguments, quick)})
        print(_equal_line(equal[-1]), flush=True)
    unequal = []
    for index in range(1 if quick else _NUM_UNEQUAL_RUNS):
        for model in ("short_cnn",) if quick else ("short_cnn", "short_mlp"):
            unequal.append({"model": model, **_run_unequal(model, index, quick)})
            print(_unequal_line(unequal[-1]), flush=True)
    return {"equal": equal, "unequal": unequal, "bars": _bars(equal, unequal)}


def _equal_cases(quick: bool) -> Iterator[tuple[str, Path, list[str]]]:
    steps = 60 if quick else _TRAINING_STEPS
    with tempfile.TemporaryDirectory(prefix="evenload-tutorial-") as folder:
        first = Path(folder) / "train.py"
        first.write_text(tutorial(epochs=-(-steps // 15) + 1))
        yield "docs/start.md", first, []
        if not quick:
            yield "examples/tabular.py", _ROOT / "examples" / "tabular.py", ["--epochs", str(steps // 15 + 1)]
            yield "examples/gan.py", _ROOT / "examples" / "gan.py", ["--epochs", str(steps // 28 + 1)]
    for name in ("mlp", "gan") if quick else SHORT_SCRIPTS:
        yield name, SCRIPTS / "train_short.py", [name, "--steps", str(steps + 40)]


def tutorial(epochs: int) -> str:
    """Return the script of docs/start.md, in the folder that it is given and with other epochs."""
    (source,) = re.findall(r"```python\n(.*?)```", (_ROOT / "docs" / "start.md").read_text(), re.DOTALL)
    return source.replace('project_dir="runs/first", ', "").replace(
        "range(loader.epoch, 5)", f"range(loader.epoch, {epochs})"
    )


def _run_equal(script: Path, arguments: list[str], quick: bool) -> dict[str, Any]:
    options = {
        "after_steps": 40 if quick else _TRAINING_STEPS,
        "num_rounds": 2 if quick else 8,
        "block_s": 0.05 if quick else 0.2,
        "arms": [EVEN, EVENLOAD],
    }
    folder = run_script(script, arguments, devices="cpu:2", options=options)
    found = read_equal(folder)
    shutil.rmtree(folder.parent)
    return found


def read_equal(folder: Path) -> dict[str, Any]:
    """Return how far the shares of a run went, what it announced, and what paired blocks show of it."""
    steps = [step for step in read_steps(folder) if not step.arm]
    largest = max(sum(step.shares) for step in steps)
    even = even_shares(largest, len(steps[0].shares))
    full = [step for step in steps if sum(step.shares) == largest]
    moves = [event for event in read_events(folder) if event.kind == "balance" and event.message]
    announced = [event.fields["over_equal"] for event in moves if event.fields.get("over_equal")]
    gain = read_arms(folder).over_even
    assert gain is not None
    return {
        "num_steps": len(steps),
        "step_s": median(step.seconds for step in full),
        "own_s": median(max(rank.compute_s + rank.optimizer_s for rank in step.ranks) for step in full),
        "farthest": max(
            abs(share - equal) / equal for step in full for share, equal in zip(step.shares, even, strict=True)
        ),
        "last_shares": list(full[-1].shares),
        "moves": [[event.step, event.message] for event in moves],
        "announced": max(announced, default=None),
        "gain": {"value": gain.value, "low": gain.low, "high": gain.high},
    }


def _run_unequal(model: str, seed: int, quick: bool) -> dict[str, Any]:
    size = {"short_cnn": SHORT, "short_mlp": SHORT_MLP}[model]
    before = 60 if quick else _SETTLING_STEPS
    with quotas({1: 0.5}) as pids:
        folder = run_script(
            SCRIPTS / "train_uneven.py",
            [model, "--steps", str(before + 4), "--pids", str(pids)],
            options={
                "after_steps": before,
                "num_rounds": 1 if quick else 6,
                "block_s": 0.1 if quick else 0.6,
                "arms": [EVEN, EVENLOAD, *(f"static:{n},{size.batch_size - n}" for n in _SWEEP[model])],
            },
            devices="cpu:2",
            settings={"seed": seed},
        )
    found = read_arms(folder)
    moves = [[event.step, event.message] for event in read_events(folder) if event.kind == "balance" and event.message]
    shutil.rmtree(folder.parent)
    assert found.over_best_static is not None and found.over_even is not None
    return {
        "step_s": size.batch_size / found.speeds[EVENLOAD].value,
        "shares": found.shares[EVENLOAD],
        "over_even": found.over_even.value,
        "best_static": found.best_static,
        "over_best_static": found.over_best_static.value,
        "speeds": {arm: speed.value for arm, speed in found.speeds.items()},
        "moves": moves,
    }


def _bars(equal: list[dict[str, Any]], unequal: list[dict[str, Any]]) -> dict[str, bool]:
    farthest = max(equal, key=lambda case: case["farthest"])
    wrong = [case["name"] for case in equal if case["announced"] and case["announced"] > case["gain"]["high"]]
    bars = {
        f"equal devices: no share farther than 10 % from equal (farthest: {farthest['farthest']:.1%}, {farthest['name']})": (
            farthest["farthest"] <= _BAR_SHARE
        ),
        f"equal devices: no announced gain above the measured one ({', '.join(wrong) or 'none'})": not wrong,
    }
    for model in dict.fromkeys(case["model"] for case in unequal):
        parts = [case["over_best_static"] for case in unequal if case["model"] == model]
        name = f"{model} at 1:0.5: at least {_BAR_STATIC} of the best fixed split in the median ({median(parts):.3f})"
        bars[name] = median(parts) >= _BAR_STATIC
    return bars


def _equal_line(case: Mapping[str, Any]) -> str:
    gain, announced = case["gain"], case["announced"]
    said = f"{announced:.2f}x" if announced else "nothing"
    return (
        f"{case['name']}: steps of {case['step_s'] * 1e3:.2f} ms, farthest share {case['farthest']:.1%}, {len(case['moves'])} "
        f"moves, announced {said}, measured {gain['value']:.3f}x ({gain['low']:.3f} to {gain['high']:.3f})"
    )


def _unequal_line(case: Mapping[str, Any]) -> str:
    return (
        f"{case['model']} 1:0.5: steps of {case['step_s'] * 1e3:.2f} ms, shares {':'.join(map(str, case['shares']))}, "
        f"{case['over_even']:.3f}x equal shares, {case['over_best_static']:.3f} of the best fixed ({case['best_static']})"
    )


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines: list[list[object]] = []
    for case in result["equal"]:
        gain = case["gain"]
        lines.append(
            [
                case["name"],
                f"{case['own_s'] * 1e3:.2f}",
                f"{case['step_s'] * 1e3:.2f}",
                f"{case['farthest']:.1%}",
                len(case["moves"]),
                f"{case['announced']:.2f}x" if case["announced"] else "-",
                f"{gain['value']:.3f} ({gain['low']:.3f} to {gain['high']:.3f})",
            ]
        )
    header = ["equal devices", "own, ms", "step, ms", "farthest", "moves", "announced", "measured over equal shares"]
    others = [_unequal_line(case) for case in result["unequal"]]
    return "\n".join([rows(header, lines), "", *others])
