"""Sums of gradients through shared memory: the same bits on all ranks, several in flight, and no wait for a lost rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import DesyncError, PeerLostError, RankFailedError
from evenload.testing import run_ranks
from evenload.training.comm.groups import Groups
from evenload.training.comm.shared_sums import MOST_BYTES, SharedSum, SmallSum
from tests.ranks.training.test_shared_memory import _groups, _values

_SMALL, _LARGE = 2, 1_000_003
"""Values of a vector that is written when its sum begins, and of one that a thread adds up in pieces."""
_KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64)


def _expected(num_ranks: int, index: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    total = _part(0, index, size, dtype)
    for rank in range(1, num_ranks):
        total = total + _part(rank, index, size, dtype)
    return total


def _part(rank: int, index: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (100 * _values(rank, index, size, torch.float64)).to(dtype)


def _begin_attempt(groups: Groups) -> None:
    assert groups.generation.sums is not None
    groups.generation.sums.begin_attempt()


def _sums_in_flight(num_ranks: int) -> None:
    groups, rank = _groups()
    for index in range(40):
        dtype = _KINDS[index % len(_KINDS)]
        sizes = [(7 * index + number) % 900 + 1 for number in range(index % 7 + 1)]  # up to seven at once
        if index % 8 == 0:
            sizes = [*sizes, _LARGE // (1 + index), 3, _LARGE // (2 + index)]
        limit = MOST_BYTES // num_ranks
        is_small = [size * dtype.itemsize <= limit for size in sizes]
        parts = [_part(rank, 100 * index + number, size, dtype) for number, size in enumerate(sizes)]
        if rank == index % num_ranks:
            time.sleep(0.002)
        _begin_attempt(groups)
        pending = [groups.sum_async(part) for part in parts]
        expected = [small and sum(is_small[:number]) < 4 for number, small in enumerate(is_small)]
        assert [isinstance(one, SmallSum) for one in pending] == expected
        if index % 3 == rank:
            pending.reverse()  # ranks may wait in any order
        for one in pending:
            one.wait()
            one.wait()  # a second wait does nothing
        for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            assert torch.equal(part, _expected(num_ranks, 100 * index + number, size, dtype)), (index, number)
    _begin_attempt(groups)
    matrix = torch.full((3, 4), float(rank))
    groups.sum_async(matrix).wait()
    assert torch.equal(matrix, torch.full((3, 4), sum(range(num_ranks)), dtype=torch.float32))
    turned, nothing = torch.ones(4, 3).t(), torch.ones(0)
    pending = [groups.sum_async(turned), groups.sum_async(nothing)]
    assert not any(isinstance(one, SharedSum) for one in pending)
    for one in pending:
        one.wait()
    assert bool((turned == num_ranks).all())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_in_flight_are_exact(num_ranks: int) -> None:
    run_ranks(_sums_in_flight, num_ranks, num_ranks)


def _set_aside() -> list[float]:
    """Rank 2 computes nothing; a sum that one rank gave up comes before the next one on its channel."""
    groups, rank = _groups()
    assert groups.own_groups  # which each step asks for; ranks that return find the same groups
    groups.set_computing((0, 1))
    found = []
    if rank < 2:
        given_up = groups.sum_async(torch.ones(3))
        if rank:
            given_up.wait()
        for index in range(9):
            _begin_attempt(groups)
            groups.sum_async(total := torch.full((2,), float(index + rank))).wait()
            found.append(float(total[0]))
    groups.set_computing((0, 1, 2))
    groups.sum_async(total := torch.ones(1)).wait()
    return [*found, float(total)]


def test_ranks_that_compute_sum_among_themselves() -> None:
    first, second, third = run_ranks(_set_aside, 3)
    assert first == second == [*(2.0 * index + 1 for index in range(9)), 3.0] and third == [3.0]


def _sum_in_vain(groups: Groups, size: int) -> tuple[str, float]:
    """Return the error of a sum that another rank does not end, and after how many seconds it came."""
    began_s = time.monotonic()
    with pytest.raises(PeerLostError) as raised:
        groups.sum_async(torch.ones(size)).wait()
    return str(raised.value), time.monotonic() - began_s


def _lose_rank_1(found: str, size: int) -> None:
    groups, rank = _groups()
    groups.sum_async(torch.ones(size)).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    text, seconds = _sum_in_vain(groups, size)
    Path(found).write_text(f"{seconds:.3f} {text}")


@pytest.mark.parametrize("size", [_SMALL, _LARGE])
def test_a_killed_rank_is_named_within_a_second(tmp_path: Path, size: int) -> None:
    with pytest.raises(RankFailedError, match="rank 1"):
        run_ranks(_lose_rank_1, 2, str(tmp_path / "found"), size)
    seconds, text = (tmp_path / "found").read_text().split(maxsplit=1)
    assert float(seconds) < 1 and "of rank 1 has ended" in text


def _come_late(size: int) -> tuple[str, float]:
    groups, rank = _groups(timeout_s=1)
    if rank == 1:
        time.sleep(2.5)
        return "", 0.0
    return _sum_in_vain(groups, size)


@pytest.mark.parametrize("size", [_SMALL, _LARGE])
def test_a_late_rank_ends_the_wait_at_the_limit(size: int) -> None:
    (text, seconds), _ = run_ranks(_come_late, 2, size)
    assert "timed out after 1 s; rank 1 did not come" in text and seconds < 2


def _abort(size: int) -> tuple[str, float]:
    groups, rank = _groups()
    if rank == 1:
        time.sleep(0.3)
        groups.abort("rank 1 ran out of memory")
        time.sleep(0.5)
        return "", 0.0
    return _sum_in_vain(groups, size)


@pytest.mark.parametrize("size", [_SMALL, _LARGE])
def test_an_abort_ends_the_wait(size: int) -> None:
    (text, seconds), _ = run_ranks(_abort, 2, size)
    assert text == "rank 1 ran out of memory" and seconds < 0.6


def _differ(size: int) -> str:
    groups, rank = _groups()
    with pytest.raises(DesyncError) as raised:
        groups.sum_async(torch.ones(size + rank)).wait()
    return str(raised.value)


@pytest.mark.parametrize("size", [_SMALL, _LARGE])
def test_unlike_lengths_are_an_error(size: int) -> None:
    assert all("they do different things" in text for text in run_ranks(_differ, 2, size))


def _has_thread() -> bool:
    return any(thread.name == "evenload-piecewise-sums" for thread in threading.enumerate())


def _close_early() -> tuple[str, bool]:
    """Rank 1 closes its groups while a sum of both is in progress."""
    groups, rank = _groups()
    if rank == 1:
        groups.sum_async(torch.ones(_LARGE)).wait()
        groups.sum_async(torch.ones(_LARGE))
        assert _has_thread()
        began_s = time.monotonic()
        groups.close()
        assert time.monotonic() - began_s < 1
        return "", _has_thread()
    groups.sum_async(torch.ones(_LARGE)).wait()
    time.sleep(0.3)
    text, _ = _sum_in_vain(groups, _LARGE)
    groups.close()
    return text, _has_thread()


def test_closing_ends_the_thread_and_the_others_sums() -> None:
    (text, has_thread), (_, has_other) = run_ranks(_close_early, 2)
    assert text == "the process groups were closed" and not has_thread and not has_other


def _places_of_gradients(folder: str, width: int) -> list[int]:
    """Return in how many places the gradient of each parameter lay over some steps."""
    run = evenload.init(project_dir=folder, seed=0)
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1))
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model, loader = run.prepare(model, DataLoader(data, batch_size=8))
    places: list[set[int]] = [set() for _ in model.parameters()]
    for step in loader:
        step.backward(lambda batch: (model(batch[0]) - batch[1]).square().mean())
        if step.index > 2:  # the buckets are built anew in the first steps
            for param, found in zip(model.parameters(), places, strict=True):
                assert param.grad is not None
                found.add(param.grad.data_ptr())
        model.zero_grad()
    run.close()
    return list(map(len, places))


@pytest.mark.parametrize("width", [16, 800])
def test_a_sum_that_has_ended_holds_no_memory_of_gradients(tmp_path: Path, width: int) -> None:
    # A bucket that seems to be held takes other memory: twice as much for all gradients, set to 0 in each step.
    assert run_ranks(_places_of_gradients, 2, str(tmp_path / "run"), width) == [[1] * 6] * 2
