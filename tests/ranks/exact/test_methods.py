"""Training methods that use gradients in other ways than one backward and one step: each as in one process.

All of them run in one set of processes for each strategy and number of ranks: with one micro-batch on two ranks, with three on
three. Under dp each runs once: on two replicas or on three, by turns.
"""

from __future__ import annotations

import traceback
from functools import cache
from typing import Any

import pytest
import torch

from evenload.training import run as run_module
from tests.ranks.exact.measure import check
from tests.ranks.exact.ranks import STRATEGIES, Setting, run_split, train
from tests.ranks.exact.reference import Reference
from tests.ranks.exact.tasks import TASKS, Recorder

METHODS = (
    *("Lbfgs", "Ema", "Swa", "Lookahead", "Sam", "SamInPlace", "ManyGroups", "ClippedByValue", "Momentum"),
    *("PcGrad", "Svrg", "Fisher", "CurvatureTerm", "WganGp", "Pix2Pix", "ComplexWeights"),
    *("TiedTokens", "Deepening", "Experts", "FrozenNorm"),
)
SHARES = {2: (27, 5), 3: (24, 6, 2)}
MICRO: dict[int, Any] = {2: "auto", 3: 9}
NUM_MICRO = {2: 1, 3: 3}
"""Number of ranks -> K of full batches."""

Outcome = list[Recorder] | str
"""Records of the ranks, or why there are none."""


def train_methods(jobs: list[tuple[str, Setting]], folder: str) -> list[Recorder | str]:
    """Trains one task after the other; the text of an error in the place of a record."""
    torch.set_num_threads(1)
    results: list[Recorder | str] = []
    for index, (name, setting) in enumerate(jobs):
        try:
            results.append(train(TASKS[name](), setting, f"{folder}/{index}"))
        except Exception:
            results.append(traceback.format_exc())
            if run_module._open is not None:  # it failed before the loop
                run_module._open.close()
    return results


def methods_of(strategy: str, num_ranks: int) -> tuple[str, ...]:
    return METHODS if strategy == "ddp" else METHODS[num_ranks % 2 :: 2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calls the trainings of a strategy on a number of ranks, once for all tests."""

    @cache
    def outcomes(strategy: str, num_ranks: int) -> dict[str, Outcome]:
        setting = Setting(SHARES[num_ranks], MICRO[num_ranks], strategy=strategy, options={"timeout_s": 20.0})
        names = methods_of(strategy, num_ranks)
        jobs = [(name, setting) for name in names]
        folder = str(tmp_path_factory.mktemp("methods"))
        ranks = run_split(train_methods, num_ranks, strategy, jobs, folder, timeout_s=100.0)
        found: dict[str, Outcome] = {}
        for name, *results in zip(names, *ranks, strict=True):
            errors = [result for result in results if isinstance(result, str)]
            found[name] = errors[0] if errors else results
        return found

    return outcomes


@cache
def expected_of(name: str, num_micro: tuple[int, ...]) -> Recorder:
    return Reference(TASKS[name](), list(num_micro)).train()


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "name"),
    [(strategy, num, name) for strategy in STRATEGIES for num in SHARES for name in methods_of(strategy, num)],
)
def test_as_in_one_process(strategy: str, num_ranks: int, name: str, trained: Any) -> None:
    records = trained(strategy, num_ranks)[name]
    assert not isinstance(records, str), records
    num_micro = tuple(records[0].num_micro)
    assert max(num_micro) == NUM_MICRO[num_ranks]
    check(f"{name} {strategy} {num_ranks} ranks K={max(num_micro)}", records, expected_of(name, num_micro))


@pytest.mark.every_strategy
def test_only_steps_that_bring_something_new_are_done_again(strategy: str, trained: Any) -> None:
    """A parameter whose gradient accumulates more often than before costs one repetition, not one in each later step."""
    for name, most in (("Deepening", 2), ("Experts", 3), ("Pix2Pix", 0)):
        for num_ranks in (num for num in SHARES if name in methods_of(strategy, num)):
            record = trained(strategy, num_ranks)[name][0]
            assert sum(record.redone) <= most, f"{name}: {record.redone}"
