"""The bound of strategy async in ten thousand updates, counted from what workers receive and send.

Three workers of one host and the server; each worker stalls at random, for 5 to 100 times as long as a part takes. The model
counts: the gradient of its first parameter is -1 and its learning rate 1, so that its value is the number of updates, on the
server and in the parameters that a worker receives. The gradient of its second parameter is the first as the worker found it,
that of its third the number of the part. So the staleness of an update is the first parameter on the server minus the gradient
of the second: neither the server's own counters nor the versions in its messages take part. The server's counter is compared.

`--only 0,1`: some of the seeds, each of 2,500 updates; `--keep FOLDER` keeps what each seed finds, and takes it from there.

Bar: no update is older than the bound of 4 in 10,000, and each part is applied once.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from benchmarks.report import kept, rows
from evenload.testing import run_ranks

NUM_RANKS, BOUND, NUM_SEEDS, NUM_EPOCHS, NUM_PARTS = 4, 4, 4, 5, 500
STALL_EVERY, STALL_S = 20, (0.01, 0.2)
"""One of so many parts stalls, for a time between these."""


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.updates, self.seen, self.part = (nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(3))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return losses of parts, shape ``(n,)``, whose gradients count."""
        return self.seen * self.updates.detach() + self.part * numbers - self.updates


def count(folder: str, seed: int, num_epochs: int, num_parts: int, bound: int = BOUND) -> dict[str, Any]:
    """Train on this rank; return the updates by staleness, and the numbers of the parts by epoch, as the server found them."""
    run = evenload.init(project_dir=folder, strategy="async", staleness=bound)
    draw = random.Random(1000 * seed + run.rank)
    data = TensorDataset(torch.arange(num_parts, dtype=torch.float64))
    model, loader = run.prepare(Counting(), DataLoader(data, batch_size=1))
    optimizer = torch.optim.SGD([model.updates], lr=1.0)
    found: Counter[int] = Counter()
    parts: list[list[int]] = []

    def loss_fn(batch: list[torch.Tensor]) -> torch.Tensor:
        if draw.randrange(STALL_EVERY) == 0:
            time.sleep(draw.uniform(*STALL_S))
        return model(batch[0]).mean()

    for _ in range(num_epochs):
        parts.append([])
        for step in loader:
            step.backward(loss_fn)
            if run.is_main and model.seen.grad is not None and model.part.grad is not None:
                found[round(float(model.updates.detach() - model.seen.grad))] += 1
                parts[-1].append(round(float(model.part.grad)))
            optimizer.step()
            model.zero_grad()
    server = getattr(run._context.engine.strategy, "server", None)
    run.close()
    return {
        "updates_by_staleness": {str(age): found[age] for age in sorted(found)},
        "repeated_or_lost": sum(sorted(epoch) != list(range(num_parts)) for epoch in parts)
        if server is not None
        else 0,
        "by_the_server": server.max_staleness if server is not None else 0,
    }


def _run(seed: int, size: tuple[int, int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="evenload-bench-") as folder:
        began_s = time.monotonic()
        found = run_ranks(count, NUM_RANKS, folder, seed, *size, timeout_s=600.0)[0]
    return {"seed": seed, "seconds": time.monotonic() - began_s, **found}


def measure(quick: bool = False, only: str = "", keep: str = "") -> dict[str, Any]:
    """Counts in one run for each seed."""
    seeds = [int(seed) for seed in only.split(",")] if only else range(1 if quick else NUM_SEEDS)
    size = (1, 50) if quick else (NUM_EPOCHS, NUM_PARTS)
    runs = []
    for seed in seeds:
        runs.append(kept("" if quick else keep, f"staleness-{seed}", partial(_run, seed, size)))
    ages = sum((Counter(one["updates_by_staleness"]) for one in runs), Counter())
    oldest, updates = max(map(int, ages)), sum(ages.values())
    bad = sum(one["repeated_or_lost"] for one in runs)
    same = all(one["by_the_server"] == max(map(int, one["updates_by_staleness"])) for one in runs)
    return {
        "updates": updates,
        "updates_by_staleness": dict(ages),
        "runs": runs,
        "bars": {
            f"{updates} updates, none older than {oldest} ({BOUND})": updates == len(runs) * size[0] * size[1]
            and oldest <= BOUND,
            f"{bad} epochs in which a part was lost or applied twice (0)": bad == 0,
            "the server counted the same": same,
        },
    }


def table(result: dict[str, Any]) -> str:
    """Updates by their staleness."""
    return rows(["staleness", "updates"], [[age, n] for age, n in sorted(result["updates_by_staleness"].items())])
