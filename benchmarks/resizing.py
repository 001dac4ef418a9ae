"""An elastic job of a real queue that grows and shrinks without a stop, 50 times.

Method: a queue with two slots of one core each, with its default settings, runs an elastic training run on one slot or both.
Short jobs come one after the other: each takes a slot for half a second, and the run grows again afterwards. A sample takes 2
ms (a wait, so that little is computed), the rest is a small network in float64 with AdamW. The cost of a change is what the
longest step near it took beyond a usual step on one rank: the others wait in it for the change and for the transfer of the
state. Beside it: the seconds from the queue's request until all ranks ran on the new devices, in which new ranks start while
the others train.

Bars: 50 changes, none by a stop and a start; each costs at most 3 s; weights within 1e-9 of one undisturbed process, and each
step done once.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.report import rows
from evenload.records.reader import read_events, read_steps
from evenload.scheduler import paths
from evenload.scheduler.client import Client, connect
from evenload.scheduler.core import events
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.reader import Reader

_LIMIT_S = 3.0
_PATIENT_S = 120.0
_SCRIPT = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenload

last = int(sys.argv[1])
run = evenload.init(project_dir="run", seed=0)
torch.manual_seed(1)
rows = torch.randn(512, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)).double()
loader = DataLoader(TensorDataset(rows), batch_size=32, shuffle=True)
model, loader = run.prepare(model, loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run.resume(model=model, optimizer=optimizer)

def loss_fn(batch):
    if not last:
        time.sleep(0.002 * len(batch[0]))
    return (model(batch[0]) - batch[0]).square().mean()

is_over = False
for epoch in range(loader.epoch, 100_000):
    for step in loader:
        step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        if run.is_main and not last:
            with open("steps", "a") as file:
                file.write(f"{step.index}\\n")
        is_over = step.index + 1 == last if last else run.any(os.path.exists("finish"))
        if is_over:
            break
    if is_over:
        break
if run.is_main:
    torch.save(nn.utils.parameters_to_vector(model.parameters()).detach(), "weights.pt")
"""


def measure(quick: bool) -> dict[str, Any]:
    num = 4 if quick else 50
    folder = Path(tempfile.mkdtemp(prefix="evenload-resizing-"))
    paths.make_private(folder / "queue")
    (folder / "queue" / paths.SETTINGS_FILE).write_text("[cpu]\nslots = 2\n")
    try:
        result = _resize(folder, num)
    finally:
        with connect(folder / "queue", start=False) as client:
            if left := [job["id"] for job in client.call("list")["jobs"]]:
                client.call("cancel", jobs=left, now=True)
            client.call("stop")
        shutil.rmtree(folder, ignore_errors=True)
    bars = {
        f"{num} changes, none by a stop": result["num_changes"] >= num and not result["num_stops"],
        f"each costs at most {_LIMIT_S:g} s": max(result["costs_s"]) <= _LIMIT_S,
        "weights within 1e-9, each step once": result["difference"] <= 1e-9 and result["each_step_once"],
        "the queue's tables follow from its log": not result["audit"],
    }
    return {**result, "bars": {} if quick else bars}


def _resize(folder: Path, num: int) -> dict[str, Any]:
    queue, home = folder / "queue", folder / "job"
    home.mkdir()
    (home / "train.py").write_text(_SCRIPT)
    path = job_path()
    with connect(queue, start=True) as client:
        needs = {"needs": {"min_devices": 1, "max_devices": 2}}
        job = submit(client, home, path, ["evenload", "run", "train.py", "0"], needs)
        wait(lambda: client.call("job", job=job)["spec"].get("resize_s") is not None, queue, job)
        for num_changes in range(2, num + 1, 2):
            submit(client, home, path, ["sleep", "0.5"], {"estimate_s": 1.0})
            wait(partial(_has_changed, queue, job, num_changes), queue, job)
        (home / "finish").touch()
        wait(lambda: client.call("job", job=job)["job"]["state"] == "SUCCEEDED", queue, job)
    steps = [int(line) for line in (home / "steps").read_text().split()]
    changes = entries(queue, job, events.Resized)
    alone = folder / "alone"
    alone.mkdir()
    (alone / "train.py").write_text(_SCRIPT)
    code = os.spawnve(os.P_WAIT, "/bin/sh", ["sh", "-c", f"cd {alone} && exec {sys.executable} train.py {len(steps)} >log 2>&1"],
                      {**os.environ})  # fmt: skip
    if code:
        raise RuntimeError((alone / "log").read_text()[-3000:])
    one, other = (torch.load(each / "weights.pt", weights_only=True) for each in (alone, home))
    stops = [*entries(queue, job, events.Yielded), *entries(queue, job, events.ResizeRefused)]
    return {
        "num_changes": len(changes),
        "num_stops": len(stops),
        "costs_s": _costs_s(home / "run"),
        "grow_s": [change.seconds for change in changes if len(change.devices) == 2],
        "shrink_s": [change.seconds for change in changes if len(change.devices) == 1],
        "num_steps": len(steps),
        "each_step_once": steps == list(range(len(steps))),
        "difference": float((one - other).norm() / one.norm()),
        "audit": audit(queue),
    }


def job_path() -> str:
    """Return the PATH of a job that finds this Evenload."""
    return f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"


def submit(client: Client, home: Path, path: str, command: list[str], spec: dict[str, Any]) -> str:
    """Submit a command that runs in `home`; return its id."""
    program = {"command": command, "folder": str(home), "grace_s": 30.0, "environment": {"PATH": path}}
    return str(client.call("submit", spec=spec, program=program)["job"])


def entries(queue: Path, job: str, kind: type[Any]) -> list[Any]:
    with Reader(queue) as reader:
        return [logged.entry for logged in reader.log(job=job) if isinstance(logged.entry, kind)]


def _has_changed(queue: Path, job: str, num_times: int) -> bool:
    return len(entries(queue, job, events.Resized)) >= num_times


def wait(condition: Callable[[], bool], queue: Path, job: str, patient_s: float = _PATIENT_S) -> None:
    until_s = time.monotonic() + patient_s
    while not condition():
        if time.monotonic() > until_s:
            raise RuntimeError(
                f"nothing for {patient_s:g} s; the job printed {paths.log_path(queue, job).read_text()[-3000:]}"
            )
        time.sleep(0.05)


def _costs_s(run: Path) -> list[float]:
    """Return what the longest step near each change took beyond a usual one."""
    ended_s = sorted(record.time for record in read_steps(run))
    took_s = [(later, later - earlier) for earlier, later in pairwise(ended_s)]
    usual_s = median(sorted(seconds for _, seconds in took_s)[-len(took_s) // 2 :])
    changes_s = [event.time for event in read_events(run) if event.kind == "rebuilt"]
    return [
        max((seconds for at_s, seconds in took_s if at_s - seconds - 1.0 < change_s < at_s + 1.0), default=0.0)
        - usual_s
        for change_s in changes_s
    ]


def table(result: dict[str, Any]) -> str:
    lines = [
        [name, len(seconds), f"{median(seconds):.2f} s", f"{max(seconds):.2f} s"]
        for name, seconds in (
            ("cost of a change", result["costs_s"]),
            ("request to effect, grow", result["grow_s"]),
            ("request to effect, shrink", result["shrink_s"]),
        )
    ]
    return "\n".join(
        [
            rows(["", "times", "median", "max"], lines),
            f"{result['num_changes']} changes, {result['num_stops']} by a stop; {result['num_steps']} steps; weights differ by "
            f"{result['difference']:.1e}",
        ]
    )
