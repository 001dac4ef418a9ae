"""A generation that its members prepare beside the one before, in threads, through the store."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from evenload.testing import run_ranks
from evenload.training.comm import prepared
from evenload.training.comm.generation import Membership
from evenload.training.comm.groups import Groups
from evenload.training.comm.host_exchange import ROW_VALUES
from evenload.training.launch.environment import detect


def _rebuild(fails_on: int, prepares: int) -> tuple[int, list[float], float, float]:
    """Prepare membership `prepares` and begin number 1; return how often rows were gathered over gloo, and some sums."""
    spec = detect()
    membership = Membership(0, spec.workers, spec.store)
    groups = Groups(membership, spec.rank, backend="gloo", timeout_s=20)
    prepared._PATIENCE_S = 1.0
    make, begin_gather, num_gathers = prepared._make, groups._begin_gather, 0

    def made(parts: Any, rank: int, *args: Any) -> None:
        if rank == fails_on:
            raise OSError("no memory")
        make(parts, rank, *args)

    def gathered(*args: Any) -> Any:
        nonlocal num_gathers
        num_gathers += 1
        return begin_gather(*args)

    prepared._make = made
    groups._begin_gather = gathered  # type: ignore[method-assign]
    following = replace(membership, number=prepares)
    thread = threading.Thread(target=groups.prepare, args=(following, spec.rank, lambda: False))
    thread.start()
    for _ in range(20):  # meanwhile this generation works
        assert groups.exchange_row([1.0] * ROW_VALUES)[:, 0].tolist() == [1.0] * spec.world_size
    thread.join()
    groups.rebuild(replace(membership, number=1), spec.rank)
    rows = groups.exchange_row([float(spec.rank)] * ROW_VALUES)[:, 0].tolist()
    gradients, statistics = torch.full((5,), 2.0), torch.full((3,), 3.0)
    groups.sum_async(gradients).wait()
    groups.sum_statistics(statistics)
    groups.close()
    return num_gathers, rows, float(gradients[0]), float(statistics[0])


@pytest.mark.parametrize(
    ("fails_on", "prepares"), [(-1, 1), (1, 1), (-1, 7)], ids=["prepared", "one member fails", "for another change"]
)
def test_what_was_prepared_is_used_by_all_members_or_none(fails_on: int, prepares: int) -> None:
    for num_gathers, rows, gradients, statistics in run_ranks(_rebuild, 3, fails_on, prepares):
        assert (num_gathers == 0) == (fails_on < 0 and prepares == 1)
        assert (rows, gradients, statistics) == ([0.0, 1.0, 2.0], 6.0, 9.0)
