"""The user's samplers: drawn once, shared, and drawn again alike after a resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from evenload.errors import DataError, PeerLostError
from evenload.training.data import order
from tests.unit.data.fakes import Board, Numbers, flat, joined, lockstep, make_ranks

DATA = Numbers(30)


class Buckets(Sampler[Any]):
    """Lists of other lengths each, drawn from the global generators and one of its own; no length."""

    def __init__(self) -> None:
        self.own = random.Random(4)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(30).tolist()
        while order:
            size = self.own.randint(1, 5)
            yield order[:size]
            order = order[size:]


def loaders() -> dict[str, Any]:
    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(11)

    return {
        "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler(torch.arange(30.0), 22)),
        "weighted, own generator": lambda: DataLoader(
            DATA, 4, sampler=WeightedRandomSampler(torch.arange(30.0), 22, generator=seeded())
        ),
        "subset": lambda: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(3, 25)), drop_last=True),
        "shuffle with a generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=seeded()),
        "replacement": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True, num_samples=50)),
        "a list": lambda: DataLoader(DATA, 4, sampler=[5, 3, 9, 9, 1]),
        "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 7, False)),
        "buckets": lambda: DataLoader(DATA, batch_sampler=Buckets()),
    }


@pytest.mark.parametrize("name", loaders())
def test_a_sampler_is_drawn_once_and_shared(name: str) -> None:
    make = loaders()[name]
    ranks = make_ranks(Board((2, 1, 1)), make)
    epochs = [[flat(joined(step)) for step in lockstep(ranks)] for _ in range(2)]
    torch.manual_seed(99)
    random.seed(99)
    (alone,) = make_ranks(Board((1,)), make)
    assert [[flat(joined(step)) for step in lockstep([alone])] for _ in range(2)] == epochs
    if name not in ("a list", "batch sampler"):
        assert epochs[0] != epochs[1]
    sizes = [len(step) for step in epochs[0]]
    if name != "buckets":
        assert len(sizes) == len(alone) == len(ranks[0])
        assert sizes[:-1] == [7 if name == "batch sampler" else 4] * (len(sizes) - 1)
    else:
        assert len(set(sizes)) > 1
        assert sorted(flat(epochs[0])) == list(range(30))
        assert alone.user_loader.batch_sampler.epochs == [0, 1]  # type: ignore[union-attr]
        assert alone.batch_size is None
        with pytest.raises(TypeError):
            len(alone)


@pytest.mark.parametrize("name", loaders())
@pytest.mark.parametrize("stop", [(0, 2), (1, 1), (1, -1)])
def test_a_resume_draws_the_same_again(name: str, stop: tuple[int, int]) -> None:
    make = loaders()[name]

    def follow(ranks: Any, until: tuple[int, int] | None) -> Iterator[list[int]]:
        while ranks[0].epoch < 3:
            for step in lockstep(ranks, commit=False):
                yield flat(joined(step))
                for rank, batch in zip(ranks, step, strict=True):
                    rank.commit(batch)
                if until == (step[0].epoch, step[0].epoch_step):
                    return
            if until == (ranks[0].epoch, -1):
                return

    whole = list(follow(make_ranks(Board((1,)), make), None))
    first = make_ranks(Board((1, 2)), make)
    found = list(follow(first, stop))
    assert first[0].cursor() == first[1].cursor()
    resumed = make_ranks(Board((3, 1, 1)), make)
    for rank in resumed:
        rank.load(first[1].cursor())
    found += list(follow(resumed, None))
    assert found == whole


class Words(Numbers):
    def __getitem__(self, key: Any) -> Any:
        return torch.tensor(len(key[0]) + key[1])


def test_keys_need_not_be_integers() -> None:
    keys = [("a" * length, 10 * length) for length in range(9)]
    ranks = make_ranks(Board((1, 1)), DataLoader(Words(9), batch_size=4, sampler=keys))
    assert [value for step in lockstep(ranks) for value in flat(joined(step))] == [11 * length for length in range(9)]


class Nested(Sampler[list[int]]):
    """Holds a sampler with a generator of its own, out of sight."""

    def __init__(self) -> None:
        self.parts = [RandomSampler(DATA, generator=torch.Generator().manual_seed(2))]

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.parts[0])
        return iter([order[:20], order[20:]])


def test_generators_of_samplers_inside_samplers_are_restored() -> None:
    def make() -> Any:
        return DataLoader(DATA, batch_sampler=Nested())

    (alone,) = make_ranks(Board((1,)), make)
    whole = [flat(joined(step)) for _ in range(3) for step in lockstep([alone])]
    (first,) = make_ranks(Board((1,)), make)
    found = []
    for batch in first:
        found.append(flat(joined([batch])))
        first.commit(batch)
    for batch in first:
        found.append(flat(joined([batch])))
        first.commit(batch)
        break
    (resumed,) = make_ranks(Board((1,)), make)
    resumed.load(first.cursor())
    found += [flat(joined(step)) for _ in range(2) for step in lockstep([resumed])]
    assert found == whole


class Counting(Sampler[int]):
    """Each time another order, by a counter that nobody can restore."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        return iter(range(self.count, 30 + self.count))


def test_a_resume_that_would_draw_another_order_is_refused() -> None:
    data = Numbers(100)
    (first,) = make_ranks(Board((1,)), DataLoader(data, batch_size=10, sampler=Counting()))
    list(lockstep([first]))
    for batch in first:
        first.commit(batch)
        break
    (resumed,) = make_ranks(Board((1,)), DataLoader(data, batch_size=10, sampler=Counting()))
    resumed.load(first.cursor())
    with pytest.raises(DataError, match="the sampler now draws a different order"):
        next(iter(resumed))


def test_keys_that_cannot_be_shared_are_refused() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(DATA, batch_size=4, sampler=[lambda: 1]))
    with pytest.raises(DataError, match="can't be sent to the other ranks"):
        next(iter(rank))


class Failing(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1
        raise OSError("the list is gone")

    def __len__(self) -> int:
        return 5


def test_an_error_in_the_sampler_reaches_every_rank() -> None:
    ranks = make_ranks(Board((1, 1)), DataLoader(DATA, batch_size=4, sampler=Failing()))
    with pytest.raises(OSError, match="the list is gone"):
        next(iter(ranks[0]))
    with pytest.raises(PeerLostError, match="OSError: the list is gone"):
        next(iter(ranks[1]))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


def test_an_endless_sampler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "MAX_ENDLESS", 1000)
    (rank,) = make_ranks(Board((1,)), DataLoader(DATA, batch_size=4, sampler=Endless()))
    with pytest.raises(DataError, match="an epoch needs an end"):
        next(iter(rank))


class Short(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_a_batch_sampler_over_a_sampler_without_a_length() -> None:
    """It has a `__len__`, which raises."""
    (rank,) = make_ranks(Board((1,)), DataLoader(DATA, batch_sampler=BatchSampler(Short(), 4, drop_last=False)))
    assert [flat(joined(batch)) for batch in lockstep([rank])] == [[0, 1, 2, 3], [4, 5]]


def test_a_batch_sampler_of_too_many_keys_is_refused() -> None:
    sampler = RandomSampler(DATA, replacement=True, num_samples=1 << 32)
    (rank,) = make_ranks(Board((1,)), DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, drop_last=True)))
    with pytest.raises(DataError, match=r"BatchSampler has 4,294,967,296 keys"):
        next(iter(rank))


def test_an_empty_list_of_a_batch_sampler_is_refused() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(DATA, batch_sampler=[[1, 2], []]))
    with pytest.raises(DataError, match="batch 1 of the batch_sampler is empty"):
        next(iter(rank))


def test_a_million_samples_are_drawn_without_a_list_of_a_million() -> None:
    drawn = order.draw_order(
        DataLoader(Numbers(1_000_000), batch_size=256, shuffle=True), seed=0, epoch=0, rank=0, agree=lambda v: list(v)
    )
    assert isinstance(drawn.source, torch.Tensor)
    assert drawn.num_steps == 3907
    assert drawn.step_at(256 * 17) == 17


@pytest.mark.parametrize(("drop_last", "total"), [(False, 100), (True, 94)])
def test_the_rest_of_an_epoch_in_batches_of_another_size(drop_last: bool, total: int) -> None:
    loader = DataLoader(Numbers(100), batch_size=4, drop_last=drop_last)
    drawn = order.draw_order(loader, seed=0, epoch=0, rank=0, agree=list)  # type: ignore[arg-type]
    again = drawn.in_batches_of(9, loader, 10, 40)
    bounds = list(again.bounds)
    assert again.num_steps == (17 if not drop_last else 16) and again.num_samples == total == again.bounds[-1]
    assert bounds == sorted(bounds) and bounds[10:13] == [40, 49, 58] and again.bounds[10:12] == [40, 49]
    assert again.step_at(40) == 10 and again.step_at(58) == 12 and again.step_at(total) == again.num_steps
    with pytest.raises(DataError, match="no step of this loader begins"):
        again.step_at(50)
    with pytest.raises(IndexError):
        again.bounds[len(bounds)]
    later = again.in_batches_of(30, loader, 12, 58)
    assert [later.bounds[step] for step in range(12, later.num_steps)] == ([58, 88] if not drop_last else [58])
