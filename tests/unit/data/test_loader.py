"""Every sample once, in the global order, whatever the split does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from evenload.errors import DataError, StepError
from evenload.training.data.cursor import Cursor
from tests.unit.data.fakes import Board, Numbers, flat, joined, lockstep, make_ranks, plan_of

shares_of_three = st.tuples(*[st.integers(0, 9)] * 3).filter(any)


@settings(max_examples=40, deadline=None)
@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    changes=st.lists(st.tuples(st.integers(0, 6), shares_of_three, st.sampled_from([1, 3])), min_size=1, max_size=4),
)
def test_the_ranks_together_hold_the_global_batch_in_order(
    num_samples: int, batch_size: int, drop_last: bool, shuffle: bool, changes: list[Any]
) -> None:
    if drop_last and num_samples < batch_size:
        return
    alone = Board((1,))
    loader = DataLoader(Numbers(num_samples), batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
    wanted = [flat(joined(step)) for step in lockstep(make_ranks(alone, loader))]
    board = Board(changes[0][1], changes[0][2])
    ranks = make_ranks(board, loader)
    found = []
    for number, step in enumerate(lockstep(ranks)):
        rows = joined(step)
        # Slice m is fixed, whatever the shares: it is cut from the batch before the ranks are.
        sizes = [sum(row) for row in step[0].plan.micro]
        assert [len(row) for row in rows] == sizes
        found.append(flat(rows))
        for from_step, shares, num_micro in changes:
            if from_step == number:
                board.decide(number + 1, shares, num_micro)
    assert found == wanted
    assert len(found) == len(loader) == len(ranks[0])
    used = flat(found)
    assert len(set(used)) == len(used) == (len(loader) * batch_size if drop_last else num_samples)
    if not shuffle:
        assert used == list(range(len(used)))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    def epochs(seed: int) -> list[list[int]]:
        (rank,) = make_ranks(Board((1,)), DataLoader(Numbers(50), batch_size=8, shuffle=True), seed=seed)
        return [[value for step in lockstep([rank]) for value in flat(joined(step))] for _ in range(2)]

    torch.manual_seed(3)
    first = epochs(0)
    torch.manual_seed(4)
    assert epochs(0) == first
    assert first[0] != first[1]
    assert epochs(1)[0] != first[0]
    assert sorted(first[0]) == list(range(50))


def test_an_idle_rank_gets_one_real_sample_of_the_slice() -> None:
    ranks = make_ranks(Board((4, 0, 2), num_micro=3), DataLoader(Numbers(18), batch_size=9))
    for step in lockstep(ranks):
        for micro_index in range(3):
            part = step[1].micro(micro_index)
            assert part.idle
            assert part.num_samples == 0
            assert part.data.tolist() == [step[0].plan.slice_of(micro_index)[0]]


def test_more_micro_batches_than_samples_still_give_every_rank_something() -> None:
    ranks = make_ranks(Board((1, 1), num_micro=3), DataLoader(Numbers(5), batch_size=4))
    found = []
    for step in lockstep(ranks):
        assert all(len(batch.micro(micro_index).data) >= 1 for batch in step for micro_index in range(3))
        found.append(flat(joined(step)))
    assert found == [[0, 1, 2, 3], [4]]


def test_the_same_micro_batch_again_is_the_same_data_in_new_containers() -> None:
    reads: list[int] = []

    class Counting(Numbers):
        def __getitem__(self, index: int) -> Any:
            reads.append(index)
            return {"x": index, "labels": index}

    (rank,) = make_ranks(Board((1,)), DataLoader(Counting(4), batch_size=4))
    batch = next(iter(rank))
    batch.micro(0).data.pop("labels")
    assert batch.micro(0).data["labels"].tolist() == [0, 1, 2, 3]
    assert reads == [0, 1, 2, 3]


def test_a_step_planned_anew_covers_the_same_samples_and_reads_only_what_changed() -> None:
    reads: list[int] = []

    class Counting(Numbers):
        def __getitem__(self, index: int) -> Any:
            reads.append(index)
            return index

    board = Board((2, 1))
    ranks = make_ranks(board, DataLoader(Counting(24), batch_size=12))
    found = []
    for step in lockstep(ranks):
        joined(step)
        reads.clear()
        plan = step[0].plan
        for batch in step:
            batch.replan(plan_of(plan.epoch, plan.step, plan.start, plan.num_samples, (1, 2), 3))
        found.append(flat(joined(step)))
        # The cuts: rank 0 had [0, 8), then 0-1, 4-5 (of slices of 4); nothing is the same span.
        assert sorted(reads) == sorted(found[-1])
        reads.clear()
        for batch in step:
            batch.replan(plan_of(plan.epoch, plan.step, plan.start, plan.num_samples, (1, 2), 3))
        assert flat(joined(step)) == found[-1]
        assert reads == []
        with pytest.raises(StepError, match="can't be replanned"):
            step[0].replan(plan_of(plan.epoch, plan.step, plan.start + 1, plan.num_samples, (1, 2), 3))
    assert found == [list(range(12)), list(range(12, 24))]


def test_whole_gives_the_slice_of_all_ranks() -> None:
    ranks = make_ranks(Board((2, 1), num_micro=2), DataLoader(Numbers(12), batch_size=12))
    for step in lockstep(ranks):
        assert [step[1].whole(m).tolist() for m in range(2)] == joined(step) == [[*range(6)], [*range(6, 12)]]


@settings(max_examples=30, deadline=None)
@given(
    stop=st.integers(0, 14),
    batch_size=st.integers(1, 9),
    shares=shares_of_three,
    workers_before=st.integers(1, 3),
)
def test_a_resume_in_mid_epoch_on_other_ranks_uses_each_sample_once(
    stop: int, batch_size: int, shares: tuple[int, ...], workers_before: int
) -> None:
    loader = DataLoader(Numbers(31), batch_size=batch_size, shuffle=True)
    whole = [
        flat(joined(step)) for ranks in [make_ranks(Board((1,)), loader)] for _ in range(2) for step in lockstep(ranks)
    ]
    ranks = make_ranks(Board((1,) * workers_before), loader)
    found: list[list[int]] = []
    cursor = ranks[0].cursor()
    while len(found) < min(stop, len(whole)):
        for step in lockstep(ranks, commit=False):
            found.append(flat(joined(step)))
            for rank, batch in zip(ranks, step, strict=True):
                rank.commit(batch)
            cursor = ranks[-1].cursor()
            if len(found) >= stop:
                break
    state = json.loads(json.dumps(cursor.state_dict()))
    resumed = make_ranks(Board(shares), loader)
    for rank in resumed:
        rank.load(Cursor.from_state_dict(state))
    while resumed[0].epoch < 2:
        found += [flat(joined(step)) for step in lockstep(resumed)]
    assert found == whole


def test_break_starts_the_next_epoch_and_the_cursor_stays_until_then() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(Numbers(20), batch_size=4, shuffle=True))
    first = [flat(joined(step)) for step in lockstep([rank])]
    assert rank.epoch == 1
    seen = []
    for batch in rank:
        seen.append(batch.micro(0).data.tolist())
        rank.commit(batch)
        if len(seen) == 2:
            break
    cursor = rank.cursor()
    assert (cursor.epoch, cursor.step, cursor.position) == (1, 2, 8)
    assert (cursor.global_step, cursor.samples_total) == (7, 28)
    assert rank.epoch == 1
    third = [(batch.epoch, batch.micro(0).data.tolist()) for batch in rank]
    assert {epoch for epoch, _ in third} == {2}
    assert [values for _, values in third] != first
    # Continued at the cursor, the epoch that was left goes on where it was.
    (again,) = make_ranks(Board((1,)), DataLoader(Numbers(20), batch_size=4, shuffle=True))
    again.load(cursor)
    assert again.epoch == 1
    rest = [value for step in lockstep([again]) for value in flat(joined(step))]
    assert sorted([value for values in seen for value in values] + rest) == list(range(20))
    assert again.epoch == 2


def test_looking_at_a_batch_begins_no_epoch() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(Numbers(8), batch_size=4))
    next(iter(rank))
    assert rank.epoch == 0
    assert [batch.epoch for batch in rank] == [0, 0]
    assert rank.epoch == 1


def test_a_checkpoint_after_the_last_step_has_an_empty_rest_of_its_epoch() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(Numbers(8), batch_size=4))
    for batch in rank:
        rank.commit(batch)
        cursor = rank.cursor()
    (again,) = make_ranks(Board((1,)), DataLoader(Numbers(8), batch_size=4))
    again.load(cursor)
    assert (again.epoch, list(again), again.epoch) == (0, [], 1)


def test_committing_twice_is_an_error() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(Numbers(8), batch_size=4))
    batch = next(iter(rank))
    rank.commit(batch)
    with pytest.raises(StepError, match="committed twice"):
        rank.commit(batch)


def test_committing_after_the_epoch_is_an_error() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(Numbers(8), batch_size=4))
    batch = list(rank)[-1]
    with pytest.raises(StepError, match="was in epoch 1; commit each step before"):
        rank.commit(batch)


def cursor_after_two_steps(**settings: Any) -> Cursor:
    (rank,) = make_ranks(Board((1,)), DataLoader(Numbers(20), batch_size=4, shuffle=True), **settings)
    for batch in rank:
        rank.commit(batch)
        if batch.epoch_step == 1:
            break
    return rank.cursor()


def test_a_cursor_that_does_not_fit_is_refused() -> None:
    (other_seed,) = make_ranks(Board((1,)), DataLoader(Numbers(20), batch_size=4, shuffle=True), seed=8)
    with pytest.raises(DataError, match="seed 7, now the seed is 8"):
        other_seed.load(cursor_after_two_steps())
    (other_batch,) = make_ranks(Board((1,)), DataLoader(Numbers(20), batch_size=5, shuffle=True))
    other_batch.load(cursor_after_two_steps())
    with pytest.raises(DataError, match="sample 8 of its epoch, where no step"):
        next(iter(other_batch))
    (other_data,) = make_ranks(Board((1,)), DataLoader(Numbers(24), batch_size=4, shuffle=True))
    other_data.load(cursor_after_two_steps())
    with pytest.raises(DataError, match="20 samples, now the epoch has 24"):
        next(iter(other_data))
    (other_sampler,) = make_ranks(Board((1,)), DataLoader(Numbers(20), batch_size=4))
    bad = Cursor(**{**vars(cursor_after_two_steps()), "generators": ("x",)})
    with pytest.raises(DataError, match="1 generators of its own"):
        other_sampler.load(bad)


def test_waiting_for_samples_is_data_time() -> None:
    import time

    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.01)
            return index

    from evenload.training.comm.clock import StepClock
    from tests.unit.data.fakes import CPU

    clock = StepClock(CPU)
    (rank,) = make_ranks(Board((1,)), DataLoader(Slow(5), batch_size=5), clock=clock)
    next(iter(rank)).micro(0)
    assert clock.take()["data"] >= 0.05


def test_the_clock_says_when_a_rank_reads_a_stream_or_waits_for_others_that_do() -> None:
    from torch.utils.data import IterableDataset

    from evenload.training.comm.clock import StepClock
    from tests.unit.data.fakes import CPU

    clock = StepClock(CPU)
    seen: list[tuple[str, bool]] = []

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            for index in range(4):
                seen.append((clock.current, clock.reads))
                yield index

    (rank,) = make_ranks(Board((1,)), DataLoader(Stream(), batch_size=2), clock=clock)
    agree = rank._planner.agree
    rank._planner.agree = lambda row: (seen.append((clock.current, clock.reads)), agree(row))[1]  # type: ignore[method-assign]
    for batch in rank:
        assert not clock.reads and clock.read_s > 0
        rank.commit(batch)
    assert set(seen) == {("data", True), ("wait", True)} and not clock.reads
