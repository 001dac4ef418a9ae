"""The link between two islands is cut in the middle of a synchronisation, for ten seconds, twenty times.

Two machines (network namespaces) at 10 Mbit/s train 0.5 million parameters under strategy local: a synchronisation takes 1.7 s.
The interface of one of them goes down at a random moment of one, and comes up again. A run may go on, or end with an exit code
that is not 0 and a line that names the machine that was lost; it is then started again on both machines. Nothing is lost if the
last weights equal those of a run that nobody disturbed.

Bar: 20 of 20 continue or end with the machine at fault named, and nothing is lost.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import kept, rows
from evenload.testing import hosts

CUT_S, NUM_CUTS = 10.0, 20
_MBIT, _SYNC_S, _EVERY, _STEPS = 10.0, 1.7, 4, 16
_SCRIPT = """
import sys, torch, evenload
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVERY, STEPS = map(int, sys.argv[1:])
torch.manual_seed(0)
data = TensorDataset(torch.randn(8 * STEPS, 512), torch.randn(8 * STEPS, 1024))
run = evenload.init(project_dir="run", strategy="local", sync_every=EVERY, outer_lr=0.7, outer_momentum=0.9, balance="even")
model, loader = run.prepare(nn.Linear(512, 1024), DataLoader(data, batch_size=8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.resume(model=model, optimizer=optimizer)
for epoch in range(loader.epoch, 1):
    for step in loader:
        step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step(); optimizer.zero_grad()
        if (step.index + 1) % EVERY == 0:
            with open("ends", "a") as file:  # the islands synchronise now
                file.write(f"{step.index}\\n")
        run.checkpoint(every=EVERY)
run.close()
torch.save(model.state_dict(), "weights.pt")
"""


def measure(quick: bool = False, only: str = "", keep: str = "") -> dict[str, Any]:
    """`only`: seeds, with commas; `keep`: a folder for what each seed finds."""
    if reason := hosts.why_not():
        return {"skipped": reason}
    seeds = [int(seed) for seed in only.split(",")] if only else range(1 if quick else NUM_CUTS)
    cuts = []
    with tempfile.TemporaryDirectory(prefix="evenload-bench-") as name:
        undisturbed = cache(lambda: train(Path(name, "whole"))["weights"])
        for seed in seeds:
            one = partial(_cut_once, Path(name, str(seed)), seed, 2.0 if quick else CUT_S, undisturbed)
            cuts.append(kept("" if quick else keep, f"cut-{seed}", one))
    good = sum(one["is_named"] and not one["is_lost"] for one in cuts)
    bars = {f"{good} of {len(cuts)} continue or name the machine at fault, with nothing lost": good == len(cuts)}
    return {"cuts": cuts, "bars": bars}


def _cut_once(folder: Path, seed: int, cut_s: float, expected: Callable[[], Sequence[torch.Tensor]]) -> dict[str, Any]:
    return {"seed": seed, **cut(folder, seed, cut_s, expected())}


def cut(folder: Path, seed: int, cut_s: float, expected: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Cut the link once; the outcome: how it went on, and whether the lost machine was named and the weights are right."""
    draw = random.Random(seed)
    moment = draw.randrange(_STEPS // _EVERY - 1), draw.uniform(0.0, _SYNC_S), draw.randrange(2)
    first = train(folder, moment, cut_s)
    outcome = {"continued": first["codes"] == [0, 0], "is_named": True}
    if not outcome["continued"]:
        # The machine that was cut off may name the other one: neither knows on which side the cable is.
        outcome["is_named"] = all(
            code != 0 and f"box{2 - index}" in screen and "is gone" in screen
            for index, (code, screen) in enumerate(zip(first["codes"], first["screens"], strict=True))
        )
        outcome["screens"] = [screen[-600:] for screen in first["screens"]]
        first = train(folder)
    found = first["weights"]
    lost = not found or any((a - b).norm() > 1e-6 * b.norm() for a, b in zip(found, expected, strict=True))
    return {**outcome, "is_lost": bool(lost), "codes": first["codes"]}


def train(folder: Path, moment: tuple[int, float, int] | None = None, cut_s: float = 0.0) -> dict[str, Any]:
    """Train on two machines; `moment` is the synchronisation, the seconds after its begin, and the machine that is cut off."""
    with hosts.machines(2, _MBIT) as boxes:
        processes = []
        for box in boxes:
            own = folder / box.name
            own.mkdir(parents=True, exist_ok=True)
            (own / "train.py").write_text(_SCRIPT)
            command = [sys.executable, "-m", "evenload.cli.main", "run", "-d", "cpu", "--nodes", "2", "--host", "box1"]
            command += ["train.py", str(_EVERY), str(_STEPS)]
            with (own / "screen").open("w") as screen:
                process = box.popen(command, cwd=own, stdout=screen, stderr=subprocess.STDOUT)
            processes.append(process)
        try:
            if moment is not None:
                which, after_s, index = moment
                ends = folder / boxes[index].name / "ends"
                while len(ends.read_text().split() if ends.exists() else ()) <= which:
                    if any(process.poll() is not None for process in processes):
                        break
                    time.sleep(0.01)
                time.sleep(after_s)
                boxes[index].unplug()
                time.sleep(cut_s)
                boxes[index].plug()
            codes = [process.wait(120) for process in processes]
        finally:
            for process in processes:
                process.kill()
    screens = [(folder / box.name / "screen").read_text() for box in boxes]
    saved = [folder / box.name / "weights.pt" for box in boxes]
    weights = [value for path in saved if path.exists() for value in torch.load(path).values()]
    return {"codes": codes, "screens": screens, "weights": weights}


def table(result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    cuts = result["cuts"]
    counts = {
        "went on": sum(one["continued"] for one in cuts),
        "ended, and continued when started again": sum(not one["continued"] and not one["is_lost"] for one in cuts),
        "lost something": sum(one["is_lost"] for one in cuts),
    }
    return rows(("outcome", "runs"), [(name, str(count)) for name, count in counts.items()])
