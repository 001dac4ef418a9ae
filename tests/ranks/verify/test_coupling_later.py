"""Losses that the first look at a batch's rows does not show: batches without rows, terms that begin later, small couplings."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import evenload
from evenload.testing import run_ranks

NUM_SAMPLES, BATCH, NUM_STEPS = 96, 16, 6
KINDS = ("coupled_loss", "wrong_units", "kept_state", "own_generator", "padding", "metric_units", "unequal_reads")
Loss = Callable[[Any, Any, int], Any]


class Rows:
    """A batch of the script's own class, as for graphs: nothing can be cut out of it."""

    def __init__(self, samples: list[Any]) -> None:
        self.x = torch.stack([x for x, _ in samples])
        self.y = torch.stack([y for _, y in samples])
        self.counts = self.y > 1


class Graphs(Dataset[Any]):
    """Of unequal numbers of nodes."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(index)
        return torch.randn(2 + index * 5 % 9, 6, generator=g, dtype=torch.float64)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(_data())


class Fading(Dataset[Any]):
    """Each sample is weaker when it is read again."""

    def __init__(self) -> None:
        self.x, self.y = (part.clone() for part in _data().tensors)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.x[index] *= 0.9
        return self.x[index].clone(), self.y[index]


class Noisy(Dataset[Any]):
    """Draws from generators that are seeded by the sample."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = _data()[index]
        return x + np.random.randn(6) + random.random() * torch.randn(6), y


def _data() -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 6, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 5, (NUM_SAMPLES,), generator=g))


def _contrast(out: torch.Tensor) -> torch.Tensor:
    z = F.normalize(out, dim=1)
    return F.cross_entropy(z @ z.T / 0.3, torch.arange(len(z)).roll(1))


def forgotten_weight(model: Any, batch: Any, _: int) -> Any:
    return F.cross_entropy(model(batch.x)[batch.counts], batch.y[batch.counts])


def sum_of_rows(model: Any, batch: Any, _: int) -> Any:
    return F.cross_entropy(model(batch.x), batch.y, reduction="sum") / BATCH


def contrast_of_rows(model: Any, batch: Any, _: int) -> Any:
    return _contrast(model(batch.x))


def counted_rows(model: Any, batch: Any, step: int) -> Any:
    return forgotten_weight(model, batch, step), batch.counts.sum()


def mean_of_nodes(model: Any, nodes: Any, _: int) -> Any:
    return model(nodes).square().mean()


def counted_nodes(model: Any, nodes: Any, _: int) -> Any:
    return model(nodes).square().mean(), len(nodes)


def from_the_fourth_step(model: Any, batch: Any, step: int) -> Any:
    out = model(batch[0])
    return F.cross_entropy(out, batch[1]) + (_contrast(out) if step >= 4 else 0.0)


def ramped(model: Any, batch: Any, step: int) -> Any:
    out = model(batch[0])
    return F.cross_entropy(out, batch[1]) + step / 10 * _contrast(out)


def balanced_experts(model: Any, batch: Any, _: int) -> Any:
    """A term that keeps the experts of a mixture busy, with the coefficient of its paper."""
    used = model[:2](batch[0].to(model[0].weight.dtype))
    p = used.softmax(-1).mean(0)
    return F.cross_entropy(model[2](used), batch[1]) + 0.01 * (p * p.log()).sum()


def of_one_dtype(model: Any, batch: Any, step: int) -> Any:
    """As an RNN: it can't be computed in float64 without converting the model."""
    loss = plain(model, batch, step)
    if loss.dtype != model[0].weight.dtype:
        raise TypeError(loss.dtype)
    return loss + 30 * (balanced_experts(model, batch, step) - loss)


def seeds_itself(model: Any, batch: Any, step: int) -> Any:
    torch.manual_seed(step)
    return F.cross_entropy(model(batch[0] + torch.randn_like(batch[0])), batch[1])


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> torch.Tensor:
        return slopes[0].clamp(-0.01, 0.01)


def clamped_backward(model: Any, batch: Any, _: int) -> Any:
    """Each sample's gradient is clamped, at the size that it has in the global batch."""
    return F.cross_entropy(model[2](_Clamped.apply(model[0](batch[0]))), batch[1])


def autocast(model: Any, batch: Any, _: int) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(batch[0].float()).float(), batch[1])


def plain(model: Any, batch: Any, _: int) -> Any:
    return F.cross_entropy(model(batch[0].to(model[0].weight.dtype)), batch[1])


def small_difference(model: Any, batch: Any, step: int) -> Any:
    """A loss that is small beside the numbers that it is computed from: rounding is a large part of it."""
    return plain(model, batch, step) + 1e5 - 1e5


class _Settings(dict[str, Any]):
    __getattr__ = dict.__getitem__


SETTINGS = _Settings(scale=0.5)


def with_settings(model: Any, batch: Any, step: int) -> Any:
    return contrast_of_rows(model, batch, step) * SETTINGS.scale


def with_a_recall(model: Any, batch: Any, _: int) -> Any:
    out = model(batch[0])
    hits = (out.argmax(1) == batch[1])[batch[1] == 1]
    return {"loss": F.cross_entropy(out, batch[1]), "recall": (hits.sum() + 1) / (len(hits) + 1)}


def with_an_accuracy(model: Any, batch: Any, _: int) -> Any:
    out = model(batch[0])
    return {"loss": F.cross_entropy(out, batch[1]), "accuracy": (out.argmax(1) == batch[1]).double().mean(), "lr": 0.01}


def hardest_five(model: Any, batch: Any, _: int) -> Any:
    """Fails where a part has fewer samples."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none").topk(5).values.mean()


OTHER_BATCHES = iter(range(NUM_SAMPLES))
counts = iter(range(NUM_SAMPLES))  # no function takes from it: Rows has an attribute of this name


def of_a_second_loader(model: Any, batch: Any, _: int) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1]) * (1 + next(OTHER_BATCHES))


ROWS: dict[str, Any] = {"collate_fn": Rows}
FOUND: tuple[tuple[Loss, dict[str, Any], str], ...] = (
    (forgotten_weight, ROWS, "wrong_units"),
    (forgotten_weight, {"dataset": Stream(), **ROWS}, "wrong_units"),
    (sum_of_rows, ROWS, "wrong_units"),
    (contrast_of_rows, ROWS, "coupled_loss"),
    (with_settings, ROWS, "coupled_loss"),
    (mean_of_nodes, {"dataset": Graphs(), "collate_fn": torch.cat}, "wrong_units"),
    (from_the_fourth_step, {}, "coupled_loss"),
    (ramped, {}, "coupled_loss"),
    (balanced_experts, {}, "coupled_loss"),
    (balanced_experts, {"dtype": torch.float32}, "coupled_loss"),
    (of_one_dtype, {"dtype": torch.float32}, "coupled_loss"),
    (hardest_five, {}, "coupled_loss"),
    (seeds_itself, {}, "own_generator"),
    (of_a_second_loader, {}, "kept_state"),
    (with_a_recall, {}, "metric_units"),
    (plain, {"dataset": Fading()}, "unequal_reads"),
)
FINE: tuple[tuple[Loss, dict[str, Any]], ...] = (
    (counted_rows, ROWS),
    (counted_nodes, {"dataset": Graphs(), "collate_fn": torch.cat}),
    (clamped_backward, {}),
    (autocast, {"dtype": torch.float32}),
    (with_an_accuracy, {}),
    (plain, {"dataset": Noisy()}),
    (plain, {}),
    (plain, {"dtype": torch.float32}),
    (small_difference, {"dtype": torch.float32}),
)
ALL = [(loss, options) for loss, options, _ in FOUND] + list(FINE)


def _call(loss: Loss, model: Any, index: int, batch: Any) -> Any:
    return loss(model, batch, index)


def _train(folder: str, loss: Loss, dtype: torch.dtype = torch.float64, **options: Any) -> None:
    run = evenload.init(project_dir=folder, seed=0, balance=(11, 5), timeout_s=20.0)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).to(dtype)
    dataset = options.pop("dataset", None) or _data()
    model, loader = run.prepare(model, DataLoader(dataset, batch_size=BATCH, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in loader:
        step.backward(partial(_call, loss, model, step.index))
        optimizer.step()
        optimizer.zero_grad()
    run.close()


def _train_all(folder: str) -> None:
    torch.set_num_threads(1)
    for index, (loss, options) in enumerate(ALL):
        _train(f"{folder}/{index}", loss, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("later")
    run_ranks(_train_all, 2, str(folder), timeout_s=90)
    return folder


class _Counting(nn.Linear):
    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(x)


class _History(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []


class _Average:
    def __init__(self) -> None:
        self.total, self.num = torch.zeros(()), 0

    def add(self, values: torch.Tensor) -> None:
        self.total += values.sum()
        self.num += len(values)


def _count_in_loss_fn(folder: str) -> list[float]:
    """Metrics as many scripts keep them: a variable, a list, an array, an object."""
    run = evenload.init(project_dir=folder, seed=0)
    model, loader = run.prepare(_Counting(6, 5).double(), DataLoader(_data(), batch_size=BATCH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    num, sizes, by_class, average = 0, [], np.zeros(5), _Average()
    counter, by_name, nested, plain = (
        Counter[str](),
        defaultdict[Any, int](int),
        {"a": {"b": [0]}},
        SimpleNamespace(num=0),
    )
    metrics = nn.ModuleDict({"size": _History()})
    generator, expected = (torch.Generator().manual_seed(1) for _ in range(2))

    def loss_fn(batch: Any) -> Any:
        nonlocal num
        x, y = batch
        num += len(x)
        sizes.append(len(x))
        np.add.at(by_class, y.numpy(), 1)
        average.add(y)
        counter["num"] += len(x)
        by_name[len(x)] += len(x)
        nested["a"]["b"].append(len(x))
        plain.num += len(x)
        metrics["size"].sizes.append(len(x))  # type: ignore[union-attr, arg-type]
        torch.rand((), generator=generator)
        return F.cross_entropy(model(x), y)

    for step in loader:
        step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
    assert model.num_calls == len(loader)
    torch.rand(len(loader), generator=expected)
    assert torch.equal(torch.rand(2, generator=generator), torch.rand(2, generator=expected))
    assert set(by_name) == {sizes[0]}
    sums = [counter["num"], sum(by_name.values()), sum(nested["a"]["b"]), plain.num, sum(metrics["size"].sizes)]  # type: ignore
    found = run.reduce([num, sum(sizes), by_class.sum(), average.num, float(average.total), *sums])
    run.close()
    return [float(value) for value in found]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_loss_fn_counts_is_put_back_after_a_look(num_ranks: int, tmp_path: Path) -> None:
    expected = [NUM_SAMPLES] * 4 + [float(_data().tensors[1].sum())] + [NUM_SAMPLES] * 5
    assert run_ranks(_count_in_loss_fn, num_ranks, str(tmp_path)) == [expected] * num_ranks


def _kinds(folder: Path, index: int) -> list[str]:
    events = map(json.loads, (folder / str(index) / "events.jsonl").read_text().splitlines())
    return [event["kind"] for event in events if event.get("kind") in KINDS]


@pytest.mark.parametrize("index", range(len(FOUND)), ids=[loss.__name__ for loss, *_ in FOUND])
def test_it_is_named_once(folder: Path, index: int) -> None:
    assert _kinds(folder, index) == [FOUND[index][2]]


@pytest.mark.parametrize("index", range(len(FINE)), ids=[loss.__name__ for loss, _ in FINE])
def test_no_other_is_named(folder: Path, index: int) -> None:
    assert not _kinds(folder, len(FOUND) + index)


def test_a_batch_of_a_class_of_the_scripts_is_as_it_was_read_in_each_call(tmp_path: Path) -> None:
    run = evenload.init(project_dir=tmp_path, seed=0)
    model, loader = run.prepare(nn.Linear(6, 5).double(), DataLoader(_data(), batch_size=BATCH, collate_fn=Rows))
    for step in loader:
        one, other = (step.backward(lambda batch: F.cross_entropy(model(batch.x.mul_(1.5)), batch.y)) for _ in range(2))
        assert one == other
        model.zero_grad()
    run.close()
