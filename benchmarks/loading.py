"""Whether `num_workers="auto"` finds a number of loader workers that is as good as the best of a sweep.

Method: two CPU ranks train a perceptron on a dataset whose samples are slow to read: far away (each waits 2 ms, as on a
network; workers help as long as there are enough), computed (each takes 1 ms of a core, which the ranks need themselves), or
near (TensorDataset; workers only cost). There is one job of two ranks for each setting of the sweep, 0, 1, 2 or 4 workers a
rank, and three jobs with auto, each with a search of its own. All are started, and settle one after the other: the sweep's
for `SETTLE` steps, auto for `SEARCH`. Then they take turns in blocks of `BLOCK` steps, in an order that turns each round,
while the others stand still: so a round compares all of them within seconds, which separate runs don't (they differ by 10 %
with equal settings). The first `SKIPPED` steps of a block are left out, for queues that filled up meanwhile. A setting's
speed is its median over the rounds; the best of the sweep is the fastest by that; the ratio of a search is the median of
auto's speed over it, round by round.

Bar: in each case auto within 5 % of the best of the sweep, in the median of the searches.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evenload
from benchmarks.report import rows
from evenload.errors import EvenloadError
from evenload.testing import run_ranks

SWEEP = ("0", "1", "2", "4")
AUTO = ("auto 1", "auto 2", "auto 3")
SETTLE, SEARCH = 40, 200
BLOCK, SKIPPED = 25, 5
ROUNDS = 9
BATCH_SIZE = 48
CASES = ("far away", "computed", "near")
_PATIENCE_S = 600.0


def measure(quick: bool) -> dict[str, Any]:
    """All cases."""
    cases = {case: _compare(case, quick) for case in (CASES[:1] if quick else CASES)}
    bars = {
        f"{case}: auto / best of the sweep >= 0.95": found["auto_over_best"] >= 0.95 for case, found in cases.items()
    }
    return {"cases": cases, "bars": bars}


def _compare(case: str, quick: bool) -> dict[str, Any]:
    """All settings by turns; samples/s of each in each round."""
    arms, rounds = (("0", "auto 1"), 1) if quick else ((*SWEEP, *AUTO), ROUNDS)
    with tempfile.TemporaryDirectory(prefix="evenload-bench-") as folder, ThreadPoolExecutor(len(arms)) as pool:
        jobs = {}
        for arm in arms:
            settle = BLOCK if quick else SETTLE if arm in SWEEP else SEARCH
            jobs[arm] = pool.submit(run_ranks, _train, 2, folder, case, arm, settle, rounds, timeout_s=_PATIENCE_S)
        speeds: dict[str, list[float]] = {arm: [] for arm in arms}
        for block in range(rounds + 1):
            first = block % len(arms)
            for arm in (*arms[first:], *arms[:first]):
                seconds = _turn(Path(folder), arm, block, jobs[arm])
                if block > 0:
                    speeds[arm].append((BLOCK - SKIPPED) * BATCH_SIZE / seconds)
        ends = {arm: job.result()[0] for arm, job in jobs.items() if arm not in SWEEP}
    best = max((arm for arm in arms if arm in SWEEP), key=lambda arm: median(speeds[arm]))
    ratios = {arm: median(a / b for a, b in zip(speeds[arm], speeds[best], strict=True)) for arm in ends}
    return {
        "samples_per_s": {arm: median(found) for arm, found in speeds.items()},
        "best": best,
        "auto_over_best": median(ratios.values()),
        "ratios": list(ratios.values()),
        "chosen": [end["workers"] for end in ends.values()],
        "chosen_at_step": [end["chosen_at"] for end in ends.values()],
    }


def _turn(folder: Path, arm: str, block: int, job: Future[Any]) -> float:
    """Lets one job go through a block while all others stand still; returns the seconds it took."""
    (folder / f"go-{arm}-{block}").touch()
    done = folder / f"done-{arm}-{block}"
    _wait_until(lambda: done.exists() or job.done())
    if not done.exists():
        job.result()  # raises what ended it
        raise EvenloadError(f"the job with {arm} workers ended in block {block}: expected it to go on")
    return float(done.read_text())


def _wait_until(is_met: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not is_met():
        if time.monotonic() > until_s:
            raise EvenloadError(f"nobody went on for {_PATIENCE_S:g} s")
        time.sleep(0.01)


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [
        [
            case,
            *(f"{speed:.0f}" for speed in found["samples_per_s"].values()),
            found["best"],
            f"{found['auto_over_best']:.3f} ({', '.join(f'{ratio:.3f}' for ratio in found['ratios'])})",
            f"{found['chosen']} at steps {found['chosen_at_step']}",
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


def _train(folder: str, case: str, workers: str, settle: int, rounds: int) -> dict[str, Any]:
    """Settles, then goes through a block each time it is this job's turn."""
    run = evenload.init(
        project_dir=f"{folder}/run-{workers.replace(' ', '-')}",
        seed=0,
        balance="even",
        num_workers="loader" if workers in SWEEP else "auto",
        check_every="off",
    )
    num_samples = (settle + rounds * BLOCK + 1) * BATCH_SIZE
    data: Any = _Slow(case, num_samples)
    if case == "near":
        data = TensorDataset(torch.zeros(num_samples, 256), torch.ones(num_samples, 1))
    model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1))
    plain = DataLoader(data, batch_size=BATCH_SIZE, num_workers=int(workers) if workers in SWEEP else 0)
    model, loader = run.prepare(model, plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    chosen_at = None
    block, block_ends, began_s = 0, settle, 0.0
    _wait_until((Path(folder) / f"go-{workers}-{block}").exists)
    for step in loader:
        if step.index == block_ends - BLOCK + SKIPPED:
            run.any(False)
            began_s = time.perf_counter()
        step.backward(lambda batch: functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
        reading = step.batch.reading
        if chosen_at is None and reading.origin.name == "CHOSEN":
            chosen_at = step.index
        if step.index < block_ends - 1:
            continue
        run.any(False)
        if run.rank == 0:
            _tell(Path(folder) / f"done-{workers}-{block}", time.perf_counter() - began_s)
        if block == rounds:
            break
        block, block_ends = block + 1, block_ends + BLOCK
        _wait_until((Path(folder) / f"go-{workers}-{block}").exists)
    everyone = [run.reduce(float(reading.num_workers) if run.rank == rank else 0.0) for rank in range(run.world_size)]
    run.close()
    return {"workers": [int(value) for value in everyone], "chosen_at": chosen_at}


def _tell(path: Path, seconds: float) -> None:
    path.with_suffix(".part").write_text(repr(seconds))
    path.with_suffix(".part").rename(path)
