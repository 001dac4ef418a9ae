"""Evaluation: every sample once, and equally many batches on every rank."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, WeightedRandomSampler

from evenload.errors import ConfigError, DataError
from evenload.training.data import evaluate
from evenload.training.data.evaluate import cut_parts, cut_rounds, evaluation_batches
from tests.ranks.data.test_randomness import Noisy
from tests.ranks.data.test_streams import Stream
from tests.unit.data.fakes import CPU, Board, Numbers, make_ranks


def side_by_side(loader: Any, weights: list[float], **settings: Any) -> list[list[Any]]:
    """All batches of every rank, one rank after the other; rank 0 first, as the others hear from it."""
    board = Board((1,) * len(weights))
    return [
        list(
            evaluation_batches(
                loader() if callable(loader) and not isinstance(loader, DataLoader) else loader,
                rank=rank,
                world_size=len(weights),
                weights=weights,
                agree=board.planner(rank).agree,
                **{"seed": 7, "epoch": 0, "device": CPU, **settings},
            )
        )
        for rank in range(len(weights))
    ]


def in_order(ranks: list[list[Any]]) -> list[int]:
    rounds = max(len(batches) for batches in ranks)
    return [
        value for t in range(rounds) for batches in ranks for batch in batches[t : t + 1] for value in batch.tolist()
    ]


weights_of_ranks = st.lists(st.floats(0, 100), min_size=1, max_size=5)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(1, 50),
    batch_size=st.integers(1, 20),
    drop_last=st.booleans(),
    weights=weights_of_ranks,
    stream=st.booleans(),
)
def test_every_sample_once_and_equally_many_batches(
    num_samples: int, batch_size: int, drop_last: bool, weights: list[float], stream: bool
) -> None:
    if drop_last and num_samples < batch_size:
        return
    data: Any = Stream(num_samples) if stream else Numbers(num_samples)
    loader = DataLoader(data, batch_size=batch_size, drop_last=drop_last)
    plain = [batch.tolist() for batch in loader]
    ranks = side_by_side(loader, weights)
    assert in_order(ranks) == [value for batch in plain for value in batch]
    members = [rank for rank, weight in enumerate(weights) if weight > 0] or list(range(len(weights)))
    assert all(not batches for rank, batches in enumerate(ranks) if rank not in members)  # left out
    ranks = [ranks[rank] for rank in members]
    used = sum(len(batch) for batch in plain)
    if used >= len(members):
        assert len({len(batches) for batches in ranks}) == 1
        assert all(len(batch) >= 1 for batches in ranks for batch in batches)
    else:
        assert [len(batches) for batches in ranks] == [int(index < used) for index in range(len(members))]
    if len(weights) == 1:
        assert [batch.tolist() for batch in ranks[0]] == plain


@given(num_samples=st.integers(0, 300), weights=weights_of_ranks)
def test_parts_follow_the_weights(num_samples: int, weights: list[float]) -> None:
    parts = cut_parts(num_samples, weights)
    assert sum(parts) == num_samples
    members = [rank for rank, weight in enumerate(weights) if weight > 0] or list(range(len(weights)))
    assert all(part == 0 for rank, part in enumerate(parts) if rank not in members)
    parts, weights = [parts[rank] for rank in members], [weights[rank] for rank in members]
    if num_samples >= len(weights):
        assert min(parts) >= 1
        if sum(weights) > 0 and min(weights) * num_samples >= sum(weights):
            assert all(
                abs(part - num_samples * weight / sum(weights)) < 1 + 1e-9
                for part, weight in zip(parts, weights, strict=True)
            )
    else:
        assert parts == [1] * num_samples + [0] * (len(weights) - num_samples)


def test_parts_and_rounds_by_hand() -> None:
    assert cut_parts(10, [3, 1]) == [8, 2]
    assert cut_parts(10, [1, 0]) == [10, 0]
    assert cut_parts(3, [0, 0, 0]) == [1, 1, 1]
    assert cut_rounds([0, 4, 8, 10], 2) == [(0, 4), (4, 8), (8, 10)]
    assert cut_rounds([0, 4, 8, 9], 2) == [(0, 3), (3, 6), (6, 9)]
    assert cut_rounds([0, 1, 2, 3, 4, 5], 2) == [(0, 3), (3, 5)]
    assert cut_rounds([0, 2], 3) == [(0, 2)]
    assert cut_rounds([0], 3) == []


def test_samplers_batch_samplers_and_workers_are_honoured() -> None:
    weighted = DataLoader(Numbers(30), 4, sampler=WeightedRandomSampler(torch.arange(30.0), 22), num_workers=1)
    found = in_order(side_by_side(weighted, [1.0, 3.0]))
    assert len(found) == 22
    assert found == in_order(side_by_side(weighted, [1.0]))
    lists = DataLoader(Numbers(30), batch_sampler=[[3, 1, 2], [9, 8], [7, 7, 7, 7]])
    ranks = side_by_side(lists, [1.0, 1.0])
    assert [[batch.tolist() for batch in batches] for batches in ranks] == [[[3, 1], [9], [7, 7]], [[2], [8], [7, 7]]]
    shuffled = DataLoader(Numbers(30), 4, shuffle=True)
    assert in_order(side_by_side(shuffled, [1.0, 3.0])) == in_order(side_by_side(shuffled, [1.0]))
    assert in_order(side_by_side(shuffled, [1.0], epoch=1)) != in_order(side_by_side(shuffled, [1.0]))
    assert not multiprocessing.active_children()


def test_randomness_is_keyed_by_sample() -> None:
    def rows(weights: list[float], **loader: Any) -> set[Any]:
        ranks = side_by_side(DataLoader(Noisy(20), batch_size=6, **loader), weights)
        return {tuple(row) for batches in ranks for batch in batches for row in batch.tolist()}

    state = torch.get_rng_state()
    assert rows([1.0]) == rows([1.0, 2.0]) == rows([1.0, 2.0], num_workers=2)
    assert torch.equal(state, torch.get_rng_state())


PIDS = 10**9


class WhoReads(Numbers):
    """The index of each sample, and the process that read it."""

    def __getitem__(self, index: int) -> int:
        return index * PIDS + os.getpid()


@pytest.mark.parametrize("stream", [False, True])
def test_persistent_workers_stay_until_they_are_closed(stream: bool) -> None:
    data: Any = Stream(12) if stream else WhoReads(12)
    loader = DataLoader(data, batch_size=3, num_workers=2, persistent_workers=True)
    before = in_order(side_by_side(loader, [1.0]))
    workers = {child.pid for child in multiprocessing.active_children()}
    assert len(workers) == 2
    for _ in evaluation_batches(
        loader, rank=0, world_size=1, weights=[1.0], agree=lambda v: list(v or []), seed=7, epoch=0, device=CPU
    ):
        break  # left in the middle, begun again
    after = in_order(side_by_side(loader, [1.0]))
    assert [sample // PIDS for sample in before] == [sample // PIDS for sample in after]
    assert {child.pid for child in multiprocessing.active_children()} == workers
    evaluate.close_persistent_workers()
    assert not multiprocessing.active_children()
    if stream:
        assert before == after
    else:
        assert [sample // PIDS for sample in before] == list(range(12))
        assert {sample % PIDS for sample in before} == {sample % PIDS for sample in after} == workers


@pytest.mark.usefixtures("torch_looks_often")
def test_kept_workers_end_with_the_users_loader() -> None:
    loader = DataLoader(Numbers(12), batch_size=3, num_workers=1, persistent_workers=True)
    side_by_side(loader, [1.0])
    assert len(multiprocessing.active_children()) == 1
    del loader
    import gc

    gc.collect()
    assert not multiprocessing.active_children()
    assert len(evaluate._persistent_readers) == 0


def test_leaving_an_evaluation_ends_its_workers() -> None:
    loader = DataLoader(Numbers(40), batch_size=3, num_workers=2)
    for _ in evaluation_batches(
        loader, rank=0, world_size=1, weights=[1.0], agree=lambda v: list(v or []), seed=7, epoch=0, device=CPU
    ):
        break
    assert not multiprocessing.active_children()


def test_wrong_uses_are_refused() -> None:
    (prepared,) = make_ranks(Board((1,)), DataLoader(Numbers(4), batch_size=2))
    with pytest.raises(ConfigError, match="given to prepare, which is for training"):
        side_by_side(prepared, [1.0])
    with pytest.raises(ConfigError, match="expected 1 speeds, finite"):
        side_by_side(DataLoader(Numbers(4)), [float("nan")])
    with pytest.raises(DataError, match="is empty"):
        side_by_side(DataLoader(Numbers(0)), [1.0])


def test_streams_that_differ_are_an_error_not_a_hang() -> None:
    lengths = iter([12, 8])
    with pytest.raises(DataError, match="evaluation: rank 1 read 0 samples where rank 0 read 4"):
        side_by_side(lambda: DataLoader(Stream(next(lengths)), batch_size=4), [1.0, 1.0])


def test_a_stream_that_shards_itself_by_rank_is_an_error() -> None:
    firsts = iter([0, 100])

    class Shard(Stream):
        def __init__(self, first: int) -> None:
            super().__init__(12)
            self.first = first

        def __iter__(self) -> Iterator[int]:
            return (value + self.first for value in super().__iter__())

    with pytest.raises(DataError, match="evaluation: rank 1 read other samples of the iterable dataset than rank 0"):
        side_by_side(lambda: DataLoader(Shard(next(firsts)), batch_size=4), [1.0, 1.0])
