"""Samplers and streams that give each rank another part are refused; those that draw at random, each rank for itself, are not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from evenload.errors import DataError
from tests.unit.data.fakes import Board, Numbers, flat, joined, lockstep, make_ranks

DATA = Numbers(64)


class Own(Sampler[Any]):
    """Yields what `draw` returns; counts its draws."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw
        self.num_draws = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_draws += 1
        return iter(self.draw())

    def __len__(self) -> int:
        return 32


def shuffled_part(rank: int) -> list[int]:
    found: list[int] = torch.randperm(64, generator=torch.Generator().manual_seed(5)).tolist()[rank::2]
    return found


def batches_of(rank: int) -> list[range]:
    return [range(low + rank, low + 16, 2) for low in range(0, 64, 16)]


def noisy(_: int) -> Any:
    return np.random.default_rng().permutation(64)[:32]


def fixed_order(rank: int) -> Any:
    return np.random.default_rng(rank).permutation(64)


REFUSED = {
    "strides": lambda rank: DataLoader(DATA, 8, sampler=Own(lambda: range(rank, 64, 2))),
    "shuffled": lambda rank: DataLoader(DATA, 8, sampler=Own(lambda: shuffled_part(rank))),
    "a tensor": lambda rank: DataLoader(DATA, 8, sampler=torch.arange(rank, 64, 2)),
    "batches": lambda rank: DataLoader(DATA, batch_sampler=Own(lambda: batches_of(rank))),
    "with its own noise": lambda rank: DataLoader(
        DATA, 8, sampler=Own(lambda: np.random.default_rng().permutation(np.arange(rank, 64, 2)))
    ),
}
LEGITIMATE = {
    "random": lambda rank: DataLoader(DATA, 8, sampler=RandomSampler(DATA, replacement=True)),
    "weighted": lambda rank: DataLoader(DATA, 8, sampler=WeightedRandomSampler(torch.arange(64.0), 32)),
    "other generators": lambda rank: DataLoader(
        DATA, 8, sampler=WeightedRandomSampler(torch.ones(64), 32, generator=torch.Generator().manual_seed(rank))
    ),
    "hidden generators": lambda rank: DataLoader(DATA, 8, sampler=Own(lambda: noisy(rank))),
    "a subset drawn on each rank": lambda rank: DataLoader(
        DATA, 8, sampler=np.random.default_rng(rank).permutation(64)[:32].tolist()
    ),
    "another order": lambda rank: DataLoader(DATA, 8, sampler=Own(lambda: fixed_order(rank))),
    "keys that can't be compared": lambda rank: DataLoader(DATA, 8, sampler=Own(lambda: [{rank}] * 8)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_sampler_that_depends_on_the_rank_is_refused(name: str) -> None:
    ranks_of = itertools.count()
    ranks = make_ranks(Board((1, 1)), lambda: REFUSED[name](next(ranks_of)))
    with pytest.raises(DataError, match=r"on rank 1 \(.*: 32\) than on rank 0 \(.*shuffle=True"):
        next(lockstep(ranks))


@pytest.mark.parametrize("name", LEGITIMATE)
def test_other_samplers_are_drawn_on_rank_0_alone(name: str) -> None:
    ranks_of = itertools.count()
    ranks = make_ranks(Board((1, 1)), lambda: LEGITIMATE[name](next(ranks_of)))
    if name == "keys that can't be compared":
        next(zip(*map(iter, ranks), strict=True))
        return
    for _ in range(2):
        assert sum(len(flat(joined(step))) for step in lockstep(ranks)) in (32, 64)


def test_draws_change_no_generator_and_every_rank_draws_once_an_epoch() -> None:
    samplers = [Own(lambda: torch.randperm(64).tolist()[:32]) for _ in range(2)]
    numbers = iter(samplers)
    ranks = make_ranks(Board((1, 1)), lambda: DataLoader(DATA, 8, sampler=next(numbers)))
    before = torch.get_rng_state()
    for _ in range(2):
        list(lockstep(ranks))
    assert torch.equal(torch.get_rng_state(), before)
    assert [sampler.num_draws for sampler in samplers] == [2, 2]  # each may count its epochs


def test_a_sampler_that_counts_its_epochs_stays_equal() -> None:
    """Any rank may become rank 0, and must then draw the epoch that follows."""

    def make() -> DataLoader[Any]:
        own = Own(lambda: range(own.num_draws, 64, 2))
        return DataLoader(DATA, 8, sampler=own)

    ranks = make_ranks(Board((1, 1)), make)
    for _ in range(3):
        list(lockstep(ranks))


CHANGED = {
    "its order": lambda keys, rank: keys.reverse() if rank else None,
    "much of it": lambda keys, rank: keys.__setitem__(slice(0, 8), keys[7::-1]) if rank else None,
}
SAME_ORDER = {
    "on all ranks": lambda keys, rank: keys.reverse(),
    "by rounding": lambda keys, rank: keys.__setitem__(slice(0, 2), keys[1::-1]) if rank else None,
    "at random from now on": lambda keys, rank: keys.append(None) if rank else None,
}


def _changed_after_an_epoch(change: Callable[[list[Any], int], None]) -> None:
    """Let each rank change the keys of its own sampler after the first epoch, and read the second."""
    held: list[list[Any]] = []

    def make() -> DataLoader[Any]:
        keys: list[Any] = list(range(32))
        held.append(keys)
        return DataLoader(DATA, 8, sampler=Own(lambda: keys if None not in keys else noisy(0)))

    ranks = make_ranks(Board((1, 1)), make)
    list(lockstep(ranks))
    for rank, keys in enumerate(held):
        change(keys, rank)
    list(lockstep(ranks))


@pytest.mark.parametrize("name", CHANGED)
def test_a_sampler_that_one_rank_changes_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"drew the same samples on all ranks before, and now others on rank 1 \("):
        _changed_after_an_epoch(CHANGED[name])


@pytest.mark.parametrize("name", SAME_ORDER)
def test_other_changes_of_a_sampler_are_fine(name: str) -> None:
    _changed_after_an_epoch(SAME_ORDER[name])


class Stream(IterableDataset[Any]):
    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        yield from self.read()


def sample(index: int) -> dict[str, Any]:
    return {"x": torch.arange(16.0) * index, "text": "a text"}


def image(index: int, noise: int = 0) -> Any:
    pixels = np.random.default_rng(index).integers(1, 250, (8, 8)) + np.random.default_rng(noise).integers(0, 2, (8, 8))
    return pixels.astype(np.uint8)


SHARDED = {
    "numbers": lambda rank: range(rank, 64, 2),
    "tensors": lambda rank: map(sample, range(rank + 1, 65, 2)),
    "images": lambda rank: map(image, range(rank, 64, 2)),
    "texts": lambda rank: map(str, range(rank, 64, 2)),
}
SAME = {
    "an image decoded on unlike machines": lambda rank: [image(index, rank) for index in range(32)],
    "augmented on each rank": lambda rank: [
        (index, np.random.default_rng(100 * rank + index).normal(size=4)) for index in range(32)
    ],
    "files in other folders": lambda rank: [f"/disk{rank}/{index}.jpg" for index in range(32)],
    "sound decoded on unlike machines": lambda rank: [
        (1000 * np.sin(np.arange(64) * (1 + index)) + rank).astype(np.int16) for index in range(32)
    ],
    "noise of its own": lambda rank: np.random.default_rng().normal(size=(32, 4)),
    "seeded for all": lambda rank: torch.randperm(32).tolist(),
}


def stream_ranks(read: Callable[[int], Any], **settings: Any) -> Any:
    numbers = itertools.count()

    def loader() -> DataLoader[Any]:
        rank = next(numbers)
        return DataLoader(Stream(lambda: read(rank)), 8, collate_fn=list, **settings)

    return make_ranks(Board((1, 1)), loader)


@pytest.mark.parametrize("name", SHARDED)
def test_a_stream_that_shards_itself_by_rank_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"step 0: rank 1 read other samples .* Let it yield all samples on every rank"):
        next(lockstep(stream_ranks(SHARDED[name])))


@pytest.mark.parametrize("name", SAME)
def test_streams_with_the_same_samples_or_random_ones_are_read(name: str) -> None:
    ranks = stream_ranks(SAME[name])
    for _ in range(2):
        assert [batches[1].num_samples for batches in lockstep(ranks)] == [8] * 4
