"""`GridGather`: rows of many hosts, in two rounds."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from evenload.errors import PeerLostError
from evenload.testing import run_ranks
from evenload.training.comm.generation import Membership
from evenload.training.comm.grid_gather import GridGather, grid_rows, num_hops
from evenload.training.comm.groups import Groups
from evenload.training.launch.environment import detect


def _groups() -> Groups:
    spec = detect()
    workers = tuple(map(str, range(spec.world_size)))
    return Groups(Membership(0, workers, spec.store), spec.rank, backend="gloo", timeout_s=60)


def _gather(members: tuple[int, ...]) -> list[list[list[float]]]:
    groups = _groups()
    gather = GridGather(members, groups._new_row_group, groups._begin_gather)
    assert set(gather.groups) <= set(groups.own_groups)
    received = [gather(torch.tensor([float(groups.rank), float(index)])).tolist() for index in range(3)]
    groups.close()
    return received


@pytest.mark.parametrize("members", [(0, 1, 2, 3, 4), (1, 3, 4)])
def test_every_member_receives_the_vectors_of_all_in_order(members: tuple[int, ...]) -> None:
    expected = [[[float(rank), float(index)] for rank in members] for index in range(3)]
    for rank, received in enumerate(run_ranks(_gather, 5, members)):
        if rank in members:
            assert received == expected


def _aborted() -> str:
    groups = _groups()
    gather = GridGather((0, 1, 2, 3), groups._new_row_group, groups._begin_gather)
    if groups.rank == 3:
        dist.barrier(groups.control)
        return ""
    if groups.rank == 0:
        threading.Timer(0.5, groups.abort, ("rank 3 does not come",)).start()
        with pytest.raises(PeerLostError, match="rank 3 does not come"):
            gather(torch.zeros(2))
    dist.barrier(groups.control)
    return "woken" if groups.rank == 0 else ""


def test_an_abort_ends_the_wait() -> None:
    assert run_ranks(_aborted, 4)[0] == "woken"


def test_hops_grow_with_the_square_root() -> None:
    for num_members in (1, 2, 3, 16, 17, 125, 1000):
        rows = grid_rows(num_members)
        assert [member for row in rows for member in row] == list(range(num_members))
        assert len(rows[0]) - len(rows[-1]) <= 1
    assert [num_hops(num) for num in (2, 8, 16, 125, 1000)] == [1, 7, 15, 21, 62]
