"""Two machines (network namespaces): what the sizes of buckets cost on a fast link, and how much of an exchange `ddp` hides.

One CPU rank of one thread on each machine, 6.3 million parameters in six layers. Arms take turns in blocks of steps, each a
session of the same processes: `tuned` (bucket sizes from the measured link), `fixed` (1 MiB first, 25 MiB others, as without a
measurement), `silent` (large sums are left out: what the computation takes), `local` (islands that synchronise every 20 steps;
the mean of 20) and torch's DistributedDataParallel. A round has one block of each.

With C of `silent`, E = bytes / bandwidth and T of `tuned`, at 1 Gbit/s the part of what can be hidden is (C + E - T) / min(C, E):
1 if a step takes max(C, E). C is about 2 E. The order of gradients allows less than 1 (`allowed`): the first one comes after the
forward and a layer's backward, and the last one, a sixth of the bytes, travels when nothing is left to compute.

Here the processes, and the kernel that plays both machines' network, share two cores: what an exchange computes (gloo, TCP and
the shaping of the link: about 40 ms for 25 MB on each rank) takes time from the layers, and hides nothing. On a GPU the layers
need no core. `1 Gbit/s, device` shows that: its layers sleep as long as they would compute, so it is not a speed of training, but
what the engine hides.

Bars: on a link without a limit `tuned` reaches 0.995 of the speed of `fixed`; at 1 Gbit/s 0.8 is hidden in both rows, and a step
takes at most 1 % longer than with DistributedDataParallel, also with `local` (lower ends of the intervals in brackets).
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
LINKS = {"no limit": (None, 0), "1 Gbit/s": (1000.0, 0), "1 Gbit/s, device": (1000.0, 66)}
"""Mbit/s, and the milliseconds for which each layer sleeps; 0: it computes."""
WIDTH, NUM_LAYERS = 1024, 6
_SCRIPT = """
import json, statistics, sys, time, torch, evenload
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from evenload.training.comm.groups import Groups
from evenload.training.comm.pending import Pending
from evenload.training.parallel.ddp import ReplicaStrategy

rounds, num_steps, width, layers, batch, layer_ms = map(int, sys.argv[1:])
sum_async, bucket_sizes = Groups.sum_async, ReplicaStrategy._bucket_sizes
seconds = {name: [] for name in ("tuned", "fixed", "silent", "local", "ddp")}


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, gradients):
        ctx.gradients = gradients
        time.sleep(layer_ms / 3e3)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * layer_ms / 3e3)
        return gradient, *ctx.gradients, None


class Layer(nn.Linear):
    # Takes its time, and gives gradients, without computing.
    def __init__(self):
        super().__init__(width, width)
        self.gradients = [torch.full_like(p, 1e-3) for p in self.parameters()]

    def forward(self, x):
        return Sleep.apply(x, self.weight, self.bias, self.gradients)


def make_model():
    make = Layer if layer_ms else lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*(make() for _ in range(layers)))


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
    model = make_model()
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
    """`only`: some of the names in `LINKS`, with semicolons; a name and a number, such as `no limit*2`: so many rounds."""
    if reason := hosts.why_not():
        return {"skipped": reason}
    width = 256 if quick else WIDTH
    chosen = dict(one.partition("*")[::2] for one in only.split(";")) if only else dict.fromkeys(LINKS, "")
    num_bytes = 4 * NUM_LAYERS * (width**2 + width)
    links: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="evenload-bench-") as folder:
        for name, rounds in chosen.items():
            mbit, layer_ms = LINKS[name]
            batch = 64 if quick or layer_ms else 1024 if mbit is None else 2048
            size = (1, 6, width, NUM_LAYERS, batch, layer_ms // 6 if quick else layer_ms)
            if not quick:
                size = (int(rounds or 10), 10, *size[2:])
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
        compute_s = bootstrap(seconds["silent"]).value
        # The last layer gives its gradient after the forward, a third of the time, and its part of the backward.
        possible_s = max(
            compute_s + exchange_s / NUM_LAYERS, compute_s / 3 + 2 / 3 * compute_s / NUM_LAYERS + exchange_s
        )
        result["allowed"] = (compute_s + exchange_s - possible_s) / min(compute_s, exchange_s)
        result["exchange_s"] = exchange_s
    return result


def _bars(links: dict[str, Any]) -> dict[str, bool]:
    bars: dict[str, bool] = {}
    if fast := links.get("no limit"):
        value, low, _ = fast["tuned_to_fixed"]
        bars[f"no limit: tuned buckets reach {value:.3f} ({low:.3f}) of fixed ones (0.995)"] = value >= 0.995
    for name, found in links.items():
        if name != "no limit":
            value, low, _ = found["tuned_hidden"]
            bars[f"{name}: {value:.2f} ({low:.2f}) of what can be hidden is hidden (0.8)"] = value >= 0.8
    if slow := links.get("1 Gbit/s"):
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
            part = "" if hidden is None else f"{hidden[0]:.0%} of {link['allowed']:.0%}"
            lines.append((name, arm, f"{step_s * 1e3:.1f} ms", part))
    return rows(("link", "arm", "step", "hidden, of what the order of gradients allows"), lines)
