"""Whether `num_workers="auto"` finds a number of loader workers that is as good as the best of a sweep.

Method: two CPU ranks train a perceptron on a dataset whose samples are slow to read: far away (each waits 2 ms, as on a
network; workers help as long as there are enough), computed (each takes 1 ms of a core, which the ranks need themselves), or
near (TensorDataset; workers only cost). Each rank's loader has 0, 1, 2 or 4 workers, or auto. Sweeps go round: each round
runs all of them one after the other, in an order that turns. Compared are samples/s after the first `SETTLE` steps, in
which auto searches; the settings it ends with and the step it ended at are given beside it. Ratios are medians over rounds.

Bar: in each case auto within 5 % of the best of the sweep.
"""

from __future__ import annotations

import tempfile
import time
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evenload
from benchmarks.report import rows
from evenload.testing import run_ranks

SIZES = (0, 1, 2, 4)
SETTLE = 100
STEPS = 200
BATCH_SIZE = 48
CASES = ("far away", "computed", "near")


def measure(quick: bool) -> dict[str, Any]:
    """All cases."""
    cases = {}
    for case in CASES[:1] if quick else CASES:
        arms: dict[str, list[dict[str, Any]]] = {str(arm): [] for arm in (*SIZES, "auto")}
        for index in range(1 if quick else 3):
            order = list(arms)[index % len(arms) :] + list(arms)[: index % len(arms)]
            for arm in ("0", "auto") if quick else order:
                with tempfile.TemporaryDirectory(prefix="evenload-bench-") as folder:
                    steps = (10, 20) if quick else (SETTLE, STEPS)
                    arms[arm].append(run_ranks(_train, 2, f"{folder}/run", case, arm, *steps, timeout_s=600.0)[0])
        cases[case] = _judge({arm: found for arm, found in arms.items() if found})
    bars = {
        f"{case}: auto / best of the sweep >= 0.95": found["auto_over_best"] >= 0.95 for case, found in cases.items()
    }
    return {"cases": cases, "bars": bars}


def _judge(arms: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    speeds = {arm: median(one["per_s"] for one in found) for arm, found in arms.items()}
    best = max((arm for arm in speeds if arm != "auto"), key=lambda arm: speeds[arm])
    ratios = [auto["per_s"] / one["per_s"] for auto, one in zip(arms["auto"], arms[best], strict=True)]
    return {
        "samples_per_s": speeds,
        "best": best,
        "auto_over_best": median(ratios),
        "chosen": [one["workers"] for one in arms["auto"]],
        "chosen_at_step": [one["chosen_at"] for one in arms["auto"]],
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [
        [
            case,
            *(f"{speed:.0f}" for speed in found["samples_per_s"].values()),
            found["best"],
            f"{found['auto_over_best']:.3f}",
            f"{found['chosen']} at step {found['chosen_at_step']}",
        ]
        for case, found in result["cases"].items()
    ]
    arms = next(iter(result["cases"].values()))["samples_per_s"]
    return rows(["samples/s with workers:", *arms, "best", "auto/best", "auto chose (by rank)"], lines)


class _Slow(Dataset[Any]):
    """Samples that take their time."""

    def __init__(self, case: str, num_samples: int) -> None:
        self._far = case == "far away"
        self._num_samples = num_samples
        self._matrix = torch.full((64, 64), 1 / 64)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        if self._far:
            time.sleep(0.002)
        else:
            until_s = time.thread_time() + 0.001
            while time.thread_time() < until_s:
                self._matrix @ self._matrix
        return torch.full((256,), index / self._num_samples), torch.ones(1)


def _train(folder: str, case: str, workers: str, settle: int, steps: int) -> dict[str, Any]:
    """Samples/s of the global batch after `settle` steps."""
    run = evenload.init(
        project_dir=folder,
        seed=0,
        balance="even",
        num_workers="auto" if workers == "auto" else "loader",
        check_every="off",
    )
    num_samples = (steps + 1) * BATCH_SIZE
    data: Any = _Slow(case, num_samples)
    if case == "near":
        data = TensorDataset(torch.zeros(num_samples, 256), torch.ones(num_samples, 1))
    model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1))
    model, loader = run.prepare(
        model, DataLoader(data, batch_size=BATCH_SIZE, num_workers=0 if workers == "auto" else int(workers))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began_s, chosen_at = 0.0, None
    for step in loader:
        if step.index == settle:
            run.any(False)
            began_s = time.perf_counter()
        step.backward(lambda batch: functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
        if chosen_at is None and step.batch.reading.how.name == "CHOSEN":
            chosen_at = step.index
        if step.index == steps - 1:
            break
    seconds = time.perf_counter() - began_s
    reading = step.batch.reading
    everyone = [run.reduce(float(reading.num_workers) if run.rank == rank else 0.0) for rank in range(run.world_size)]
    run.close()
    return {
        "per_s": (steps - settle) * BATCH_SIZE / seconds,
        "workers": [int(value) for value in everyone],
        "chosen_at": chosen_at,
    }
