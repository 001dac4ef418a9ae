"""Ranks that were given other data are told so before the first step, with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from evenload.training.data.fingerprint import describe_mismatch, fingerprint_of
from tests.unit.data.fakes import Numbers


class Held(Dataset[Any]):
    """Holds its data as attributes, as tutorials do."""

    def __init__(self, **arrays: Any) -> None:
        self.__dict__.update(arrays)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is asked for")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("no sample is asked for")


def compare(*loaders: DataLoader[Any]) -> str:
    return describe_mismatch([fingerprint_of(loader) for loader in loaders])


def floats(seed: int = 0, count: int = 400) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


SAME: dict[str, Any] = {
    "numbers": lambda: DataLoader(Numbers(40), 8, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 8),
    "weighted": lambda: DataLoader(Numbers(40), 8, sampler=WeightedRandomSampler([0.1] * 40, 20)),
    "batches": lambda: DataLoader(Numbers(40), batch_sampler=[[1, 2], [3]]),
    "split": lambda: DataLoader(random_split(Numbers(40), [30, 10], torch.Generator().manual_seed(1))[0], 8),
    "tensors": lambda: DataLoader(TensorDataset(floats(), floats(1).long()), 8),
    "arrays": lambda: DataLoader(Held(x=floats().numpy(), y=numpy.arange(40), z=torch.zeros(2).bfloat16(), n=3), 8),
    "long rows": lambda: DataLoader(
        Held(
            x=torch.zeros(40, 3, 250, 200),
            y=torch.ones(1, 300_000),
            z=torch.zeros(3, 200_000).T,
            n=numpy.ones((2, 300_000)),
        ),
        8,
    ),
    "objects": lambda: DataLoader(
        Held(x=numpy.array([object()]), y=[1], z=numpy.array(["a"]), t=torch.zeros(2, 3).T), 8
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_loaders_are_the_same(name: str) -> None:
    assert compare(SAME[name](), SAME[name](), SAME[name]()) == ""
    assert len(fingerprint_of(SAME[name]())) <= 56


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (
            DataLoader(Numbers(40), 8),
            DataLoader(Numbers(30), 8),
            "the loaders differ: rank 0 has 40 samples in batches of 8, rank 1 has 30 samples in batches of 8. Give every rank "
            "the whole dataset",
        ),
        (
            DataLoader(Numbers(40), 8),
            DataLoader(Numbers(30), 8),
            "Where each machine has only a part of the data, merge",
        ),
        (DataLoader(Numbers(40), 8), DataLoader(Numbers(40), 4), "rank 1 has 40 samples in batches of 4"),
        (
            DataLoader(Numbers(40), 8),
            DataLoader(Numbers(40), 8, sampler=range(0, 40, 2)),
            "rank 0 has 5 steps and 40 keys of its sampler, rank 1 has 3 steps and 20 keys of its sampler",
        ),
        (DataLoader(Numbers(41), 8), DataLoader(Numbers(41), 8, drop_last=True), "sampler, batch_sampler or drop_last"),
        (DataLoader(Numbers(40), 8), DataLoader(Numbers(40), 8, shuffle=True), "sampler, batch_sampler or drop_last"),
        (
            DataLoader(Subset(Numbers(40), range(0, 40, 2)), 8),
            DataLoader(Subset(Numbers(40), range(1, 40, 2)), 8),
            "the loaders select different samples on rank 1 and on rank 0.*draw it after init",
        ),
        (
            DataLoader(Numbers(40), 8, sampler=SubsetRandomSampler(range(0, 40, 2))),
            DataLoader(Numbers(40), 8, sampler=SubsetRandomSampler(range(1, 40, 2))),
            "the loaders select different samples on rank 1",
        ),
        (
            DataLoader(Numbers(40), 8, sampler=[1, 2, 3]),
            DataLoader(Numbers(40), 8, sampler=[1, 2, 4]),
            "the loaders select different samples on rank 1",
        ),
        (
            DataLoader(TensorDataset(floats(0)), 8),
            DataLoader(TensorDataset(floats(1)), 8),
            "the dataset holds different values on rank 1 and on rank 0.*create it after init",
        ),
        (
            DataLoader(TensorDataset(floats(0)), 8),
            DataLoader(TensorDataset(floats(0)[torch.randperm(400)]), 8),
            "the dataset holds different values on rank 1",
        ),
        (
            DataLoader(ConcatDataset([Held(y=numpy.arange(40)), Held(y=numpy.arange(40))]), 8),
            DataLoader(ConcatDataset([Held(y=numpy.arange(40)), Held(y=numpy.arange(40)[::-1].copy())]), 8),
            "the dataset holds different values on rank 1",
        ),
        (
            DataLoader(Held(x=numpy.zeros(1 << 19)), 8),
            DataLoader(Held(x=numpy.zeros(1 << 20)), 8),
            "the dataset holds different values on rank 1",
        ),
    ],
)
def test_what_differs_is_told(first: DataLoader[Any], second: DataLoader[Any], told: str) -> None:
    import re

    assert re.search(told, compare(first, second)), compare(first, second)
    assert "rank 2" in compare(first, first, second)


def test_other_rounding_of_floats_is_no_difference() -> None:
    x = floats()
    assert compare(DataLoader(TensorDataset(x), 8), DataLoader(TensorDataset(x * (1 + 1e-6)), 8)) == ""


def test_many_ranks_are_not_all_told() -> None:
    told = compare(*[DataLoader(Numbers(40 + rank), 8) for rank in range(12)])
    assert "rank 7 has 47 samples" in told and "rank 8" not in told and "12 ranks" in told
