"""How soon the shares fit again after a rank becomes three times as slow, and whether noise moves them.

Method, real runs: two CPU ranks at equal speeds train a small GPT with two loader workers each (steps of about 0.4 s);
before step 20 the CPU quota of one of them is cut to a third. The seconds a sample of each rank after the change are
the medians of its own seconds over its share in the last ten steps; they give the optimum of the new speeds, and the time
that each step's shares take at best (so that the scatter of single steps doesn't decide). Counted are the steps from the
first slow one to the first whose shares, and all later ones, are within 5 % of the optimum. Prefetched batches of the old
shares, and the lead of a decision, are in that count.

Method, traces: 100 seeded simulations of a threefold slow-down or recovery (tests/unit/balance/simulate.py: 2 to 4 ranks,
noise of 3 to 5 %), and 100 of 200 steps where one step in ten has a rank that takes two to four times as long.

Bars: within 5 % after at most 10 steps in 10 of 10 runs and in 95 of 100 traces, rank and factor told; at most one
needless move in 200 steps of spikes in 95 of 100 traces.
"""

from __future__ import annotations

import random
import shutil
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.launching import SCRIPTS, run_script
from evenload.balance.split import split_batch
from evenload.balance.values import Cost
from evenload.records.reader import read_events, read_steps

_CHANGE_AT, _STEPS = 20, 45


def measure(quick: bool) -> dict[str, Any]:
    """Real runs and traces."""
    runs = [_run(index, quick) for index in range(1 if quick else 10)]
    result: dict[str, Any] = {
        "runs": runs,
        "traces": _traces(5 if quick else 100),
        "spikes": _spikes(5 if quick else 100),
    }
    in_time = sum(run["steps"] is not None and run["steps"] <= 10 for run in runs)
    result["bars"] = {
        f"within 5 % after 10 steps in {in_time} of {len(runs)} runs": in_time == len(runs),
        "the event names the rank and a factor of 3 (2.4 to 3.6)": all(run["told"] for run in runs),
        f"within 5 % after 10 steps in {result['traces']['in_time']} of {result['traces']['count']} traces": (
            result["traces"]["in_time"] >= 0.95 * result["traces"]["count"]
        ),
        f"at most one needless move in {result['spikes']['calm']} of {result['spikes']['count']} traces of spikes": (
            result["spikes"]["calm"] >= 0.95 * result["spikes"]["count"]
        ),
    }
    return result


def _run(index: int, quick: bool) -> dict[str, Any]:
    change_at, steps = (12, 30) if quick else (_CHANGE_AT, _STEPS)
    slowed = index % 2
    arguments = ["--steps", str(steps), "--change-at", str(change_at), "--rank", str(slowed)]
    if quick:
        arguments += ["--batch-size", "24"]
    folder = run_script(
        SCRIPTS / "train_changing.py",
        arguments,
        throttle=(1.0, 1.0),
        devices="cpu:2",
        settings={"seed": index},
    )
    try:
        return _read(folder, change_at, slowed)
    finally:
        shutil.rmtree(folder.parent)


def _read(folder: Path, change_at: int, slowed: int) -> dict[str, Any]:
    steps = read_steps(folder)
    num_ranks, last = len(steps[0].shares), steps[-10:]
    # A step's report carries the optimizer of the step before; both are of the same speed here.
    costs = [
        Cost(0.0, median((s.ranks[r].compute_s + s.ranks[r].optimizer_s) / max(1, s.shares[r]) for s in last))
        for r in range(num_ranks)
    ]
    best_s = split_batch(steps[0].num_samples, costs).expected_s
    excess = [max(c.predict_s(n, 1) for c, n in zip(costs, s.shares, strict=True)) / best_s - 1 for s in steps]
    away = [s.step for s, over in zip(steps, excess, strict=True) if over > 0.05]
    settled = max(away) + 1 if away else change_at
    events = [event for event in read_events(folder) if event.kind == "balance" and (event.step or 0) >= change_at]
    # Two decisions may share the change between them, where it came in the middle of a step.
    factors = [
        event.fields["factor"] for event in events if event.fields.get("rank") == slowed and event.fields["factor"]
    ]
    factor = 1.0
    for part in factors:
        factor *= part
    waits = [sum(rank.data_s for rank in s.ranks) / num_ranks for s in steps[change_at:]]
    return {
        "slowed_rank": slowed,
        "steps": settled - change_at if settled <= steps[-1].step else None,
        "factor": factor,
        "told": bool(factors) and 2.4 <= factor <= 3.6,
        "shares": [list(a.shares) for a, b in pairwise([*steps, None]) if b is None or a.shares != b.shares],
        "slowest_data_s": max(waits),
        "step_s": median(s.seconds for s in last),
        "reasons": [event.message for event in events],
    }


def _traces(count: int) -> dict[str, Any]:
    from tests.unit.balance.simulate import scenario

    late = []
    for seed in range(count):
        case = scenario(seed)
        trace = case.run(seed)
        if trace.excess(case.at + 10) > 0.05:
            late.append(seed)
    return {"count": count, "in_time": count - len(late), "late_seeds": late}


def _spikes(count: int) -> dict[str, Any]:
    from tests.unit.balance.simulate import run_trace, spikes
    from tests.unit.balance.test_rebalance import needless_moves

    restless = []
    for seed in range(count):
        rng = random.Random(seed)
        num_ranks, num_samples = rng.choice((2, 3, 4)), rng.choice((32, 64, 256))
        speeds = [1.0] * num_ranks if seed % 2 else [rng.choice((1.0, 2.0, 4.0)) for _ in range(num_ranks)]
        costs = [Cost(0.1 * speed, 0.9 * speed * num_ranks / num_samples) for speed in speeds]
        trace = run_trace(costs, num_samples, 220, seed, disturb=spikes(num_ranks))
        if needless_moves(trace, costs) > 1:
            restless.append(seed)
    return {"count": count, "calm": count - len(restless), "restless_seeds": restless}


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"run {index}: rank {run['slowed_rank']} slowed, within 5 % after {run['steps']} steps, factor told "
        f"{run['factor']:.2f}, shares {' -> '.join(':'.join(map(str, shares)) for shares in run['shares'])}"
        for index, run in enumerate(result["runs"])
    ]
    traces, spiky = result["traces"], result["spikes"]
    lines.append(f"traces: {traces['in_time']} of {traces['count']} within 5 % after 10 steps")
    lines.append(f"spikes: {spiky['calm']} of {spiky['count']} traces with at most one needless move")
    return "\n".join(lines)
