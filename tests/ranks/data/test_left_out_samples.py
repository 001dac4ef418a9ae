"""A dataset returns None for samples that it can't read, and collate_fn leaves them out: exact, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import evenload
from evenload.errors import EvenloadError
from evenload.testing import run_ranks

SHARES = (9, 5, 2)
BATCH = sum(SHARES)
NUM_SAMPLES = 3 * BATCH
BOUND = 1e-12
SETTINGS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "micro-batches": {"micro_batch": 3},
    "workers": {"num_workers": 1},
    "batch norm": {"norm": True},
}


class Unreadable(Dataset[Any]):
    """A few samples can't be read: others on each rank, of a batch."""

    def __init__(self, bad: set[int]) -> None:
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(NUM_SAMPLES, 6, generator=g, dtype=torch.float64)
        self.bad = bad

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return None if index in self.bad else (self.x[index], self.x[index].sum(0, keepdim=True).tanh())


SOME = {1, 7, 12, 18, 24, 33, 39, 44}
A_PART = {BATCH + 14, BATCH + 15}
"""All samples of rank 2 in the second batch."""


def collate(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def _model(norm: bool) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 8, bias=not norm), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 1)]
    return nn.Sequential(*layers).double()


def _train(model: nn.Module, loader: Any, backward: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        for step in loader:
            losses.append(backward(step, lambda batch: functional.mse_loss(model(batch[0]), batch[1])))
            optimizer.step()
            optimizer.zero_grad()
    return [*model.parameters(), *model.buffers(), *losses]


def _plainly(batch: Any, loss_fn: Any) -> torch.Tensor:
    loss: torch.Tensor = loss_fn(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _flat(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.detach().double().flatten() for value in values])


def _on_ranks(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, options in SETTINGS.items():
        settings = {key: value for key, value in options.items() if key == "micro_batch"}
        run = evenload.init(project_dir=f"{folder}/{name}", seed=0, balance=SHARES, timeout_s=20, **settings)
        workers = options.get("num_workers", 0)
        loader = DataLoader(Unreadable(SOME), batch_size=BATCH, collate_fn=collate, num_workers=workers)
        model, steps = run.prepare(_model(options.get("norm", False)), loader)
        found[name] = _flat(_train(model, steps, lambda step, loss_fn: step.backward(loss_fn)))
        numbers = [float(x.sum()) for x, _ in run.batches(loader)]
        found[f"{name}, evaluated"] = run.reduce(sum(numbers))
        run.close()
    return found


def _refused(bad: set[int], how: str, folder: str) -> str:
    run = evenload.init(project_dir=folder, seed=0, balance=SHARES, timeout_s=20)
    loader: Any = DataLoader(Unreadable(bad), batch_size=BATCH, collate_fn=collate)
    try:
        if how == "tuple":
            model, steps = run.prepare(_model(False), (loader, DataLoader(Unreadable(set()), batch_size=BATCH)))
        else:
            model, steps = run.prepare(_model(False), loader)
        for step in steps:
            if how == "batch_loss":
                step.backward(lambda batch: model(batch[0]), batch_loss=lambda out: out.square().mean().sqrt())
            else:
                step.backward(lambda batch: model(batch[0][0] if how == "tuple" else batch[0]).square().mean())
            model.zero_grad()
    except EvenloadError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.close()
    return "went on"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(_on_ranks, len(SHARES), str(tmp_path_factory.mktemp("runs")), timeout_s=90)


@pytest.mark.parametrize("name", ["as they are", "micro-batches", "workers"])
def test_the_mean_is_that_of_the_samples_that_are_left(ranks: Any, name: str) -> None:
    expected = _flat(_train(_model(False), DataLoader(Unreadable(SOME), BATCH, collate_fn=collate), _plainly))
    for found in ranks:
        assert float((found[name] - expected).norm() / expected.norm()) <= BOUND


def test_batch_norm_counts_them_too(ranks: Any) -> None:
    expected = _flat(_train(_model(True), DataLoader(Unreadable(SOME), BATCH, collate_fn=collate), _plainly))
    for found in ranks:
        assert float((found["batch norm"] - expected).norm() / expected.norm()) <= BOUND


@pytest.mark.parametrize("name", SETTINGS)
def test_an_evaluation_leaves_them_out(ranks: Any, name: str) -> None:
    data = Unreadable(SOME)
    expected = float(sum(data.x[index].sum() for index in range(NUM_SAMPLES) if index not in SOME))
    for found in ranks:
        assert found[f"{name}, evaluated"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("bad", "how", "expected"),
    [
        (A_PART, "", "DataError: the dataset returned None for all 2 samples of a device's part"),
        (SOME, "tuple", "DataError: a dataset of the tuple of loaders returned None for a sample"),
        (SOME, "batch_loss", "StepError: encode returned a tensor of shape"),
    ],
)
def test_what_can_not_be_left_out(bad: set[int], how: str, expected: str, tmp_path: Any) -> None:
    found = run_ranks(_refused, len(SHARES), bad, how, str(tmp_path), timeout_s=60)
    assert any(one.startswith(expected) for one in found), found
    assert all(one.startswith((expected, "PeerLostError: ")) for one in found), found


class _Stream(IterableDataset[Any]):
    """The same samples, each of them None where it is bad."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter([self.rows[index] for index in range(len(self.rows))])


class _Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, index: int) -> Any:
        return None if index < 6 else torch.full((1,), float(index))


def _zeros_for_none(samples: list[Any]) -> torch.Tensor:
    return torch.stack([torch.zeros(1) if sample is None else sample for sample in samples])


def _without_none(samples: list[Any]) -> torch.Tensor:
    return torch.stack([sample for sample in samples if sample is not None])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("collate_fn", [_zeros_for_none, _without_none])
def test_what_collate_fn_returns_counts(tmp_path: Any, collate_fn: Any, is_stream: bool, num_workers: int) -> None:
    run = evenload.init(project_dir=str(tmp_path), seed=0, micro_batch=8)
    rows: Any = _Stream(_Numbers()) if is_stream else _Numbers()
    loader: Any = DataLoader(rows, batch_size=BATCH, collate_fn=collate_fn, num_workers=num_workers)
    model, steps = run.prepare(nn.Linear(1, 1), loader)
    losses = [float(step.backward(lambda batch: model(batch).mean() * 0 + batch.mean())) for step in steps]
    evaluated = [float(batch.sum()) for batch in run.batches(loader)]
    run.close()
    every = collate_fn(list(map(_Numbers().__getitem__, range(BATCH))))
    assert losses == [pytest.approx(float(every.mean()))] and evaluated == [float(every.sum())]


def test_a_dataset_of_none_for_data_that_collate_fn_makes(tmp_path: Any) -> None:
    run = evenload.init(project_dir=str(tmp_path), seed=0)
    loader: Any = DataLoader([None] * 32, batch_size=16, collate_fn=lambda samples: torch.ones(len(samples), 4))
    model, steps = run.prepare(nn.Linear(4, 1), loader)
    weights = [float(step.backward(lambda batch: model(batch).mean() * 0 + len(batch))) for step in steps]
    run.close()
    assert weights == [16.0, 16.0]
