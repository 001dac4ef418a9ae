"""Sums of small gradients through shared memory: the same bits on all ranks, several in flight, and no wait for a lost rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from evenload.errors import DesyncError, PeerLostError, RankFailedError
from evenload.testing import run_ranks
from evenload.training.comm.groups import Groups
from evenload.training.comm.shared_sums import MOST_BYTES, SharedSum
from tests.ranks.training.test_shared_memory import _groups, _values

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
        parts = [_part(rank, 100 * index + number, size, dtype) for number, size in enumerate(sizes)]
        if rank == index % num_ranks:
            time.sleep(0.002)
        _begin_attempt(groups)
        pending = [groups.sum_async(part) for part in parts]
        assert [isinstance(one, SharedSum) for one in pending] == [number < 4 for number in range(len(parts))]
        if index % 3 == rank:
            pending.reverse()  # ranks may wait in any order
        for one in pending:
            one.wait()
            one.wait()  # a second wait does nothing
        for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            expected = _expected(num_ranks, 100 * index + number, size, dtype)
            assert (
                torch.equal(part, expected) if number < 4 else torch.allclose(part, expected, rtol=0.1, atol=5)
            )  # gloo's
    _begin_attempt(groups)
    matrix = torch.full((3, 4), float(rank))
    groups.sum_async(matrix).wait()
    assert torch.equal(matrix, torch.full((3, 4), sum(range(num_ranks)), dtype=torch.float32))
    large, turned = torch.ones(MOST_BYTES // num_ranks // 4 + 1), torch.ones(4, 3).t()
    assert not any(isinstance(one, SharedSum) for one in (groups.sum_async(large), groups.sum_async(turned)))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_in_flight_are_exact(num_ranks: int) -> None:
    run_ranks(_sums_in_flight, num_ranks, num_ranks)


def _set_aside() -> list[float]:
    """Rank 2 computes nothing; a sum that one rank gave up comes before the next one on its channel."""
    groups, rank = _groups()
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


def _lose_rank_1(found: str) -> None:
    groups, rank = _groups()
    groups.sum_async(torch.ones(2)).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(PeerLostError) as raised:
        groups.sum_async(torch.ones(2)).wait()
    Path(found).write_text(f"{time.monotonic() - began_s:.3f} {raised.value}")


def test_a_killed_rank_is_named_within_a_second(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="rank 1"):
        run_ranks(_lose_rank_1, 2, str(tmp_path / "found"))
    seconds, text = (tmp_path / "found").read_text().split(maxsplit=1)
    assert float(seconds) < 1 and "of rank 1 has ended" in text


def _come_late() -> tuple[str, float]:
    groups, rank = _groups(timeout_s=1)
    if rank == 1:
        time.sleep(2.5)
        return "", 0.0
    began_s = time.monotonic()
    with pytest.raises(PeerLostError) as raised:
        groups.sum_async(torch.ones(2)).wait()
    return str(raised.value), time.monotonic() - began_s


def test_a_late_rank_ends_the_wait_at_the_limit() -> None:
    (text, seconds), _ = run_ranks(_come_late, 2)
    assert "timed out after 1 s; rank 1 did not come" in text and seconds < 2


def _abort() -> tuple[str, float]:
    groups, rank = _groups()
    if rank == 1:
        time.sleep(0.3)
        groups.abort("rank 1 ran out of memory")
        time.sleep(0.5)
        return "", 0.0
    began_s = time.monotonic()
    with pytest.raises(PeerLostError) as raised:
        groups.sum_async(torch.ones(2)).wait()
    return str(raised.value), time.monotonic() - began_s


def test_an_abort_ends_the_wait() -> None:
    (text, seconds), _ = run_ranks(_abort, 2)
    assert text == "rank 1 ran out of memory" and seconds < 0.6


def _differ() -> str:
    groups, rank = _groups()
    with pytest.raises(DesyncError) as raised:
        groups.sum_async(torch.ones(2 + rank)).wait()
    return str(raised.value)


def test_unlike_lengths_are_an_error() -> None:
    assert all("they do different things" in text for text in run_ranks(_differ, 2))
