"""A tuple of loaders is read in units: each loader's samples in its own order, whatever the split does."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from evenload.errors import ConfigError, DataError
from evenload.training.data import checks, randomness
from evenload.training.data.cursor import Cursor
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.data.loader import GlobalLoader
from tests.unit.data.fakes import Board, Numbers, lockstep, make_ranks, plan_of

shares_of_three = st.tuples(*[st.integers(0, 6)] * 3).filter(any)


class Shifted(Numbers):
    """Sample i is 1000 + i."""

    def __getitem__(self, index: int) -> int:
        return 1000 + super().__getitem__(index)


def parts_of(batches: list[GlobalBatch]) -> list[list[Any]]:
    """Each loader's samples of a step, over micro-batches and ranks."""
    found: list[list[Any]] = []
    for micro_index in range(batches[0].plan.num_micro):
        for rank, batch in enumerate(batches):
            part = batch.micro(micro_index)
            assert isinstance(part.data, tuple)
            assert part.num_samples == batch.plan.micro[micro_index][rank]
            found = found or [[] for _ in part.data]
            if not part.idle:
                for held, data in zip(found, part.data, strict=True):
                    held += data.tolist()
    return found


def steps_of(ranks: list[GlobalLoader], until_epoch: int) -> Iterator[list[list[Any]]]:
    while ranks[0].epoch < until_epoch:
        for step in lockstep(ranks):
            yield parts_of(step)


def steps_up_to(ranks: list[GlobalLoader], count: int) -> list[list[list[Any]]]:
    """Returns the first steps, and commits them all."""
    found: list[list[list[Any]]] = []
    while len(found) < count:
        for step in lockstep(ranks, commit=False):
            found.append(parts_of(step))
            for rank, batch in zip(ranks, step, strict=True):
                rank.commit(batch)
            if len(found) == count:
                break
    return found


def two(num_first: int, num_second: int, sizes: tuple[int, int] = (4, 6), **settings: Any) -> Any:
    first, second = sizes
    return (
        DataLoader(Numbers(num_first), first, shuffle=True, **settings),
        DataLoader(Shifted(num_second), second, shuffle=True, **settings),
    )


@settings(max_examples=30, deadline=None)
@given(
    num_first=st.integers(2, 15).map(lambda units: 2 * units),
    num_second=st.integers(6, 40),
    changes=st.lists(st.tuples(st.integers(0, 6), shares_of_three, st.sampled_from([1, 2])), min_size=1, max_size=4),
)
def test_any_split_holds_the_same_samples(num_first: int, num_second: int, changes: list[Any]) -> None:
    wanted = list(steps_of(make_ranks(Board((1,)), two(num_first, num_second)), 3))
    board = Board(changes[0][1], changes[0][2])
    ranks = make_ranks(board, two(num_first, num_second))
    found = []
    for number, step in enumerate(steps_of(ranks, 3)):
        found.append(step)
        for from_step, shares, num_micro in changes:
            if from_step == number:
                board.decide(number + 1, shares, num_micro)
    assert found == wanted
    num_steps = -(-num_first // 4)
    assert len(ranks[0]) == num_steps and len(found) == 3 * num_steps
    for epoch in range(3):
        used = [value for step in found[epoch * num_steps : (epoch + 1) * num_steps] for value in step[0]]
        assert sorted(used) == list(range(num_first))
    # The second loader's whole batches follow one another, each sample once in its epoch.
    others = [value - 1000 for step in found for value in step[1]]
    whole = num_second // 6 * 6
    epochs = [others[low : low + whole] for low in range(0, len(others), whole)]
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
    assert len(others) == 3 * (num_first // 2 * 3)


def test_the_loaders_have_orders_of_their_own() -> None:
    (rank,) = make_ranks(Board((1,)), (two(16, 24)[0], two(16, 24)[0], two(16, 24)[0]))
    steps = list(steps_of([rank], 2))
    orders = [[value for step in steps for value in step[index]] for index in range(3)]
    assert len({tuple(values[low : low + 16]) for values in orders for low in (0, 16)}) == 6
    assert rank.batch_size == (4, 4, 4)
    assert rank.unit_name == "units of 1 + 1 + 1 samples"
    assert len(rank.dataset) == 3
    # The first loader's order is the one that it has alone.
    (alone,) = make_ranks(Board((1,)), two(16, 24)[0])
    assert [value for step in lockstep([alone]) for value in step[0].micro(0).data.tolist()] == orders[0][:16]


@settings(max_examples=25, deadline=None)
@given(stop=st.integers(0, 14), shares=shares_of_three, workers_before=st.integers(1, 3))
def test_a_resume_on_other_ranks_continues_every_loader(
    stop: int, shares: tuple[int, ...], workers_before: int
) -> None:
    whole = list(steps_of(make_ranks(Board((1,)), two(18, 20)), 3))
    ranks = make_ranks(Board((1,) * workers_before), two(18, 20))
    found = steps_up_to(ranks, min(stop, len(whole)))
    state = json.loads(json.dumps(ranks[-1].cursor().state_dict()))
    resumed = make_ranks(Board(shares), two(18, 20))
    for rank in resumed:
        rank.load(Cursor.from_state_dict(state))
    assert found + list(steps_of(resumed, 3)) == whole


def test_a_loop_that_was_left_continues_the_others_where_they_were() -> None:
    (rank,) = make_ranks(Board((1,)), two(16, 24))
    found = []
    for batch in rank:
        found.append(parts_of([batch]))
        rank.commit(batch)
        if len(found) == 2:
            break
    found += list(steps_of([rank], 2))
    others = [value for step in found for value in step[1]]
    assert len(found) == 6
    assert sorted(others[:24]) == [1000 + index for index in range(24)]


class Drawn(Sampler[int]):
    """Draws from the global generators, and from one of its own."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.own = random.Random(4)
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        drawn = torch.randperm(self.num_samples).tolist()
        self.own.shuffle(drawn)
        return iter(drawn)


SAMPLERS: dict[str, Any] = {
    "own and global generators": lambda: Drawn(20),
    "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, 21.0), 20),
    "with a generator": lambda: RandomSampler(range(20), generator=torch.Generator().manual_seed(3)),
    "a list": lambda: list(range(19, -1, -1)),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("stop", [1, 5, 8, 11])
def test_the_users_samplers_restart_too(name: str, stop: int) -> None:
    def make() -> Any:
        return DataLoader(Numbers(20), 4, sampler=SAMPLERS[name]()), DataLoader(
            Shifted(20), 6, sampler=SAMPLERS[name]()
        )

    whole = list(steps_of(make_ranks(Board((1,)), make()), 3))
    assert [len(step[1]) for step in whole] == [6] * 15
    if name != "a list":
        assert len({tuple(step[1]) for step in whole}) == 15
    ranks = make_ranks(Board((1, 2)), make)
    found = steps_up_to(ranks, stop)
    cursor = ranks[1].cursor()
    assert cursor == ranks[0].cursor()
    resumed = make_ranks(Board((3, 1, 1)), make)
    for rank in resumed:
        rank.load(cursor)
    assert found + list(steps_of(resumed, 3)) == whole


def test_a_step_planned_anew_has_the_same_samples() -> None:
    ranks = make_ranks(Board((1, 1)), two(16, 24))
    for step in lockstep(ranks):
        before = parts_of(step)
        plan = step[0].plan
        assert plan.num_samples == 2
        for batch in step:
            batch.replan(plan_of(plan.epoch, plan.step, plan.start, 2, (1, 0), 2))
        assert parts_of(step) == before
        assert step[0].whole(0)[0].tolist() + step[0].whole(1)[0].tolist() == before[0]


def test_another_tuple_in_the_middle_of_an_epoch_is_refused() -> None:
    (rank,) = make_ranks(Board((1,)), two(16, 24))
    rank.commit(next(iter(rank)))
    for other in (two(16, 18), two(16, 24, (4, 10)), two(12, 24)):
        (again,) = make_ranks(Board((1,)), other)
        again.load(rank.cursor())
        with pytest.raises(DataError, match="middle of an epoch"):
            next(iter(again))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


ONE = DataLoader(Numbers(8), 4)


@pytest.mark.parametrize(
    ("loaders", "message"),
    [
        ((), "an empty tuple"),
        ((ONE, ONE), "loader 1 of the tuple is in it twice"),
        ((ONE, DataLoader(Stream(), 4)), "loader 1 of the tuple has an iterable dataset"),
        ((DataLoader(Stream(), 4), ONE), "loader 0 of the tuple has an iterable dataset"),
        (
            (ONE, DataLoader(Numbers(8), batch_sampler=BatchSampler(SequentialSampler(Numbers(8)), 4, False))),
            "loader 1 of the tuple has a batch_sampler",
        ),
        ((ONE, (ONE,)), "expected a torch.utils.data.DataLoader, got builtins.tuple"),
        ((ONE, DataLoader(Numbers(8), 4, sampler=Endless())), "its sampler, Endless, has no __len__"),
        ((ONE, DataLoader(Numbers(8), 12)), "its 8 samples are no batch of 12"),
        (
            (DataLoader(Numbers(9), 4), DataLoader(Numbers(8), 6)),
            r"has 9 samples, and its last batch ends within a unit of 2 \+ 3 samples \(1 of 2 are there\): set drop_last=True",
        ),
    ],
)
def test_loaders_that_can_not_be_read_together(loaders: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        checks.check_tuple(loaders)


def test_a_ragged_end_that_is_dropped() -> None:
    loaders = DataLoader(Numbers(9), 4, drop_last=True), DataLoader(Shifted(8), 6)
    (rank,) = make_ranks(Board((1,)), loaders)
    assert [[len(part) for part in step] for step in steps_of([rank], 1)] == [[4, 6], [4, 6]]


def test_generators_are_seeded_by_integers() -> None:
    generators = [torch.Generator(), random.Random(), numpy.random.default_rng(), numpy.random.RandomState()]
    randomness.seed_generators(generators, 1, 2)
    first = randomness.save_generators(generators)
    generators[1].random()
    generators[2].random()
    randomness.seed_generators(generators, 1, 2)
    assert randomness.save_generators(generators) == first
    randomness.seed_generators(generators, 1, 3)
    assert all(one != other for one, other in zip(randomness.save_generators(generators), first, strict=True))
