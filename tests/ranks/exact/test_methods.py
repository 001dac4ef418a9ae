"""Training methods that use gradients in other ways than one backward and one step: each as in one process.

All of them run in one set of processes for each strategy and number of ranks, with one and with three micro-batches.
"""

from __future__ import annotations

import traceback
from functools import cache
from typing import Any

import pytest
import torch

from evenload.training import run as run_module
from tests.ranks.exact.measure import check
from tests.ranks.exact.ranks import Setting, run_split, train
from tests.ranks.exact.reference import Reference
from tests.ranks.exact.tasks import TASKS, Recorder, Task

METHODS = (
    *("Lbfgs", "Ema", "Swa", "Lookahead", "Sam", "SamInPlace", "ManyGroups", "ClippedByValue", "Momentum"),
    *("PcGrad", "Svrg", "Fisher", "CurvatureTerm", "WganGp", "Pix2Pix", "ComplexWeights"),
    *("TiedTokens", "Deepening", "Experts", "FrozenNorm"),
)
SHARES = {2: (27, 5), 3: (24, 6, 2)}
NUM_MICRO = {"auto": 1, 9: 3}
"""micro_batch -> K of full batches, for both shares."""

MOST_STEPS = 10
"""Enough for everything that a task does every few steps."""

Outcome = list[Recorder] | str
"""Records of the ranks, or why there are none."""


def short(name: str) -> Task:
    task = TASKS[name]()
    task.num_steps = min(task.num_steps, MOST_STEPS)
    return task


def train_methods(jobs: list[tuple[str, Setting]], folder: str) -> list[Recorder | str]:
    """Trains one task after the other; the text of an error in the place of a record."""
    torch.set_num_threads(1)
    results: list[Recorder | str] = []
    for index, (name, setting) in enumerate(jobs):
        try:
            results.append(train(short(name), setting, f"{folder}/{index}"))
        except Exception:
            results.append(traceback.format_exc())
            if run_module._open is not None:  # it failed before the loop
                run_module._open.close()
    return results


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calls the trainings of a strategy on a number of ranks, once for all tests."""

    @cache
    def outcomes(strategy: str, num_ranks: int) -> dict[tuple[str, Any], Outcome]:
        jobs = [
            (name, Setting(SHARES[num_ranks], micro, strategy=strategy, options={"timeout_s": 20.0}))
            for name in METHODS
            for micro in NUM_MICRO
        ]
        folder = str(tmp_path_factory.mktemp("methods"))
        ranks = run_split(train_methods, num_ranks, strategy, jobs, folder, timeout_s=100.0)
        found: dict[tuple[str, Any], Outcome] = {}
        for (name, setting), *results in zip(jobs, *ranks, strict=True):
            errors = [result for result in results if isinstance(result, str)]
            found[name, setting.micro_batch] = errors[0] if errors else results
        return found

    return outcomes


@cache
def expected_of(name: str, num_micro: tuple[int, ...]) -> Recorder:
    return Reference(short(name), list(num_micro)).train()


@pytest.mark.every_strategy
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", METHODS)
def test_as_in_one_process(name: str, num_ranks: int, strategy: str, trained: Any) -> None:
    for micro, num_micro in NUM_MICRO.items():
        records = trained(strategy, num_ranks)[name, micro]
        assert not isinstance(records, str), records
        assert max(records[0].num_micro) == num_micro
        check(
            f"{name} {strategy} {num_ranks} ranks K={num_micro}",
            records,
            expected_of(name, tuple(records[0].num_micro)),
        )


@pytest.mark.every_strategy
def test_only_steps_that_bring_something_new_are_done_again(strategy: str, trained: Any) -> None:
    """A parameter whose gradient accumulates more often than before costs one repetition, not one in each later step."""
    for name, most in (("Deepening", 2), ("Experts", 3), ("Pix2Pix", 0)):
        for num_ranks in SHARES:
            record = trained(strategy, num_ranks)[name, "auto"][0]
            assert sum(record.redone) <= most, f"{name}: {record.redone}"
