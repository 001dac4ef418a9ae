"""Sums in which some ranks sum first and one of them joins the others: as on GPUs beside CPU ranks, here all on CPUs."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from evenload.errors import PeerLostError
from evenload.testing import run_ranks
from evenload.training.comm.generation import Membership
from evenload.training.comm.groups import Groups
from evenload.training.comm.hierarchical_sum import split_ranks
from evenload.training.comm.user_collectives import user_collectives
from evenload.training.launch.environment import detect

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.complex128)


def _groups() -> Groups:
    spec = detect()
    membership = Membership(0, spec.workers, spec.store)
    return Groups(membership, spec.rank, backend="gloo", timeout_s=20, inner_backend=spec.inner_backend)


def _value(rank: int, index: int) -> torch.Tensor:
    dtype = DTYPES[index % len(DTYPES)]
    return torch.full((1 + 1000 * (index % 7),), (rank + 1) * (index + 1), dtype=dtype)


def _check_sums(groups: Groups, num_sums: int = 12) -> str:
    """Begin several sums before the first is waited for, at different times on each rank; return what is wrong."""
    computing = groups.generation.computing
    tensors = [_value(groups.rank, index) for index in range(num_sums)]
    pending = []
    for index, tensor in enumerate(tensors):
        time.sleep(0.002 * ((index * 5 + groups.rank * 3) % 4))
        pending.append(groups.sum_async(tensor))
    for one in pending:
        one.wait()
        one.wait()  # a second wait has no effect
    for index, tensor in enumerate(tensors):
        expected = sum(_value(rank, index) for rank in computing)
        if not torch.equal(tensor, torch.as_tensor(expected)):
            return f"sum {index} over {computing}: {tensor[0]}, expected {expected}"
    return ""


COMPUTING = ((0, 1, 2, 3), (0, 2, 3), (0, 1), (0, 3), (0, 1, 3), (0,), (0, 1, 2), (0, 1, 2, 3))


def _sum_in_all_ways() -> list[Any]:
    groups = _groups()
    wrong, inner = [], []
    for computing in COMPUTING:
        groups.set_computing(computing)
        now = groups.generation
        inner.append(now.hierarchy is not None)
        if now.computes:
            wrong.append(_check_sums(groups))
    groups.rebuild(Membership(1, groups.membership.workers, groups.membership.store), groups.rank)
    wrong.append(_check_sums(groups))
    groups.close()
    names = [thread.name for thread in threading.enumerate()]
    return [list(filter(None, wrong)), inner, names.count("evenload-hierarchical-sum")]


@pytest.mark.parametrize("inner", [(0, 1), (1, 3), (2,), (0, 1, 2, 3)], ids=str)
def test_sums_are_right_whoever_computes(inner: tuple[int, ...]) -> None:
    results = run_ranks(_sum_in_all_ways, 4, inner_backend=lambda rank: "gloo" if rank in inner else "")
    for rank, (wrong, hierarchical, num_threads) in enumerate(results):
        assert not wrong, f"rank {rank}: {wrong[0]}"
        kinds = [{member in inner for member in computing} for computing in COMPUTING]
        assert hierarchical == [
            len(both) == 2 and rank in computing for both, computing in zip(kinds, COMPUTING, strict=True)
        ]
        assert num_threads == 0


def _count_user_collectives() -> tuple[int, int]:
    groups = _groups()
    before = user_collectives(groups.own_groups)
    wrong = _check_sums(groups)
    assert not wrong, wrong
    after = user_collectives(groups.own_groups)
    groups.close()
    return before, after


def test_they_are_not_the_users_collectives() -> None:
    for before, after in run_ranks(_count_user_collectives, 3, inner_backend=lambda rank: "gloo" if rank < 2 else ""):
        assert before == after


def _abort(absent: int) -> float:
    groups = _groups()
    if groups.rank == absent:
        time.sleep(3.0)  # never joins the sums
        groups.abort("over")
        return 0.0
    pending = [groups.sum_async(torch.ones(1000)) for _ in range(3)]
    threading.Timer(0.3, groups.abort, ("the generation was aborted",)).start()
    start_s = time.perf_counter()
    for one in pending:
        with pytest.raises(PeerLostError, match="aborted"):
            one.wait()
    waited_s = time.perf_counter() - start_s
    time.sleep(1.5)  # a rank that ended would wake the others
    return waited_s


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_abort_wakes_every_rank(absent: int) -> None:
    """The absent rank is the one that exchanges, another that sums first, or one that joins."""
    waited_s = run_ranks(_abort, 3, absent, inner_backend=lambda rank: "gloo" if rank < 2 else "")
    assert max(waited_s) < 1.2


def test_the_first_rank_that_computes_joins_the_others() -> None:
    assert split_ranks((0, 1, 2, 3), (1, 2)) == ((1, 2), (0, 1, 3))
    assert split_ranks((0, 2, 3), (1, 2)) == ((2,), (0, 2, 3))
    assert split_ranks((1, 2), (1, 2)) == split_ranks((0, 3), (1, 2)) == split_ranks((0, 1), ()) == ((), ())


def _holders_after_a_sum() -> tuple[int, int]:
    """Return the number of tensors on the memory of a vector, before and after it is summed."""
    groups, vector = _groups(), torch.ones(100)
    before = torch._C._storage_Use_Count(vector.untyped_storage()._cdata)
    groups.sum_async(vector).wait()
    time.sleep(0.2)  # the thread has ended what it did
    return before, torch._C._storage_Use_Count(vector.untyped_storage()._cdata)


def test_a_sum_that_has_ended_holds_no_memory_of_gradients() -> None:
    # A bucket that seems to be held takes other memory in each step.
    found = run_ranks(_holders_after_a_sum, 3, inner_backend=lambda rank: "gloo" if rank < 2 else "")
    assert all(before == after for before, after in found)
