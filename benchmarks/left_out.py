"""Cost of a device that is 100 times slower than the best one, and is left out.

Method: an MLP with 7.4 MB of gradients and batches of 64, 256 and 1,024 samples. Three arms take turns, an epoch each, on one
core:

- left out: rank 0 of two CPU ranks. Rank 1, on a core of its own, computes 100 times as long for the same samples, by burning CPU
  time in loss_fn.
- alone: the same script on one CPU rank, the best device's own speed. Its process sleeps while the two ranks train.
- plain: a plain loop (its own copy of the model, the same data) in the process of rank 0.

All over the rounds after the first two, in which the speeds are measured; trials of rank 1 are in it. The cost of the rank that
is left out is that of `left out` beside `alone`; what Evenload's own steps cost (benchmarks small_steps) is in both, and shows
beside `plain`.

Bar: seconds of `alone` over those of `left out` at least 0.98 over all rounds, for each batch size.
"""

from __future__ import annotations

import copy
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
LEFT_OUT, ALONE, PLAIN = ARMS = "left out", "alone", "plain"
_LIMIT_S = 600


def measure(quick: bool) -> dict[str, Any]:
    """All arms, by turns, for each batch size."""
    cases, bars = {}, {}
    for batch in [64] if quick else EPOCH_STEPS:
        with tempfile.TemporaryDirectory(prefix="evenload-bench-") as folder, ThreadPoolExecutor(1) as pool:
            num_rounds = 3 if quick else 26
            of_alone = pool.submit(run_ranks, _train, 1, folder, "one", batch, num_rounds, timeout_s=_LIMIT_S)
            found = run_ranks(_train, 2, folder, "two", batch, num_rounds, timeout_s=_LIMIT_S)[0]
            found["seconds"] |= of_alone.result()[0]["seconds"]
        usual = {arm: found["seconds"][arm][WARMUP_ROUNDS:] for arm in ARMS}
        cases[str(batch)] = {
            **found,
            "ratio": {arm: _ratio(usual[arm], usual[LEFT_OUT]) for arm in (ALONE, PLAIN)},
            "overall": {arm: sum(usual[arm]) / sum(usual[LEFT_OUT]) for arm in (ALONE, PLAIN)},
        }
        if not quick:
            bars[f"batch {batch}: alone/left out over all rounds >= 0.98"] = cases[str(batch)]["overall"][ALONE] >= 0.98
    return {"cases": cases, "bars": bars}


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines: list[list[object]] = []
    for batch, case in result["cases"].items():
        ratio, overall = case["ratio"][ALONE], case["overall"]
        step_ms = {arm: median(case["seconds"][arm][WARMUP_ROUNDS:]) / EPOCH_STEPS[int(batch)] * 1e3 for arm in ARMS}
        lines.append(
            [
                *(batch, len(case["seconds"][ALONE]) - WARMUP_ROUNDS),
                *(f"{step_ms[arm]:.2f} ms" for arm in (PLAIN, ALONE, LEFT_OUT)),
                f"{ratio['value']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})",
                *(f"{overall[arm]:.4f}" for arm in (ALONE, PLAIN)),
                f"{case['num_with_rank_1']} of {case['num_steps']}",
            ]
        )
    header = [
        "batch",
        "rounds",
        "step of the plain loop",
        "alone",
        "left out",
        "alone/left out, median",
        "over all rounds",
    ]
    return rows([*header, "plain/left out", "steps with rank 1"], lines)


def _ratio(ones: list[float], others: list[float]) -> dict[str, float]:
    return vars(bootstrap([one / other for one, other in zip(ones, others, strict=True)]))


def _train(folder: str, name: str, batch_size: int, num_rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    run = evenload.init(project_dir=Path(folder, name), seed=0)
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
    num_with_rank_1 = 0

    def loss_fn(batch: Any) -> torch.Tensor:
        began_s = time.thread_time()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if run.rank == 1:
            # The backward takes about twice as long as the forward.
            _burn(3 * SLOWER * (time.thread_time() - began_s))
        return loss

    def epoch() -> None:
        nonlocal num_with_rank_1
        for step in loader:
            step.backward(loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            num_with_rank_1 += any(step.shares[1:])

    arms: dict[str, Callable[[], None]] = {ALONE: epoch}
    if run.world_size == 2:
        arms = {LEFT_OUT: epoch, PLAIN: lambda: _plain_epoch(plain_model, plain_optimizer, plain_loader)}
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    if run.rank == 1:
        for _ in range(num_rounds):
            run.any(False)  # rank 0 waits for its turn
            epoch()
    for arm in _turns(Path(folder), num_rounds, arms) if run.is_main else ():
        if arm == LEFT_OUT:
            run.any(False)
        began_s = time.perf_counter()
        arms[arm]()
        seconds[arm].append(time.perf_counter() - began_s)
    run.close()
    return {"seconds": seconds, "num_with_rank_1": num_with_rank_1, "num_steps": num_rounds * EPOCH_STEPS[batch_size]}


def _turns(folder: Path, num_rounds: int, own: Collection[str]) -> Iterator[str]:
    """Yield this process's arms, each when the one before it has ended, in this process or another."""
    order = [(number, ARMS[(number + place) % len(ARMS)]) for number in range(num_rounds) for place in range(len(ARMS))]
    before: Path | None = None
    for number, arm in order:
        if arm in own:
            deadline_s = time.monotonic() + _LIMIT_S
            while before is not None and not before.exists():
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{before.name} has not ended in {_LIMIT_S} s")
                time.sleep(0.002)
            yield arm
            (folder / f"{number} {arm}").touch()
        before = folder / f"{number} {arm}"


def _plain_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> None:
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _burn(seconds: float, clock: Callable[[], float] = time.thread_time) -> None:
    end_s = clock() + seconds
    while clock() < end_s:
        pass
