"""A TensorDataset is cut for a whole task at once: what comes is what default_collate gives, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from evenload.training.data.reading import ReadTask, TaskDataset
from tests.unit.data.fakes import Board, make_ranks

DATA = TensorDataset(
    torch.randn(20, 3, 2),
    torch.arange(20),
    torch.randn(20, 4).T.contiguous().T,
    torch.rand(20, 2, dtype=torch.float64) > 0.5,
    torch.randn(20, dtype=torch.complex64),
)


class Own(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * tensor[index] for tensor in self.tensors)


DATASETS = {
    "whole": DATA,
    "subset": Subset(DATA, [5, 3, 19, 0, 1]),
    "subset of a subset": Subset(Subset(DATA, range(10, 20)), torch.tensor([3, 1, 2, 0, 9])),  # type: ignore[arg-type]
    "own __getitem__": Own(*DATA.tensors),
}


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("keys", [(0,), (4, 2, 2, 0), (1, -1)])
def test_the_same_as_sample_by_sample(name: str, keys: tuple[int, ...]) -> None:
    dataset = DATASETS[name]
    expected = default_collate([dataset[key] for key in keys])
    (found,) = [TaskDataset(dataset, default_collate, seed=0, keyed=True).__getitems__(ReadTask(0, 7, keys))]
    assert type(found) is type(expected) is list and len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
        assert one.is_contiguous()
    found[0].zero_()  # a copy: the dataset stays as it is
    assert torch.equal(default_collate([dataset[key] for key in keys])[0], expected[0])


def test_keys_that_are_no_integers_go_the_usual_way() -> None:
    found = TaskDataset(DATA, default_collate, seed=0, keyed=False).__getitems__(ReadTask(0, 0, (torch.tensor(3),)))
    assert torch.equal(found[1], torch.tensor([3]))


def test_a_collate_fn_of_the_users_gets_samples() -> None:
    def count(samples: list[Any]) -> int:
        return len(samples)

    assert TaskDataset(DATA, count, seed=0, keyed=False).__getitems__(ReadTask(0, 0, (1, 2, 3))) == 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_tensors_put_in_place_later_are_read(num_workers: int) -> None:
    data = TensorDataset(torch.zeros(8))
    (rank,) = make_ranks(Board((1,)), DataLoader(data, batch_size=4, num_workers=num_workers))
    assert [batch.micro(0).data[0].tolist() for batch in rank] == [[0.0] * 4] * 2
    data.tensors = (torch.ones(8),)
    assert [batch.micro(0).data[0].tolist() for batch in rank] == [[1.0] * 4] * 2


@pytest.mark.parametrize("sampler", [None, [3, -1, 0, 19, 7, 7, 2, 5]])
def test_rows_by_index_are_those_that_workers_read(sampler: list[int] | None) -> None:
    read = []
    for num_workers in (0, 1):
        loader = DataLoader(DATA, batch_size=4, shuffle=sampler is None, sampler=sampler, num_workers=num_workers)
        (rank,) = make_ranks(Board((1,)), loader)
        assert (rank._reader._sources[0].prefetcher.rows is None) == (num_workers > 0)  # type: ignore[union-attr]
        read.append([batch.micro(0).data for batch in rank])
        rank.close()
    for here, there in zip(*read, strict=True):
        assert type(here) is type(there) is list
        assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
    assert len(read[0]) == (5 if sampler is None else 2)
