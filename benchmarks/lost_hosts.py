"""Three machines of one run: one joins, leaves, is cut off and comes back, or coordinates the run and is lost.

Machines are network namespaces with one CPU rank each; they share the run folder. Each of twenty seeds draws one of five
events and its moment (0 to 2 s after a step on all ranks): a third machine joins; a machine that is not the coordinator is
killed; one is cut off for 8 s; the coordinator is killed; the coordinator is cut off for 8 s. The run then trains on and ends.
It is right if the remaining machines went on without a restart, each step was committed once, and the weights equal those of
one process to 1e-9.

Bar: 20 of 20.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import rows
from evenload.testing import hosts

NUM_SEEDS, CUT_S, PAUSE_S = 20, 8.0, "0.15"
EVENTS = ("a machine joins", "a machine is killed", "a machine is cut off and back", "the coordinator is killed",
          "the coordinator is cut off and back")  # fmt: skip


def measure(quick: bool = False, only: str = "") -> dict[str, Any]:
    """`only`: seeds, with commas."""
    if reason := hosts.why_not():
        return {"skipped": reason}
    seeds = [int(seed) for seed in only.split(",")] if only else range(3, 4) if quick else range(NUM_SEEDS)
    runs = []
    with tempfile.TemporaryDirectory(prefix="evenload-bench-") as name:
        for seed in seeds:
            runs.append(disturb(Path(name, str(seed)), seed))
            print(f"seed {seed}: {runs[-1]}", flush=True)
    good = sum(not one["problem"] for one in runs)
    return {
        "runs": runs,
        "bars": {f"{good} of {len(runs)} went on, each step once, with the same weights": good == len(runs)},
    }


def disturb(folder: Path, seed: int) -> dict[str, Any]:
    """Let one event happen to a run; return it, how long the others did not train, and what went wrong."""
    from tests.system.rendezvous.test_elastic_hosts import Machines, assert_equal

    event, draw = EVENTS[seed % len(EVENTS)], random.Random(seed)
    after_s, victim = draw.uniform(0.0, 2.0), 0 if "coordinator" in event else draw.randrange(1, 3)
    joins, killed = event == EVENTS[0], "killed" in event
    folder.mkdir()
    found: dict[str, Any] = {
        "seed": seed,
        "event": event,
        "machine": f"box{victim + 1}",
        "after_s": after_s,
        "problem": "",
    }
    try:
        with hosts.machines(3) as boxes, Machines(boxes, folder, "2:3", PAUSE_S) as run:
            names = [box.name for index, box in enumerate(boxes) if not (joins and index == victim)]
            run.type(*names, options=("--wait", "4" if joins else "60"))
            run.train_on(len(names))
            time.sleep(after_s)
            began_s = time.monotonic()
            if joins:
                run.type(boxes[victim].name)
                run.train_on(3)
            elif killed:
                run.kill_machine(boxes[victim].name)
                run.train_on(2, num_steps=1)
            else:
                boxes[victim].unplug()
                run.train_on(2, num_steps=1)
            found["until_trained_on_s"] = time.monotonic() - began_s
            if not (joins or killed):
                time.sleep(max(0.0, CUT_S - found["until_trained_on_s"]))
                boxes[victim].plug()
                run.train_on(3)
                found["until_back_s"] = time.monotonic() - began_s - CUT_S
            assert_equal(*run.finish())
    except AssertionError as error:
        found["problem"] = str(error)[-4000:] or "the weights differ"
    return found


def table(result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    lines = []
    for event in EVENTS:
        runs = [one for one in result["runs"] if one["event"] == event]
        times = [one["until_trained_on_s"] for one in runs if not one["problem"]]
        worst = f"{max(times):.1f} s" if times else "-"
        lines.append((event, f"{sum(not one['problem'] for one in runs)} of {len(runs)}", worst))
    return rows(("event", "right", "trained on within, at most"), lines)
