"""Iterable datasets: the plain loader's batches, split; the same stream on every rank."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from evenload.errors import DataError
from evenload.training.data.stream import PackedSamples, StreamReader
from tests.unit.data.fakes import Board, flat, joined, lockstep, make_ranks


class Stream(IterableDataset[int]):
    """0, 1, 2, ..., sharded over workers as torch's documentation does it; shuffled if asked for."""

    def __init__(self, num_samples: int, shuffled: bool = False) -> None:
        self.num_samples = num_samples
        self.shuffled = shuffled

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        mine = list(range(self.num_samples))
        if info is not None:
            assert isinstance(info.dataset, Stream)
            mine = mine[info.id :: info.num_workers]
        if self.shuffled:
            random.shuffle(mine)
            yield from (value for value in mine if torch.rand(()) < 2)
        else:
            yield from mine


class Killed(Stream):
    """Its worker is killed in the middle."""

    def __iter__(self) -> Iterator[int]:
        for value in super().__iter__():
            if value == 20 and get_worker_info() is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            yield value


class Sized(Stream):
    def __len__(self) -> int:
        return self.num_samples


@settings(max_examples=30, deadline=None)
@given(
    num_samples=st.integers(0, 40),
    batch_size=st.integers(1, 11),
    drop_last=st.booleans(),
    shares=st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(0, 5)),
    num_micro=st.sampled_from([1, 3]),
)
def test_the_ranks_together_hold_the_plain_loaders_batches(
    num_samples: int, batch_size: int, drop_last: bool, shares: Any, num_micro: int
) -> None:
    loader = DataLoader(Stream(num_samples), batch_size=batch_size, drop_last=drop_last)
    ranks = make_ranks(Board(shares, num_micro), loader)
    assert [flat(joined(step)) for step in lockstep(ranks)] == [batch.tolist() for batch in loader]
    assert {rank.epoch for rank in ranks} == {1}


def test_workers_give_the_plain_loaders_batches_too() -> None:
    loader = DataLoader(Stream(43), batch_size=5, num_workers=2)
    plain = [batch.tolist() for batch in loader]
    ranks = make_ranks(Board((2, 1), num_micro=2), loader)
    assert [flat(joined(step)) for step in lockstep(ranks)] == plain
    assert {len(step) for step in plain} == {5, 2, 1}  # ragged where a worker ends: as the user would get it
    assert not multiprocessing.active_children()


@pytest.mark.filterwarnings("ignore:unclosed file <_io.BufferedRandom:ResourceWarning")  # as in test_workers.py
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_is_killed_is_named_where_it_is_read() -> None:
    """Torch's handler of SIGCHLD would raise wherever the script is then, in loss_fn for instance."""
    assert len(list(DataLoader(Stream(4), num_workers=1))) == 4  # a plain loader, which leaves the handler behind
    (rank,) = make_ranks(Board((1,)), DataLoader(Killed(43), batch_size=5, num_workers=1))
    found = []
    with pytest.raises(DataError, match=r"DataLoader worker 0 of this rank \(pid \d+\) was killed by SIGKILL"):
        for step in lockstep([rank]):
            time.sleep(0.3)
            found.append(flat(joined(step)))
    rank.close()
    gc.collect()  # of what torch left of the worker, not in the middle of another test
    assert found[0] == [0, 1, 2, 3, 4] and not multiprocessing.active_children()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_randomness_of_the_stream_is_the_same_on_all_ranks_and_after_a_resume(num_workers: int) -> None:
    persistent = num_workers > 0
    loader = DataLoader(Stream(40, shuffled=True), batch_size=6, num_workers=num_workers)
    kept = DataLoader(Stream(40, shuffled=True), batch_size=6, num_workers=num_workers, persistent_workers=persistent)
    (alone,) = make_ranks(Board((1,)), loader)
    whole = []
    for _ in range(2):
        for step in lockstep([alone]):
            whole.append(flat(joined(step)))
            torch.rand(5)
            random.random()
    assert sorted(flat(whole[: 7 if num_workers == 0 else 8])) == list(range(40))
    assert whole[0] != whole[len(whole) // 2]
    ranks = make_ranks(Board((1, 2)), lambda: loader)
    with_kept_workers = make_ranks(Board((1,)), kept)
    for tried in (ranks, with_kept_workers):
        found = [flat(joined(step)) for _ in range(2) for step in lockstep(tried)]
        assert found == whole
    # A resume in the middle of the second epoch.
    ranks = make_ranks(Board((1, 2)), lambda: loader)
    found = []
    for step in lockstep(ranks):
        found.append(flat(joined(step)))
    for step in lockstep(ranks, commit=False):
        found.append(flat(joined(step)))
        for rank, batch in zip(ranks, step, strict=True):
            rank.commit(batch)
        if batch.epoch_step == 2:
            break
    resumed = make_ranks(Board((3, 1, 1)), lambda: kept if persistent else loader)
    for rank in resumed:
        rank.load(ranks[1].cursor())
    found += [flat(joined(step)) for step in lockstep(resumed)]
    assert found == whole
    for rank in [*with_kept_workers, *resumed]:
        rank.close()
    assert not multiprocessing.active_children()


def test_spawned_workers_read_the_same_stream() -> None:
    forked = DataLoader(Stream(20, shuffled=True), batch_size=4, num_workers=1)
    spawned = DataLoader(Stream(20, shuffled=True), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    found = [[flat(joined(step)) for step in lockstep(make_ranks(Board((1,)), loader))] for loader in (forked, spawned)]
    assert found[0] == found[1]


def test_streams_that_differ_are_an_error_not_a_hang() -> None:
    lengths = iter([12, 8])
    ranks = make_ranks(Board((1, 1)), lambda: DataLoader(Stream(next(lengths)), batch_size=4))
    with pytest.raises(DataError, match=r"step 2: rank 1 read 0 samples where rank 0 read 4.*don't shard it by rank"):
        list(lockstep(ranks))


def test_a_stream_that_changed_since_the_checkpoint_is_refused() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(Stream(20), batch_size=4))
    for batch in rank:
        rank.commit(batch)
        if batch.epoch_step == 2:
            break
    (other,) = make_ranks(Board((1,)), DataLoader(Stream(20), batch_size=3))
    other.load(rank.cursor())
    with pytest.raises(DataError, match="after 12 samples in 3 batches of the stream; now its first 3 batches hold 9"):
        next(iter(other))


def test_the_length_is_the_plain_loaders() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(Sized(21), batch_size=4))
    assert len(rank) == 6
    assert len(list(rank)) == 6


def test_replan_and_whole_of_a_stream() -> None:
    from tests.unit.data.fakes import plan_of

    ranks = make_ranks(Board((1, 1)), DataLoader(Stream(24), batch_size=8))
    found = []
    for step in lockstep(ranks):
        plan = step[0].plan
        for batch in step:
            batch.replan(plan_of(plan.epoch, plan.step, plan.start, plan.num_samples, (1, 3), 2))
        assert step[1].whole(1).tolist() == joined(step)[1]
        found += flat(joined(step))
    assert found == list(range(24))


def test_collation_happens_on_the_ranks_own_samples() -> None:
    sizes = []

    def collate(samples: list[int]) -> Any:
        sizes.append(len(samples))
        return torch.tensor(samples)

    ranks = make_ranks(Board((3, 1)), DataLoader(Stream(16), batch_size=8, num_workers=1, collate_fn=collate))
    assert [flat(joined(step)) for step in lockstep(ranks)] == [list(range(8)), list(range(8, 16))]
    assert sizes == [6, 2, 6, 2]


def test_samples_survive_the_way_from_a_worker() -> None:
    samples = [
        {"x": torch.arange(6.0).reshape(2, 3).T, "name": "a", "n": None},
        (torch.tensor(True), torch.empty(0, 4, dtype=torch.bfloat16), torch.tensor(2, dtype=torch.int16)),
        [torch.ones(3, dtype=torch.complex64), torch.ones(2, requires_grad=True), 5],
    ]
    packed = PackedSamples.pack(samples)
    assert len(packed) == 3
    assert torch.equal(packed[0]["x"], samples[0]["x"])  # type: ignore[call-overload, index]
    assert (packed[0]["name"], packed[0]["n"]) == ("a", None)
    assert packed[1][0].item() is True
    assert (packed[1][1].shape, packed[1][1].dtype) == ((0, 4), torch.bfloat16)
    assert (packed[1][2].item(), packed[1][2].dtype) == (2, torch.int16)
    assert packed[2][0].dtype == torch.complex64
    assert packed[-1][1].requires_grad
    assert packed[1:][1][2] == 5
    packed[0]["x"].add_(1)  # writable, and no other copy is touched
    assert torch.equal(packed[0]["x"], samples[0]["x"])  # type: ignore[call-overload, index]
    with pytest.raises(IndexError):
        packed[3]


def test_a_generator_of_collate_fn_is_seeded_by_the_sample() -> None:
    own = torch.Generator().manual_seed(1)
    before = own.get_state()

    def collate(samples: list[int]) -> torch.Tensor:
        return torch.rand((), generator=own)

    reader = StreamReader(DataLoader(Stream(16), batch_size=8, collate_fn=collate), seed=0, keyed=True, pin=False)
    reader.begin(0)
    first, other, again = (float(reader.collate([low], low)) for low in (0, 4, 0))
    reader.close()
    assert first == again != other and torch.equal(own.get_state(), before)
