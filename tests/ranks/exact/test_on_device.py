"""Strategy ddp with the sums of a GPU (device_sums.py), made on the CPU: it reads nothing before the gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import StepError
from evenload.testing import run_ranks
from evenload.training.parallel.factory import STRATEGIES, StrategyParts, register_strategy
from evenload.training.parallel.strategy import Strategy
from tests.ranks.exact import test_splits
from tests.ranks.exact import test_third_strategy as third
from tests.ranks.exact.measure import check
from tests.ranks.exact.ranks import Setting
from tests.ranks.exact.tasks import Recorder
from tests.ranks.exact.test_methods import METHODS, train_methods

NAME = "ddp_on_device"
NAMES = tuple(dict.fromkeys((*test_splits.ON_EVERY_SPLIT, *METHODS[1::3])))


def register() -> None:
    def open_it(parts: StrategyParts) -> Strategy:
        return STRATEGIES["ddp"](replace(parts, on_device=True))

    register_strategy(NAME, open_it)


def train_on_device(jobs: list[tuple[str, Setting]], folder: str) -> list[Recorder | str]:
    register()
    return train_methods(jobs, folder)


def _trained(jobs: list[tuple[str, Setting]], num_ranks: int, folder: str) -> dict[str, Any]:
    ranks = run_ranks(train_on_device, num_ranks, jobs, folder, timeout_s=100.0)
    found: dict[str, list[tuple[Setting, Sequence[Recorder | str]]]] = {}
    for (name, setting), *results in zip(jobs, *ranks, strict=True):
        found.setdefault(name, []).append((setting, results))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = [(name, replace(setting, strategy=NAME, fused=True)) for name, setting in third.jobs_of(NAMES)]
    return _trained(jobs, 3, str(tmp_path_factory.mktemp("on_device")))


@pytest.mark.parametrize("name", [*NAMES, *third.SCALED, *third.REPEATED])
def test_as_in_one_process(name: str, trained: Any) -> None:
    for setting, records in trained[name]:
        for record in records:
            assert not isinstance(record, str), record
        expected = third.expected_of(name, tuple(records[0].num_micro), setting.precision == "fp16")
        check(f"{name} on device {setting}", records, expected)
        assert records[0].scales == expected.scales or setting.precision == "no"


def test_a_rank_alone(tmp_path: Path) -> None:
    """Its gradients stay where autograd put them."""
    names = ("Tokens", "DictMetrics", "TwoLosses", "Gan", "ComplexWeights", "Pix2Pix")
    jobs = [(name, Setting(micro_batch=9, strategy=NAME)) for name in names]
    for name, ((_, records),) in _trained(jobs, 1, str(tmp_path)).items():
        assert not isinstance(records[0], str), records[0]
        check(f"{name} alone on device", records, third.expected_of(name, tuple(records[0].num_micro), False))


def _train(project_dir: str, kind: str) -> dict[str, Any]:
    register()
    run = evenload.init(project_dir=project_dir, seed=0, strategy=NAME, balance=(5, 3))
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(24, 4, generator=generator), torch.arange(24))
    model, loader = run.prepare(nn.Linear(4, 1), DataLoader(data, batch_size=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(batch: Any) -> Any:
        x, index = batch
        in_bad_step = bool((index == 8).any() | (index == 15).any())  # on both ranks
        values = model(x).squeeze(1)
        if kind == "nan":
            return values.sum() * (float("nan") if bool((index == 15).any()) else 1.0)
        weight = torch.tensor(len(x))
        if in_bad_step:
            weight = torch.tensor({"zero": 0.0, "negative": -1.0, "infinite": float("inf")}[kind])
        return F.mse_loss(values, torch.zeros(len(x))), weight

    weights, error, is_none = [], "", False
    try:
        for step in loader:
            loss = step.backward(loss_fn)
            is_none = is_none or model.weight.grad is None
            assert loss.shape == ()
            optimizer.step()
            optimizer.zero_grad()
            weights.append(model.weight.detach().clone())
    except StepError as found:
        error = str(found)
        is_none = model.weight.grad is None
    if not error:
        run.close()
    return {"weights": weights, "error": error, "is_none": is_none}


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_both(tmp_path: Path) -> None:
    for found in run_ranks(_train, 2, str(tmp_path), "nan"):
        first, second, third_ = found["weights"]
        assert found["is_none"]
        assert torch.equal(first, second)
        assert not torch.equal(second, third_)
    assert '"skipped"' in (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("kind", "message"),
    [("zero", "all weights are 0"), ("negative", "negative or not finite"), ("infinite", "negative or not finite")],
)
def test_weights_on_the_device_are_checked(kind: str, message: str, tmp_path: Path) -> None:
    for found in run_ranks(_train, 2, str(tmp_path), kind):
        assert message in found["error"]
        assert found["is_none"]
        assert len(found["weights"]) == 1


def _train_masked(project_dir: str, strategy: str) -> tuple[list[torch.Tensor], int]:
    """Train with a loss that divides by its weight, which is 0 for whole micro-batches of the second rank."""
    register()
    run = evenload.init(project_dir=project_dir, seed=0, strategy=strategy, balance="even", micro_batch=2)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.arange(32))
    model, loader = run.prepare(nn.Linear(4, 1).double(), DataLoader(data, batch_size=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_calls = num_in_backward = 0

    def loss_fn(batch: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        x, index = batch
        kept = ((index < 8) | (index % 8 < 3)).double()
        return (model(x.double()).squeeze(1).square() * kept).sum() / kept.sum(), kept.sum()

    weights = []
    for step in loader:
        num_before = num_calls
        loss = step.backward(loss_fn)
        num_in_backward += num_calls - num_before  # the watch for coupled losses calls loss_fn at the end of the body
        assert bool(loss.isfinite())
        optimizer.step()
        optimizer.zero_grad()
        weights.append(model.weight.detach().clone())
    run.close()
    return weights, num_in_backward


def test_a_loss_that_divides_by_a_weight_of_zero(tmp_path: Path) -> None:
    ((alone, _),) = run_ranks(_train_masked, 1, str(tmp_path / "alone"), "ddp")
    for weights, num_calls in run_ranks(_train_masked, 2, str(tmp_path / "two"), NAME):
        assert num_calls == 5 * 2  # the second of four steps was run twice, and no later one
        for found, expected in zip(weights, alone, strict=True):
            assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert '"skipped"' not in (tmp_path / "two" / "events.jsonl").read_text()
