"""Two machines (network namespaces): what the sizes of buckets cost on a fast link, and how much of an exchange `ddp` hides.

One CPU rank of one thread on each machine, 6.3 million parameters. Arms take turns in blocks of steps, each a session of the same
processes: `tuned` (bucket sizes from the measured link), `fixed` (1 MiB first, 25 MiB others, as without a measurement),
`silent` (large sums are left out: what the computation takes), `local` (islands that synchronise every 20 steps; the mean of 20)
and torch's DistributedDataParallel. A round has one block of each.

With C of `silent`, E = bytes / bandwidth and T of `tuned`, at 1 Gbit/s the part of what can be hidden is (C + E - T) / min(C, E):
1 if a step takes max(C, E).

Bars: on a link without a limit `tuned` reaches 0.995 of the speed of `fixed`; at 1 Gbit/s 0.8 is hidden, and a step takes at most
1 % longer than with DistributedDataParallel, also with `local` (lower ends of the intervals in brackets).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import rows
from evenload.records.measurement import bootstrap
from evenload.testing import hosts

ARMS = ("tuned", "fixed", "silent", "local", "ddp")
LINKS = {"no limit": None, "1 Gbit/s": 1000.0}
WIDTH, NUM_LAYERS = 1024, 6
_SCRIPT = """
import json, statistics, sys, time, torch, evenload
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from evenload.training.comm.groups import Groups
from evenload.training.comm.pending import Pending
from evenload.training.parallel.ddp import ReplicaStrategy

rounds, num_steps, width, layers, batch = map(int, sys.argv[1:])
sum_async, bucket_sizes = Groups.sum_async, ReplicaStrategy._bucket_sizes
seconds = {name: [] for name in ("tuned", "fixed", "silent", "local", "ddp")}


def silent(self, tensor, **options):
    return sum_async(self, tensor, **options) if tensor.numel() < 10_000 else Pending(None, blocking=False)


def block(name, number):
    Groups.sum_async = silent if name == "silent" else sum_async
    ReplicaStrategy._bucket_sizes = (lambda self: None) if name == "fixed" else bucket_sizes
    torch.manual_seed(0)
    steps = 22 if name == "local" else num_steps
    data = TensorDataset(torch.randn(batch * steps, width), torch.randn(batch * steps, width))
    setting = {"strategy": "local", "sync_every": 20} if name == "local" else {}
    run = evenload.init(project_dir=f"runs/{name}-{number}", check_every="off", balance="even", **setting)
    torch.set_num_threads(1)  # each machine believes that it has all cores
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
    times = []
    if name == "ddp":
        run.prepare(nn.Linear(1, 1))  # nothing else of this run is used
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        own = slice(run.rank * batch // 2, (run.rank + 1) * batch // 2)
        for x, y in DataLoader(data, batch_size=batch):
            began_s = time.perf_counter()
            nn.functional.mse_loss(model(x[own]), y[own]).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began_s)
    else:
        model, loader = run.prepare(model, DataLoader(data, batch_size=batch))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in loader:
            began_s = time.perf_counter()
            step.backward(lambda part: nn.functional.mse_loss(model(part[0]), part[1]))
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began_s)
    slowest = torch.tensor(times[2:])
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
    run.close()
    # The step of a synchronisation counts with the others.
    return (statistics.mean if name == "local" else statistics.median)(slowest.tolist())


for number in range(rounds):
    for name in list(seconds)[:: -1 if number % 2 else 1]:
        seconds[name].append(block(name, number))
        if name == "ddp":
            print(number, {arm: times[-1:] for arm, times in seconds.items()}, flush=True)
json.dump(seconds, open("seconds.json", "w"))
"""


def measure(quick: bool = False, only: str = "") -> dict[str, Any]:
    """`only`: some of the names in `LINKS`, with commas."""
    if reason := hosts.why_not():
        return {"skipped": reason}
    width = 256 if quick else WIDTH
    size = (1, 6, width, NUM_LAYERS, 64) if quick else (10, 10, width, NUM_LAYERS, 1024)
    num_bytes = 4 * NUM_LAYERS * (width**2 + width)
    links: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="evenload-bench-") as folder:
        for name, mbit in LINKS.items():
            if not only or name in only.split(","):
                links[name] = _evaluate(_train(Path(folder, name), mbit, size), num_bytes, mbit)
    return {"links": links, "gradient_bytes": num_bytes, "bars": _bars(links)}


def _evaluate(seconds: dict[str, list[float]], num_bytes: int, mbit: float | None) -> dict[str, Any]:
    def ratio(above: str, below: str) -> list[float]:
        found = bootstrap([a / b for a, b in zip(seconds[above], seconds[below], strict=True)])
        return [found.value, found.low, found.high]

    result: dict[str, Any] = {
        "step_s": {arm: bootstrap(times).value for arm, times in seconds.items()},
        "tuned_to_fixed": ratio("fixed", "tuned"),
        "tuned_to_ddp": ratio("ddp", "tuned"),
        "local_to_ddp": ratio("ddp", "local"),
    }
    if mbit is not None:
        exchange_s = num_bytes / (mbit * 1e6 / 8)  # two machines: each sends all gradients once
        for arm in ("tuned", "ddp"):
            hidden = bootstrap(
                [
                    (c + exchange_s - t) / min(c, exchange_s)
                    for c, t in zip(seconds["silent"], seconds[arm], strict=True)
                ]
            )
            result[f"{arm}_hidden"] = [hidden.value, hidden.low, hidden.high]
        result["exchange_s"] = exchange_s
    return result


def _bars(links: dict[str, Any]) -> dict[str, bool]:
    bars: dict[str, bool] = {}
    if fast := links.get("no limit"):
        value, low, _ = fast["tuned_to_fixed"]
        bars[f"no limit: tuned buckets reach {value:.3f} ({low:.3f}) of fixed ones (0.995)"] = value >= 0.995
    if slow := links.get("1 Gbit/s"):
        value, low, _ = slow["tuned_hidden"]
        bars[f"1 Gbit/s: {value:.2f} ({low:.2f}) of what can be hidden is hidden (0.8)"] = value >= 0.8
        for arm in ("tuned", "local"):
            value, low, _ = slow[f"{arm}_to_ddp"]
            bars[f"1 Gbit/s: {arm} has {value:.3f} ({low:.3f}) of DistributedDataParallel's speed (0.99)"] = (
                value >= 0.99
            )
    return bars


def _train(folder: Path, mbit: float | None, size: tuple[int, ...]) -> dict[str, list[float]]:
    with hosts.machines(2, mbit) as boxes:
        processes = []
        for box in boxes:
            own = folder / box.name
            own.mkdir(parents=True)
            (own / "train.py").write_text(_SCRIPT)
            command = [sys.executable, "-m", "evenload.cli.main", "run", "-d", "cpu", "--nodes", "2", "--host", "box1"]
            with (own / "screen").open("w") as screen:
                processes.append(
                    box.popen([*command, "train.py", *map(str, size)], cwd=own, stdout=screen, stderr=subprocess.STDOUT)
                )
        try:
            codes = [process.wait(1200) for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(codes):
        raise RuntimeError((folder / "box1" / "screen").read_text()[-2000:])
    found: dict[str, list[float]] = json.loads((folder / "box1" / "seconds.json").read_text())
    return found


def table(result: dict[str, Any]) -> str:
    """One row for each link and arm."""
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    lines = []
    for name, link in result["links"].items():
        for arm, step_s in link["step_s"].items():
            hidden = link.get(f"{arm}_hidden")
            lines.append((name, arm, f"{step_s * 1e3:.1f} ms", "" if hidden is None else f"{hidden[0]:.0%}"))
    return rows(("link", "arm", "step", "hidden"), lines)
