"""Cost of a device that is 100 times slower than the best one, and is left out.

Method: two CPU ranks, each on a core of its own, an MLP with 7.4 MB of gradients and batches of 64, 256 and 1,024 samples. Rank 1
computes 100 times as long as rank 0 for the same samples, by burning CPU time in loss_fn. Epochs of Evenload alternate with
equally many steps of a plain loop (its own copy of the model, the same data) on rank 0 alone, in the same processes. The ratio
is the plain loop's seconds over Evenload's, by round and over all rounds after the first two, in which the speeds are measured;
trials of rank 1 are in it.

Bar: at least 0.98 over all rounds, for each batch size.
"""

from __future__ import annotations

import copy
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from benchmarks.report import rows
from evenload.records.measurement import bootstrap
from evenload.testing import run_ranks

SLOWER, WARMUP_ROUNDS = 100, 2
EPOCH_STEPS = {64: 100, 256: 40, 1024: 20}
"""Steps of an epoch by global batch."""


def measure(quick: bool) -> dict[str, Any]:
    """Both loops, by turns, for each batch size."""
    cases, bars = {}, {}
    for batch in [64] if quick else EPOCH_STEPS:
        with tempfile.TemporaryDirectory(prefix="evenload-bench-") as folder:
            found = run_ranks(_train, 2, folder, batch, 3 if quick else 26, timeout_s=600)[0]
        usual = found["rounds"][WARMUP_ROUNDS:]
        ratio = bootstrap([plain / ours for ours, plain in usual])
        overall = sum(plain for _, plain in usual) / sum(ours for ours, _ in usual)
        cases[str(batch)] = {**found, "ratio": vars(ratio), "overall": overall}
        if not quick:
            bars[f"batch {batch}: over all rounds >= 0.98"] = overall >= 0.98
    return {"cases": cases, "bars": bars}


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines: list[list[object]] = []
    for batch, case in result["cases"].items():
        ratio, num_steps = case["ratio"], EPOCH_STEPS[int(batch)]
        ours_ms, plain_ms = (median(seconds) / num_steps * 1e3 for seconds in zip(*case["rounds"], strict=True))
        lines.append(
            [
                *(batch, len(case["rounds"]) - WARMUP_ROUNDS, f"{plain_ms:.2f} ms", f"{ours_ms:.2f} ms"),
                f"{ratio['value']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})",
                f"{case['overall']:.4f}",
                f"{case['num_with_rank_1']} of {case['num_steps']}",
            ]
        )
    header = ["batch", "rounds", "step of the plain loop", "Evenload's", "plain/Evenload, median", "over all rounds"]
    return rows([*header, "steps with rank 1"], lines)


def _train(folder: str, batch_size: int, num_rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    run = evenload.init(project_dir=folder, seed=0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[run.rank % len(cores)]})
    sizes = (784, 1024, 1024, 10)
    layers = [layer for n, m in itertools.pairwise(sizes) for layer in (nn.Linear(n, m), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    plain_model = copy.deepcopy(model)
    num_samples = batch_size * EPOCH_STEPS[batch_size]
    data = TensorDataset(torch.randn(num_samples, sizes[0]), torch.randint(0, 10, (num_samples,)))
    model, loader = run.prepare(model, DataLoader(data, batch_size=batch_size, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plain_optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.01, momentum=0.9)
    run.resume(model=model, optimizer=optimizer)
    plain_loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    rounds, num_with_rank_1 = [], 0

    def loss_fn(batch: Any) -> torch.Tensor:
        began_s = time.thread_time()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if run.rank == 1:
            # The backward takes about twice as long as the forward.
            _burn(3 * SLOWER * (time.thread_time() - began_s))
        return loss

    for _ in range(num_rounds):
        began_s = time.perf_counter()
        for step in loader:
            step.backward(loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            num_with_rank_1 += step.shares[1] > 0
        ours_s = time.perf_counter() - began_s
        rounds.append((ours_s, _plain_epoch(plain_model, plain_optimizer, plain_loader) if run.is_main else 0.0))
        run.any(False)
    run.close()
    return {"rounds": rounds, "num_with_rank_1": num_with_rank_1, "num_steps": num_rounds * EPOCH_STEPS[batch_size]}


def _plain_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> float:
    began_s = time.perf_counter()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - began_s


def _burn(seconds: float, clock: Callable[[], float] = time.thread_time) -> None:
    end_s = clock() + seconds
    while clock() < end_s:
        pass
