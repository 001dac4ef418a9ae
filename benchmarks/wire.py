"""Two machines (network namespaces): a step's time in each format of the wire, beside its prediction.

One CPU rank on each machine, which has half of the cores: else the kernel runs both ranks on one core in some sessions, and on
two in others. The formats, and islands that synchronise once in 20 steps, take turns in blocks of steps, each block a session of
the same processes, so that other load meets all of them. The prediction is that of the run itself (event `advice` of the float32
sessions), from the link that it measured and its own time of computation. The times are medians: of steps, and of three
synchronisations in each session of islands. One alone may take 0.2 s longer where the kernel's congestion control looks for the
shortest round trip (BBR does once in 10 s).

`--only 100` takes the links of a rate, `--only 100/40` the one with this round trip (in ms): one round, or three of the fastest
links, a minute for each.

Bar: 8 of 10 predictions are within 15 % of the measured time. Reported beside it: on how many links the arm that was predicted to
be the cheapest is it, or takes at most 5 % longer than the one that is.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import kept, rows
from evenload.balance.wire_bytes import FORMATS
from evenload.records.reader import read_events
from evenload.testing import hosts

LINKS_MBIT_MS = ((10, 0.0), (10, 20.0), (100, 0.0), (100, 20.0), (1000, 0.0), (1000, 5.0), (10_000, 0.0), (10_000, 1.0))
_SETTINGS = {**{wire: f'wire="{wire}"' for wire in FORMATS}, "local": 'strategy="local", sync_every=20'}
"""Arms, and their options in the advice."""
CLOSE = 0.15
"""A prediction is good within this part of the measured time."""
_SCRIPT = """
import json, statistics, sys, time, torch, evenload
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

formats, rounds, steps, width = sys.argv[1].split(","), *map(int, sys.argv[2:5])
seconds = {name: [] for name in formats}
for block in range(rounds):
    for name in formats[:: -1 if block % 2 else 1]:
        torch.manual_seed(0)
        num_steps = 84 if name == "local" else steps
        data = TensorDataset(torch.randn(16 * num_steps, width), torch.randn(16 * num_steps, width))
        setting = {"strategy": "local", "sync_every": 20} if name == "local" else {"wire": name}
        run = evenload.init(project_dir=f"runs/{name}-{block}", check_every="off", balance="even", **setting)
        torch.set_num_threads(1)  # each machine believes that it has all cores
        model, loader = run.prepare(
            nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4))),
            DataLoader(data, batch_size=16),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        times, ends_s = [], []
        for step in loader:
            began_s = time.perf_counter()
            step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began_s)
            if step.index % 20 == 2 and step.index > 20:  # the first synchronisation of islands connects and takes memory
                ends_s.append(time.perf_counter())
        seconds[name] += [(b - a) / 20 for a, b in zip(ends_s, ends_s[1:])] if name == "local" else times[2:]
        run.close()
if run.rank == 0:
    json.dump({name: statistics.median(values) for name, values in seconds.items()}, open("seconds.json", "w"))
"""


def measure(quick: bool = False, only: str = "", keep: str = "") -> dict[str, Any]:
    """Seconds of a step by link and format, measured and predicted. `only`: some rates, or rate/round trip, with commas.

    `keep`: a folder for what each link finds.
    """
    if reason := hosts.why_not():
        return {"skipped": reason}
    links: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="evenload-bench-") as folder:
        for mbit, delay_ms in LINKS_MBIT_MS[2:3] if quick else LINKS_MBIT_MS:
            if only and not {str(mbit), f"{mbit}/{2 * delay_ms:g}"} & set(only.split(",")):
                continue
            # About as much time for each link: 1 MB on the slowest, 34 MB on the fastest.
            width = 256 if quick else {10: 256, 100: 512}.get(mbit, 1448)
            name = f"{mbit} Mbit/s, {2 * delay_ms:g} ms"
            rounds = 1 if quick or ((only or keep) and mbit < 10_000) else 3
            one = partial(_link, Path(folder, f"{mbit}-{delay_ms}"), mbit, delay_ms, width, rounds)
            links[name] = kept("" if quick else keep, f"wire-{mbit}-{2 * delay_ms:g}", one)
    errors = [abs(link["predicted_s"][arm] / link["step_s"][arm] - 1) for link in links.values() for arm in _SETTINGS]
    good = sum(error <= CLOSE for error in errors)
    bars = {f"{good} of {len(errors)} predicted within {CLOSE:.0%} (8 of 10)": good >= 0.8 * len(errors)}
    named = sum(
        link["step_s"][min(_SETTINGS, key=link["predicted_s"].__getitem__)] <= 1.05 * min(link["step_s"].values())
        for link in links.values()
    )
    return {"links": links, "num_good": good, "num_predictions": len(errors), "num_named": named, "bars": bars}


def table(result: dict[str, Any]) -> str:
    """One row for each link and format."""
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    lines = [
        (
            name,
            wire,
            f"{link['step_s'][wire]:.3f} s",
            f"{link['predicted_s'][wire]:.3f} s",
            f"{link['step_s']['fp32'] / link['step_s'][wire]:.2f}×",
        )
        for name, link in result["links"].items()
        for wire in _SETTINGS
    ]
    text = rows(("link, round trip", "wire", "step", "predicted", "to fp32"), lines)
    return (
        f"{text}\n{result['num_good']} of {result['num_predictions']} predictions within {CLOSE:.0%}; the cheapest is named on "
        f"{result['num_named']} of {len(result['links'])} links"
    )


def _link(folder: Path, mbit: float, delay_ms: float, width: int, rounds: int) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    script = ("train.py", ",".join(_SETTINGS), str(rounds), "10", str(width))
    with hosts.machines(2, mbit, delay_ms=delay_ms) as boxes:
        processes = []
        for index, box in enumerate(boxes):
            own = folder / box.name
            own.mkdir(parents=True)
            (own / "train.py").write_text(_SCRIPT)
            with (own / "screen").open("w") as screen:
                command = [
                    "taskset",
                    "-c",
                    ",".join(map(str, cores[index :: len(boxes)] or cores)),
                    sys.executable,
                    "-m",
                    "evenload.cli.main",
                    "run",
                    "-d",
                    "cpu",
                    "--nodes",
                    "2",
                    "--host",
                    "box1",
                ]
                processes.append(box.popen([*command, *script], cwd=own, stdout=screen, stderr=subprocess.STDOUT))
        codes = [process.wait(600) for process in processes]
        if any(codes):
            raise RuntimeError((folder / "box1" / "screen").read_text()[-2000:])
    advice = [
        event.fields
        for block in range(rounds)
        for event in read_events(folder / "box1" / "runs" / f"fp32-{block}")
        if event.kind == "advice"
    ]
    predicted = {
        arm: statistics.median(
            option["step_s"] for found in advice for option in found["options"] if option["setting"] == setting
        )
        for arm, setting in _SETTINGS.items()
    }
    step_s: dict[str, float] = json.loads((folder / "box1" / "seconds.json").read_text())
    return {
        "step_s": step_s,
        "predicted_s": predicted,
        "compute_s": statistics.median(found["compute_s"] for found in advice),
        "gradient_bytes": 16.0 * (width**2 + width),
    }
