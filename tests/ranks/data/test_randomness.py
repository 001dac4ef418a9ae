"""The same sample draws the same numbers, whoever reads it."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from evenload.training.data import randomness
from tests.unit.data.fakes import Board, Numbers, lockstep, make_ranks


class Noisy(Numbers):
    """Sample i with a draw of each global generator."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), torch.rand(()).item(), random.random(), numpy.random.rand()]).double()


class NoisyInBatches(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def rows(shares: tuple[int, ...], num_micro: int = 1, epochs: int = 2, **loader: Any) -> dict[tuple[int, int], Any]:
    """What each sample drew, by (epoch, sample)."""
    settings = {"batch_size": 9, "shuffle": True, **loader}
    keyed = settings.pop("keyed", True)
    dataset = settings.pop("dataset", Noisy(40))
    ranks = make_ranks(Board(shares, num_micro), DataLoader(dataset, **settings), keyed_rng=keyed)
    found = {}
    for _ in range(epochs):
        for step in lockstep(ranks):
            for micro_index in range(step[0].plan.num_micro):
                for batch in step:
                    part = batch.micro(micro_index)
                    for row in part.data.tolist() if not part.idle else []:
                        found[batch.epoch, int(row[0])] = tuple(row[1:])
                        torch.rand(3)  # as the model's dropout does
                        random.random()
    return found


OF_THE_SCRIPT = random.Random(5)


def named() -> float:
    return OF_THE_SCRIPT.random()


class Flip:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)

    def __call__(self, number: float) -> float:
        return number + torch.rand((), generator=self.generator).item()


class NoisyByItsOwn(Numbers):
    """Draws from generators of its own: an attribute, one of a transform, and one that a function names."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.rng = numpy.random.default_rng(3)
        self.secure = random.SystemRandom()  # it has no state
        self.transforms = [Flip()]

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), self.rng.random(), self.transforms[0](0.0), named()]).double()


class NoisyByItsOwnInBatches(NoisyByItsOwn):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [NoisyByItsOwn, NoisyByItsOwnInBatches])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("shares", "num_micro"), [((1,), 1), ((5, 1), 1), ((0, 1, 3), 3)])
def test_generators_of_the_scripts_own_are_keyed_and_stay_as_they_were(
    kind: type[NoisyByItsOwn], num_workers: int, shares: tuple[int, ...], num_micro: int
) -> None:
    wanted, data, before = rows((1,), dataset=NoisyByItsOwn(40)), kind(40), OF_THE_SCRIPT.getstate()
    assert rows(shares, num_micro, num_workers=num_workers, dataset=data) == wanted
    assert all(len({row[column] for row in wanted.values()}) == 80 for column in range(3))
    assert OF_THE_SCRIPT.getstate() == before and data.rng.random() == numpy.random.default_rng(3).random()


class Collator:
    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(1)

    def collate(self, samples: list[Any]) -> Any:
        return torch.tensor([self.rng.random()])


def collate_with(own: Any, samples: list[Any]) -> Any:
    return torch.tensor([own.random()])


@pytest.mark.parametrize("kind", ["named", "argument", "attribute"])
def test_a_generator_of_collate_fn_draws_others_for_each_part(kind: str) -> None:
    own = numpy.random.default_rng(1)
    kinds: dict[str, Any] = {
        "named": lambda samples: torch.tensor([own.random()]),
        "argument": functools.partial(collate_with, own),
        "attribute": Collator().collate,
    }
    ranks = make_ranks(Board((2, 3)), DataLoader(Numbers(20), batch_size=5, collate_fn=kinds[kind]))
    assert len({batch.micro(0).data.item() for step in lockstep(ranks) for batch in step}) == 8


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize(("shares", "num_micro"), [((1,), 1), ((5, 1), 1), ((0, 1, 3), 3)])
def test_the_same_sample_draws_the_same_whatever_the_split(
    num_workers: int, shares: tuple[int, ...], num_micro: int
) -> None:
    wanted = rows((1,))
    assert rows(shares, num_micro, num_workers=num_workers) == wanted
    assert len(set(wanted.values())) == len(wanted) == 80  # each draw is another one, in each epoch


def test_the_same_after_a_change_of_the_plan_and_a_resume() -> None:
    wanted = rows((1,), epochs=1)
    loader = DataLoader(Noisy(40), batch_size=9, shuffle=True)
    board = Board((1, 1))
    ranks = make_ranks(board, loader)
    found = []
    for step in lockstep(ranks, commit=False):
        found += [row for batch in step for row in batch.micro(0).data.tolist()]
        for rank, batch in zip(ranks, step, strict=True):
            rank.commit(batch)
        board.decide(step[0].global_step + 1, (1, 8))
        if step[0].epoch_step == 2:
            break
    (resumed,) = make_ranks(Board((1,)), loader)
    resumed.load(ranks[1].cursor())
    for batch in resumed:
        found += batch.micro(0).data.tolist()
    assert {(0, int(row[0])): tuple(row[1:]) for row in found} == wanted


def test_a_subset_of_a_plain_dataset_is_keyed_by_sample() -> None:
    subset = Subset(Noisy(40), range(40))
    assert rows((1, 2), dataset=subset) == rows((1,))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_with_getitems_that_draws_is_keyed_by_sample(num_workers: int) -> None:
    wanted = rows((1,))
    for shares, num_micro in (((1,), 1), ((5, 1), 1), ((0, 1, 3), 3)):
        assert rows(shares, num_micro, dataset=NoisyInBatches(40), num_workers=num_workers) == wanted


class SometimesNoisyInBatches(Numbers):
    """Draws for one sample in five only, in the order of the call."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.calls: list[int] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(len(indices))
        return [torch.tensor([float(index), 0.0 if index % 5 else torch.rand(()).item()]) for index in indices]


def test_a_dataset_with_getitems_that_draws_now_and_then() -> None:
    wanted = rows((1,), 9, dataset=SometimesNoisyInBatches(40))
    for shares in ((1,), (2, 1), (4, 1, 1)):
        assert rows(shares, dataset=SometimesNoisyInBatches(40)) == wanted


def test_a_dataset_with_getitems_that_draws_nothing_is_read_in_batches() -> None:
    data = SometimesNoisyInBatches(40)
    loader = DataLoader(Subset(data, [index for index in range(40) if index % 5]), batch_size=8)
    for step in lockstep(make_ranks(Board((1,)), loader)):
        step[0].micro(0)
    assert data.calls == [8, 8, 8, 8]


def test_a_dataset_whose_getitems_returns_a_whole_batch() -> None:
    class Whole(Numbers):
        def __getitems__(self, indices: list[int]) -> Any:
            return {"index": torch.tensor(indices), "noise": torch.rand(len(indices))}

    loader = DataLoader(Whole(12), batch_size=4, collate_fn=lambda batch: batch["index"])
    assert [step[0].micro(0).data.tolist() for step in lockstep(make_ranks(Board((1,)), loader))] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_keying_can_be_switched_off() -> None:
    torch.manual_seed(0)
    first = rows((1,), keyed=False)
    torch.manual_seed(5)
    assert rows((1,), keyed=False) != first
    torch.manual_seed(0)
    random.seed(1)
    numpy.random.seed(1)
    assert rows((1,), keyed=False) == first


def test_the_main_process_draws_as_if_nothing_was_read() -> None:
    def draws(read: bool) -> Any:
        torch.manual_seed(2)
        random.seed(2)
        numpy.random.seed(2)
        (rank,) = make_ranks(Board((1,)), DataLoader(Noisy(20), batch_size=5, shuffle=True))
        found = []
        for batch in rank:
            if read:
                batch.micro(0)
            found.append((torch.rand(()).item(), random.random(), numpy.random.rand(), torch.randn(()).item()))
        return found

    assert draws(True) == draws(False)


def test_collation_is_keyed_by_micro_batch() -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.tensor([torch.rand(()).item()])

    def draws(shares: tuple[int, ...], num_workers: int = 0) -> Any:
        ranks = make_ranks(
            Board(shares), DataLoader(Numbers(20), batch_size=5, collate_fn=collate, num_workers=num_workers)
        )
        return [[batch.micro(0).data.item() for batch in step] for step in lockstep(ranks)]

    assert draws((2, 3)) == draws((2, 3), num_workers=2)
    assert len({value for step in draws((2, 3)) for value in step}) == 8


def test_mix_spreads_neighbours() -> None:
    seeds = {
        randomness.mix(seed, epoch, position) for seed in range(10) for epoch in range(10) for position in range(99)
    }
    assert len(seeds) == 9900
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > 9890
    assert randomness.mix(1, 2) != randomness.mix(2, 1)


def test_generators_can_be_saved_as_text_and_put_back() -> None:
    class Owner:
        def __init__(self) -> None:
            self.a = torch.Generator().manual_seed(1)
            self.b = random.Random(1)
            self.c = numpy.random.default_rng(1)
            self.d = numpy.random.RandomState(1)
            self.e = self.a
            self.f = "no generator"

        def draw(self) -> Any:
            return torch.rand((), generator=self.a).item(), self.b.random(), self.c.random(), self.d.rand()

    owner = Owner()
    generators = randomness.find_generators([owner])
    assert len(generators) == 4
    states = randomness.save_generators(generators)
    assert all(isinstance(state, str) for state in states)
    first = owner.draw()
    assert owner.draw() != first
    randomness.load_generators(generators, states)
    assert owner.draw() == first
