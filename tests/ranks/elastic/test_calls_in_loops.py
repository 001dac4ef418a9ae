"""Calls inside a loop over `run.batches`, beside a rank without batches: they are among the ranks that have one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import evenload
from evenload.errors import StepError
from evenload.testing import run_ranks
from evenload.training.comm.control import Operation
from tests.ranks.elastic.supervised import Supervised
from tests.ranks.elastic.test_lost_gathers import inject, opened


class Stream(IterableDataset[int]):
    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._num_samples))


def script(folder: str, shares: tuple[int, ...], num_samples: int, stream: bool) -> dict[str, Any]:
    """Call each thing in a loop; the last rank has no batches: two samples for three ranks, or a share of 0."""
    run = opened(folder, shares)
    data: Any = Stream(num_samples) if stream else range(num_samples)
    loader = DataLoader(data, batch_size=6)
    members = run.world_size - 1
    total, rounds = 0, 0
    for batch in run.batches(loader):
        rounds += 1
        total += run.reduce(int(batch.sum()))
        run.barrier()
        assert run.reduce({"one": 1, "ranks": [run.rank, torch.tensor([1.5])]}) == {
            "one": members,
            "ranks": [sum(range(members)), torch.tensor([1.5 * members])],
        }
        assert run.reduce(run.rank, op="max") == members - 1 and run.reduce(torch.tensor(run.rank), op="min") == 0
        assert run.reduce(run.rank, op="mean") == sum(range(members)) / members
        assert run.reduce(0.5 if run.rank else 1) == 1 + 0.5 * (members - 1)
        assert run.reduce(torch.tensor([True, False])).tolist() == [True, False]
        assert run.gather([run.rank]) == [*range(members)]
        assert run.any(run.rank == members - 1) and not run.any(False)
    assert bool(rounds) == (run.rank < members)
    assert rounds == 0 or total == sum(range(num_samples))
    assert run.reduce(1) == run.world_size and run.gather(run.rank) == [*range(run.world_size)]
    run.barrier()
    run.close()
    return {"rounds": rounds}


WAYS = [((4, 4, 4), 2), ((6, 6, 0), 24), ((4, 4, 4, 0), 15)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("shares", "num_samples"), WAYS)
def test_in_a_run_that_ranks_may_leave(tmp_path: Path, shares: tuple[int, ...], num_samples: int, stream: bool) -> None:
    supervised = Supervised(tmp_path, script, str(tmp_path / "run"), shares, num_samples, stream)
    supervised.start(len(shares))
    results = supervised.run(60)
    assert len(results) == len(shares) and max(found["rounds"] for found in results.values()) > 0


@pytest.mark.parametrize(("shares", "num_samples", "stream"), [(*WAYS[0], False), (*WAYS[1], True)])
def test_in_a_run_that_no_loss_may_change(
    tmp_path: Path, shares: tuple[int, ...], num_samples: int, stream: bool
) -> None:
    assert len(run_ranks(script, len(shares), str(tmp_path / "run"), shares, num_samples, stream)) == len(shares)


def lossy(folder: str, place: str, number: int) -> dict[str, Any]:
    """Rank w1 dies in a sum inside the loop; the others evaluate its batches after theirs."""
    import os

    worker = Path(os.environ["EVENLOAD_WORKER"]).stem
    run = opened(folder, (4, 4, 4, 0))
    inject(worker, place, (Operation.REDUCE_BATCH, number))
    seen: list[int] = []
    sums = []
    for batch in run.batches(DataLoader(range(24), batch_size=6)):  # type: ignore[arg-type]
        seen += batch.tolist()
        sums.append(run.reduce(len(batch)))
    found = {"sums": sums, "all": sorted(run.gather(seen)), "rank": run.rank}
    run.close()
    return found


@pytest.mark.parametrize(("place", "number"), [("before", 2), ("confirm", 2)])
def test_a_rank_is_lost_in_a_sum_inside_the_loop(tmp_path: Path, place: str, number: int) -> None:
    supervised = Supervised(tmp_path, lossy, str(tmp_path / "run"), place, number)
    supervised.start(4)
    results = supervised.run(60)
    assert supervised.lost == ["w1"] and len(results) == 3
    assert all(found["all"] == [*range(24)] for found in results.values())
    with_batches = [found["sums"] for found in results.values() if found["rank"] == 0]
    assert with_batches[0][0] == 6 and with_batches[0][1] == (4 if place == "before" else 6)


def kept(folder: str, call: str) -> str:
    """An iterator that is not used up is a loop that could go on: a call after it is not for the rank without batches."""
    run = opened(folder, (6, 6, 0))
    batches = run.batches(DataLoader(range(24), batch_size=6))  # type: ignore[arg-type]
    next(batches, None)
    try:
        if call == "close":
            batches.close()  # type: ignore[attr-defined]
        total = run.reduce(1)
        run.checkpoint()
    except evenload.DesyncError as error:
        return str(error)
    return str(total)


def test_an_iterator_that_is_not_used_up_is_a_loop(tmp_path: Path) -> None:
    texts = run_ranks(kept, 3, str(tmp_path / "run"), "")
    assert len(set(texts)) == 1 and "had no batch for rank 2, which is past it" in texts[0], texts
    assert "move all else behind the loop" in texts[0] and "close() it" in texts[0] and "is_main" not in texts[0]


def test_a_closed_iterator_is_none(tmp_path: Path) -> None:
    assert run_ranks(kept, 3, str(tmp_path / "run"), "close") == ["3"] * 3


def in_group(folder: str) -> str:
    run = opened(folder, (6, 6, 0))
    everyone, pair = run.group([0, 1, 2]), run.group([0, 1])
    text = ""
    for _ in run.batches(DataLoader(range(24), batch_size=6)):  # type: ignore[arg-type]
        assert run.reduce(run.rank, group=pair) == 1
        try:
            run.reduce(1, group=everyone)
        except StepError as error:
            text = str(error)
    return text


def test_a_group_with_a_rank_that_has_no_batches(tmp_path: Path) -> None:
    first, second, third = run_ranks(in_group, 3, str(tmp_path / "run"))
    assert first == second and "no batch for rank 2 of the group; call it after the loop" in first and third == ""
