"""Orders that are computed where they are used: a bijection, or draws, without visible structure, of any number of samples."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from evenload.errors import DataError
from evenload.training.data import order
from evenload.training.data.cursor import Cursor
from evenload.training.data.permutation import KeyedDraws, KeyedPermutation
from tests.unit.data.fakes import Board, Numbers, flat, joined, lockstep, make_ranks

BILLION = 10**9


@pytest.mark.parametrize("num_samples", [*range(1, 70), 255, 256, 257, 1000, 4095, 4096, 4097, 100_003])
def test_every_sample_once(num_samples: int) -> None:
    for key in (0, 1, 2**62):
        found = KeyedPermutation(num_samples, key)[0:num_samples]
        assert np.array_equal(np.sort(found), np.arange(num_samples))


def test_a_part_is_the_part_of_the_whole() -> None:
    permutation = KeyedPermutation(5000, 3)
    whole = permutation[0:5000]
    assert len(permutation) == 5000
    assert np.array_equal(np.concatenate([permutation[low : low + 7] for low in range(0, 5000, 7)]), whole)
    assert np.array_equal(permutation.at(np.array([4999, 0, 77])), whole[[4999, 0, 77]])


def test_a_billion_samples() -> None:
    permutation = KeyedPermutation(BILLION, 5)
    positions = np.unique(np.random.default_rng(0).integers(0, BILLION, 1_000_000))
    found = permutation.at(positions)
    assert found.min() >= 0 and found.max() < BILLION
    assert len(np.unique(found)) == len(positions)


@pytest.mark.parametrize("num_samples", [100_000, BILLION])
def test_no_structure_is_visible(num_samples: int) -> None:
    """Each statistic of 100,000 consecutive positions is within five standard deviations of a random permutation's."""
    count = 100_000
    for key in range(3):
        found = KeyedPermutation(num_samples, key)[0:count].astype(float)
        # Chi square of 1,000 equal cells by 10 parts of the positions; of n = 100,000 itself the cells are full.
        cells = np.histogram2d(found, np.arange(count), bins=[100, 10], range=[[0, num_samples], [0, count]])[0]
        expected = count / 1000
        assert abs(((cells - expected) ** 2).sum() / expected - 999) < 5 * np.sqrt(2 * 999)
        for lag in (1, 2, 3, 256, 1024):
            assert abs(np.corrcoef(found[:-lag], found[lag:])[0, 1]) < 5 / np.sqrt(count)
        assert abs(np.corrcoef(found, np.arange(count))[0, 1]) < 5 / np.sqrt(count)
        # Neighbours are as far apart as two random samples: n / 3 on average.
        assert abs(np.abs(np.diff(found)).mean() / num_samples - 1 / 3) < 5 * 0.24 / np.sqrt(count)
        low_bits = found.astype(np.int64) & 15
        assert abs(np.bincount(low_bits, minlength=16) - count / 16).max() < 5 * np.sqrt(count / 16)
    assert len(np.intersect1d(KeyedPermutation(num_samples, 0)[0:1000], KeyedPermutation(num_samples, 1)[0:1000])) < 40


class _Computed(Numbers):
    """A dataset as long as is wanted."""


def test_an_epoch_of_a_billion_samples_takes_no_memory() -> None:
    loader = DataLoader(_Computed(BILLION), batch_size=256, shuffle=True)
    tracemalloc.start()
    try:
        ranks = make_ranks(Board((3, 1)), loader)
        iterator = lockstep(ranks)
        found = [flat(joined(next(iterator))) for _ in range(3)]
        assert len(ranks[0]) == -(-BILLION // 256)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20
    assert len(set(flat(found))) == 3 * 256
    (again,) = make_ranks(Board((1,)), loader)
    again.load(ranks[0].cursor())
    # Two steps are committed: the third was open.
    assert flat(joined([next(iter(again))])) == found[2]


def test_a_checkpoint_of_a_version_that_drew_another_order() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(_Computed(BILLION), batch_size=256, shuffle=True))
    rank.load(Cursor(step=1, position=256, seed=7, epoch_samples=BILLION))
    with pytest.raises(DataError, match="an earlier version shuffled in another order"):
        next(iter(rank))


def test_usual_sizes_keep_their_order(monkeypatch: Any) -> None:
    def epoch(num_samples: int) -> list[int]:
        (rank,) = make_ranks(Board((1,)), DataLoader(Numbers(num_samples), batch_size=8, shuffle=True))
        return [value for step in lockstep([rank]) for value in flat(joined(step))]

    loader = DataLoader(Numbers(50), batch_size=8, shuffle=True)
    drawn = order.draw_order(loader, seed=7, epoch=0, rank=0, agree=list)  # type: ignore[arg-type]
    assert isinstance(drawn.source, torch.Tensor)
    assert not order.is_computed(loader)
    before = epoch(50)
    monkeypatch.setattr(order, "MAX_DRAWN", 50)
    assert epoch(50) == before
    assert sorted(epoch(51)) == list(range(51))
    assert order.is_computed(DataLoader(Numbers(51), batch_size=8, shuffle=True))
    assert not order.is_computed(DataLoader(Numbers(51), batch_size=8))


@pytest.mark.parametrize(("num_samples", "size"), [(0, 4), (1, 4), (7, 4), (8, 4), (9, 1)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_bounds_are_computed(num_samples: int, size: int, drop_last: bool) -> None:
    loader = DataLoader(Numbers(max(1, num_samples)), batch_size=size, drop_last=drop_last)
    wanted = list(range(0, num_samples - (num_samples % size if drop_last else 0), size))
    wanted.append(num_samples - (num_samples % size if drop_last else 0))
    found = order.regular_bounds(num_samples, loader)
    assert list(found) == wanted == [found[index - len(found)] for index in range(len(found))]
    assert found[1:] == wanted[1:]
    with pytest.raises(IndexError):
        found[len(found)]


def test_draws_with_replacement_are_uniform_and_independent() -> None:
    """Counts of each sample, of pairs of neighbours, and of the repeats of a draw, within five standard deviations."""
    count = 200_000
    for key in range(3):
        found = KeyedDraws(37, 10**10, key)[10**9 : 10**9 + count]
        assert found.min() == 0 and found.max() == 36
        counts = np.bincount(found, minlength=37)
        assert abs(((counts - count / 37) ** 2).sum() / (count / 37) - 36) < 5 * np.sqrt(2 * 36)
        pairs = np.bincount(found[:-1] * 37 + found[1:], minlength=37**2)
        assert abs(((pairs - count / 37**2) ** 2).sum() / (count / 37**2) - 37**2) < 5 * np.sqrt(2) * 37
        other = KeyedDraws(37, 10**10, key + 1)[10**9 : 10**9 + count]
        assert abs((found == other).mean() - 1 / 37) < 5 * np.sqrt(1 / 37 / count)
    draws = KeyedDraws(50, 5000, 3)
    assert len(draws) == 5000
    assert np.array_equal(np.concatenate([draws[low : low + 7] for low in range(0, 5000, 7)]), draws[0:5000])


def test_ten_billion_draws_take_no_memory() -> None:
    """A loop that counts iterations draws with replacement, far more often than it reads (minGPT: 10^10)."""
    dataset = Numbers(100)
    sampler = RandomSampler(dataset, replacement=True, num_samples=10**10)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    tracemalloc.start()
    try:
        ranks = make_ranks(Board((3, 1)), loader)
        iterator = lockstep(ranks)
        found = [flat(joined(next(iterator))) for _ in range(3)]
        assert len(ranks[0]) == 10**10 // 64
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20
    assert all(0 <= value < 100 for step in found for value in step)
    assert found[0] != found[1]
    (again,) = make_ranks(Board((1,)), loader)
    again.load(ranks[0].cursor())
    # Two steps are committed: the third was open.
    assert flat(joined([next(iter(again))])) == found[2]


def test_few_draws_keep_their_order(monkeypatch: Any) -> None:
    def epoch(num_draws: int) -> list[int]:
        dataset = Numbers(20)
        sampler = RandomSampler(dataset, replacement=True, num_samples=num_draws)
        (rank,) = make_ranks(Board((1,)), DataLoader(dataset, batch_size=8, sampler=sampler))
        return [value for step in lockstep([rank]) for value in flat(joined(step))]

    before = epoch(50)
    assert len(set(before)) < 50
    monkeypatch.setattr(order, "MAX_DRAWN", 50)
    assert epoch(50) == before
    assert len(epoch(51)) == 51


def test_too_many_keys_of_another_sampler_are_refused() -> None:
    dataset = Numbers(20)
    sampler = RandomSampler(dataset, replacement=True, num_samples=10**10, generator=torch.Generator())
    (rank,) = make_ranks(Board((1,)), DataLoader(dataset, batch_size=8, sampler=sampler))
    with pytest.raises(DataError, match=r"RandomSampler has 10,000,000,000 keys, .* without a generator"):
        next(iter(rank))
