"""Real worker processes: the user's settings honoured, and plans that change while work is queued."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info

from evenload.errors import DataError
from evenload.training.data.prefetch import Prefetcher
from evenload.training.data.reading import ReadTask
from evenload.training.data.tuning import ReadSettings, SettingsOrigin, StepCost
from tests.unit.data.fakes import Board, Numbers, flat, joined, lockstep, make_ranks, plan_of


class Counted(Numbers):
    """Counts reads in shared memory; each takes a while."""

    def __init__(self, num_samples: int, seconds: float = 0.0) -> None:
        super().__init__(num_samples)
        self.reads = multiprocessing.RawArray("i", num_samples)
        self.seconds = seconds

    def __getitem__(self, index: int) -> int:
        self.reads[index] += 1  # one worker at a time has a given sample
        time.sleep(self.seconds)
        return index


class KilledOnce(Numbers):
    """A worker is killed when it reads one sample for the first time."""

    def __init__(self, num_samples: int, most: int = 1) -> None:
        super().__init__(num_samples)
        self.killed = multiprocessing.RawArray("i", 1)
        self.most = most

    def __getitem__(self, index: int) -> int:
        if index == 40 and get_worker_info() is not None and self.killed[0] < self.most:
            self.killed[0] += 1
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Where(Numbers):
    """Tells who read a sample."""

    opened = 0

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, os.getpid(), self.opened])


def open_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker_id
    assert isinstance(info.dataset, Where)
    info.dataset.opened = worker_id + 1


def raise_at_seven(samples: list[int]) -> Any:
    if 7 in samples:
        raise KeyError("sample 7 is broken")
    return torch.tensor(samples)


@pytest.mark.parametrize("num_micro", [1, 3])
def test_plans_that_change_in_mid_epoch_lose_and_repeat_nothing(num_micro: int) -> None:
    loader = DataLoader(Numbers(90), batch_size=9, shuffle=True, num_workers=2)
    alone = [flat(joined(step)) for step in lockstep(make_ranks(Board((1,)), DataLoader(Numbers(90), 9, shuffle=True)))]
    board = Board((1, 1), num_micro)
    found = []
    for number, step in enumerate(lockstep(make_ranks(board, loader))):
        found.append(flat(joined(step)))
        if number % 2:
            board.decide(number + 2, [(3, 1), (0, 1), (1, 0), (2, 7)][number // 2 % 4], 1 + number % 3)
    assert found == alone


# Where the worker dies while a sample travels, torch's loader opens files to find out whether it is out of descriptors.
@pytest.mark.filterwarnings("ignore:unclosed file <_io.BufferedRandom:ResourceWarning")
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning")
# The signal of its death may arrive while Hypothesis counts a collection of garbage.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <function gc_:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_is_killed_is_started_again(persistent: bool) -> None:
    data = KilledOnce(90)
    (rank,) = make_ranks(Board((1,)), DataLoader(data, batch_size=9, num_workers=2, persistent_workers=persistent))
    # Not pytest.warns, which raises what it caught besides, such as warnings of earlier tests' garbage.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = [flat(joined(step)) for step in lockstep([rank])]
    rank.close()
    (text,) = [str(one.message) for one in caught if "was killed" in str(one.message)]
    assert "was killed by SIGKILL" in text and "The workers start again (1 of 3)" in text
    assert found == [[*range(low, low + 9)] for low in range(0, 90, 9)] and data.killed[0] == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of earlier tests' garbage
def test_workers_that_are_killed_again_and_again_are_an_error() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(KilledOnce(90, most=9), batch_size=9, num_workers=1))
    with warnings.catch_warnings(record=True), pytest.raises(DataError, match="were started again 3 times"):
        warnings.simplefilter("always", UserWarning)
        for step in lockstep([rank]):
            joined(step)
    rank.close()


def test_queued_work_that_a_decision_made_stale_is_called_off() -> None:
    data = Counted(400, seconds=0.02)
    board = Board((1, 1))
    # Only rank 0: 8 of 16 samples a step, 8 tasks of 8 samples queued on 2 workers.
    (rank,) = make_ranks(Board((1, 1)), DataLoader(data, batch_size=16, num_workers=2, prefetch_factor=4))[:1]
    rank._planner.board = board  # type: ignore[attr-defined]
    found: list[list[int]] = []
    reads_then = 0
    for batch in rank:
        if batch.epoch_step == 3:  # decided before: this step is the first under the new shares
            assert batch.plan.shares == (5, 11)
        found.append(batch.micro(0).data.tolist())
        rank.commit(batch)
        if batch.epoch_step == 2:
            board.decide(3, (5, 11))
            reads_then = sum(data.reads)
    assert found == [list(range(16 * s, 16 * s + (8 if s < 3 else 5))) for s in range(25)]
    needed_then = sum(len(part) for part in found[3:])
    wasted = sum(data.reads) - reads_then - needed_then
    # Each of two workers was in the middle of a sample, and may have begun the next before it was told. Without the
    # flags it would have been 8 tasks of 8 samples. (A busy machine may let them read between the two counts.)
    assert 0 <= wasted <= 10


def test_fresh_work_is_queued_as_soon_as_stale_work_is_called_off() -> None:
    data = Counted(1000, seconds=0.0)
    feed = Prefetcher(DataLoader(data, batch_size=4), seed=0, rank=0, keyed=True, reading=ReadSettings(2, 3))

    def tasks(size: int, start: int = 0) -> Any:
        return lambda: (ReadTask(0, low, tuple(range(low, low + size))) for low in range(start, 400, 10))

    feed.read_ahead(0, tasks(4))
    assert feed.get(ReadTask(0, 0, (0, 1, 2, 3))).tolist() == [0, 1, 2, 3]
    feed.read_ahead(0, tasks(7, start=10))
    assert feed.get(ReadTask(0, 10, tuple(range(10, 17)))).tolist() == list(range(10, 17))
    # All that is outstanding now is wanted: the queue was filled anew before the second step was computed.
    assert [feed._live.get(span) for _, span in feed._queue] == [serial for serial, _ in feed._queue]
    assert len(feed._queue) == 6
    assert [span for _, span in feed._queue] == [(low, low + 7) for low in range(20, 80, 10)]
    feed.close()


@settings(max_examples=8, deadline=None)
@given(script=st.lists(st.sampled_from(["get", "skip", "cut 3", "cut 5", "other"]), min_size=5, max_size=25))
def test_whatever_is_asked_for_in_whatever_order_comes_right(script: list[str]) -> None:
    feed = Prefetcher(DataLoader(Numbers(1000), batch_size=4), seed=0, rank=0, keyed=False, reading=ReadSettings(1, 2))
    size, now = 4, 0

    def wanted() -> Any:
        return (ReadTask(0, low, tuple(range(low, low + size))) for low in range(now, 900, 10))

    feed.read_ahead(0, wanted)
    for what in script:
        if what == "get":
            assert feed.get(ReadTask(0, now, tuple(range(now, now + size)))).tolist() == list(range(now, now + size))
            now += 10
        elif what == "other":
            assert feed.get(ReadTask(0, 950, (950, 951))).tolist() == [950, 951]
        else:
            size = int(what[-1]) if what.startswith("cut") else size
            now += 10 * (what == "skip")
            feed.read_ahead(0, wanted)
    feed.close()


def test_micro_batches_asked_for_out_of_turn_are_read_once() -> None:
    data = Counted(64)
    (rank,) = make_ranks(Board((1,), num_micro=8), DataLoader(data, batch_size=16, num_workers=1, prefetch_factor=2))
    found = []
    for batch in rank:
        found += [batch.micro(micro_index).data.tolist() for micro_index in (7, 0, 3, 2, 1, 6, 5, 4)]
        rank.commit(batch)
    assert sorted(flat(found)) == list(range(64))
    assert list(data.reads) == [1] * 64


def test_a_step_planned_anew_is_read_at_once_and_the_rest_goes_on() -> None:
    ranks = make_ranks(Board((1, 1)), DataLoader(Numbers(80), batch_size=8, num_workers=2))
    found = []
    for number, step in enumerate(lockstep(ranks)):
        joined(step)
        if number % 3 == 1 or number == 9:  # the last step too: nothing is left to be read ahead there
            plan = step[0].plan
            for batch in step:
                batch.replan(plan_of(0, plan.step, plan.start, plan.num_samples, (1, 3), 4))
        assert step[0].whole(0).tolist() == joined(step)[0]
        found += flat(joined(step))
    assert found == list(range(80))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_init_fn_sees_the_users_dataset(context: str) -> None:
    loader = DataLoader(
        Where(12), batch_size=3, num_workers=2, worker_init_fn=open_dataset, multiprocessing_context=context
    )
    (rank,) = make_ranks(Board((1,)), loader)
    rows = torch.cat([batch.micro(0).data for batch in rank])
    assert rows[:, 0].tolist() == list(range(12))
    assert os.getpid() not in rows[:, 1].tolist()
    assert rows[:, 2].tolist() == [1, 1, 1, 2, 2, 2, 1, 1, 1, 2, 2, 2]


def pids(rank: Any) -> set[int]:
    return {pid for batch in rank for pid in batch.micro(0).data[:, 1].tolist()}


def test_workers_end_with_the_epoch_unless_they_are_persistent() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(Where(40), batch_size=4, num_workers=2))
    first = pids(rank)
    assert not multiprocessing.active_children()
    assert first.isdisjoint(pids(rank))
    (kept,) = make_ranks(Board((1,)), DataLoader(Where(40), batch_size=4, num_workers=2, persistent_workers=True))
    first = pids(kept)
    assert len(multiprocessing.active_children()) == 2
    for batch in kept:
        kept.commit(batch)
        break
    assert pids(kept) == first
    kept.close()
    assert not multiprocessing.active_children()


def test_workers_end_when_the_loop_is_left() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(Where(40), batch_size=4, num_workers=2))
    threads = threading.active_count()
    for batch in rank:
        batch.micro(0)
        break
    assert not multiprocessing.active_children()
    with pytest.raises(ZeroDivisionError):
        for _ in rank:
            raise ZeroDivisionError
    rank.close()
    assert not multiprocessing.active_children()
    assert threading.active_count() == threads
    # A batch kept after its loop can still be read.
    assert batch.whole(0)[:, 0].tolist() == [0, 1, 2, 3]
    batch._held.clear()
    assert batch.micro(0).data[:, 0].tolist() == [0, 1, 2, 3]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_the_data_comes_when_its_batch_is_asked_for(num_workers: int) -> None:
    loader = DataLoader(Numbers(20), batch_size=2, num_workers=num_workers, collate_fn=raise_at_seven)
    (rank,) = make_ranks(Board((1,)), loader)
    found = []
    with pytest.raises(KeyError, match="sample 7 is broken"):
        for batch in rank:
            found += batch.micro(0).data.tolist()
    assert found == [0, 1, 2, 3, 4, 5]
    rank.close()


def test_an_error_in_work_called_off_is_nobodys_error() -> None:
    loader = DataLoader(Numbers(20), batch_size=4, num_workers=2, collate_fn=raise_at_seven)
    board = Board((1, 1))
    (rank, _) = make_ranks(board, loader)
    found = []
    for batch in rank:  # sample 7 is the other rank's at first, and after the change; in between it is queued here
        found += batch.micro(0).data.tolist()
        rank.commit(batch)
        if batch.epoch_step == 0:
            board.decide(1, (3, 1))
    assert found == [0, 1, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 18]
    board = Board((0, 1))
    (rank, _) = make_ranks(board, loader)
    board.decide(1, (1, 0))  # the whole batch, sample 7 in it, is queued for step 1
    for batch in rank:
        batch.micro(0)
        rank.commit(batch)
        time.sleep(0.2)  # so that the worker has failed by now
        board.decide(1, (3, 1))


class Dying(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            os._exit(3)
        return index


@pytest.mark.usefixtures("torch_looks_often")
def test_a_worker_that_dies_is_an_error_not_a_hang() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(Dying(20), batch_size=2, num_workers=2))
    with pytest.raises(DataError, match="exited with code 3"):
        for batch in rank:
            batch.micro(0)
    rank.close()


class Stuck(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            time.sleep(60)
        return index


@pytest.mark.usefixtures("torch_looks_often")
def test_the_timeout_is_honoured() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(Stuck(20), batch_size=2, num_workers=2, timeout=1))
    with pytest.raises(RuntimeError, match="timed out after 1"):
        for batch in rank:
            batch.micro(0)
    children = multiprocessing.active_children()
    rank.close()
    assert not any(child.is_alive() for child in children)


def change_workers(rank: Any, number: int) -> None:
    """As the search would, but at once."""
    size = [(0, 0), (1, 2), (2, 1), (2, 3), (0, 0)][number % 5]
    rank._reader._tuner.reading = ReadSettings(*size, origin=SettingsOrigin.TRIAL)


@pytest.mark.parametrize("num_micro", [1, 3])
def test_workers_that_change_in_mid_epoch_lose_and_repeat_nothing(num_micro: int) -> None:
    def make() -> Any:
        return DataLoader(Noisy(72), batch_size=9, shuffle=True)

    alone = [flat(joined(step)) for step in lockstep(make_ranks(Board((1,)), make))]
    board = Board((1, 1), num_micro)
    ranks = make_ranks(board, make, most_workers=4)
    found = []
    for number, step in enumerate(lockstep(ranks)):
        found.append(flat(joined(step)))
        change_workers(ranks[number % 2], number)  # each rank for itself
        if number % 3 == 1:
            board.decide(number + 2, [(3, 1), (1, 0)][number // 3 % 2], num_micro)
    assert found == alone
    for rank in ranks:
        rank.close()
    assert not multiprocessing.active_children()


class Noisy(Numbers):
    """Randomness keyed by the place in the global order, whoever reads."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index) + torch.rand(())


def test_a_search_of_its_own_ends_with_workers_where_reading_is_slow() -> None:
    data = Counted(20_000, seconds=0.002)
    (rank,) = make_ranks(Board((1,)), DataLoader(data, batch_size=4), most_workers=2)
    found, seen = [], []
    for batch in rank:
        start = time.perf_counter()
        found += batch.micro(0).data.tolist()
        read_s = time.perf_counter() - start
        time.sleep(0.006)  # computing
        rank.commit(batch)
        rank.observe(StepCost(read_s + 0.006, 4, (read_s,), (0.006,), (batch.reading,)))
        seen.append(batch.reading)
        if batch.reading.origin is SettingsOrigin.CHOSEN:
            break
    assert found == list(range(len(found))) and len(found) < 4 * 120
    assert seen[0] == ReadSettings(0, 0, origin=SettingsOrigin.TRIAL) and seen[-1].num_workers > 0, seen[-1]
    rank.close()


class HereOnly(Numbers):
    """What can't be read in another process (a CUDA tensor, a handle)."""

    def __getitem__(self, index: int) -> int:
        if get_worker_info() is not None:
            raise OSError("only in the process that opened it")
        return index


def test_workers_nobody_asked_for_give_way_where_they_fail() -> None:
    (rank,) = make_ranks(Board((1,)), DataLoader(HereOnly(80), batch_size=8), most_workers=2)
    found = []
    with pytest.warns(UserWarning, match="a loader worker failed with OSError, but the rank itself can read"):
        for number, batch in enumerate(rank):
            found += batch.micro(0).data.tolist()
            rank.commit(batch)
            if number == 2:
                change_workers(rank, 1)
    assert found == list(range(80))
    assert batch.reading == ReadSettings(0, 0, origin=SettingsOrigin.CHOSEN)
    assert not multiprocessing.active_children()
    (rank,) = make_ranks(Board((1,)), DataLoader(HereOnly(80), batch_size=8, num_workers=1))
    with pytest.raises(OSError, match="only in the process"):  # these were asked for
        next(iter(rank)).micro(0)
    rank.close()


def test_an_error_of_the_dataset_is_no_reason_to_give_way() -> None:
    loader = DataLoader(Numbers(20), batch_size=2, collate_fn=raise_at_seven)
    (rank,) = make_ranks(Board((1,)), loader, most_workers=2)
    with pytest.raises(KeyError, match="sample 7 is broken"):
        for number, batch in enumerate(rank):
            batch.micro(0)
            rank.commit(batch)
            if number == 0:
                change_workers(rank, 1)
    rank.close()
