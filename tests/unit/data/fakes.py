"""Several ranks side by side in one process: planners that decide by table, loaders driven in lockstep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from evenload.balance.split import scale_shares, slice_sizes
from evenload.balance.values import StepPlan
from evenload.training.comm.clock import StepClock
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.data.loader import GlobalLoader

CPU = torch.device("cpu")


class Board:
    """What all ranks know: the decisions, and what rank 0 told."""

    def __init__(self, shares: Sequence[int], num_micro: int = 1) -> None:
        self.decisions: list[tuple[int, tuple[int, ...], int]] = [(0, tuple(shares), num_micro)]
        self.told: list[list[int]] = []

    @property
    def world_size(self) -> int:
        return len(self.decisions[0][1])

    def decide(self, from_step: int, shares: Sequence[int], num_micro: int = 1) -> None:
        self.decisions.append((from_step, tuple(shares), num_micro))

    def planner(self, rank: int) -> Planner:
        return Planner(self, rank)


class Planner:
    in_order = True

    def __init__(self, board: Board, rank: int) -> None:
        self.board = board
        self.rank = rank
        self.world_size = board.world_size
        self.num_heard = 0

    def plan(self, epoch: int, epoch_step: int, global_step: int, start: int, num_samples: int) -> StepPlan:
        shares, num_micro = next(
            (shares, num_micro)
            for from_step, shares, num_micro in reversed(self.board.decisions)
            if from_step <= global_step
        )
        return plan_of(epoch, epoch_step, start, num_samples, shares, num_micro)

    def revision(self) -> int:
        return len(self.board.decisions)

    def repeats_plans(self, global_step: int) -> bool:
        return all(from_step <= global_step for from_step, _, _ in self.board.decisions)

    def next_batch_size(self, step: int | None) -> None:
        return None

    def steps(self, todo: Sequence[int]) -> Iterator[int]:
        return iter(todo)

    def following(self, step: int, todo: Sequence[int]) -> Iterator[int]:
        return (other for other in todo if other > step)

    def global_step(self, step: int, committed: int) -> int:
        return committed

    def agree(self, values: Sequence[int] | None) -> list[int]:
        if self.rank == 0:
            assert values is not None
            self.board.told.append([int(value) for value in values])
        self.num_heard += 1
        return list(self.board.told[self.num_heard - 1])


def plan_of(epoch: int, step: int, start: int, num_samples: int, shares: Sequence[int], num_micro: int) -> StepPlan:
    rows = tuple(scale_shares(shares, size) for size in slice_sizes(num_samples, num_micro))
    return StepPlan(0, epoch, step, 0, start, rows)


def make_ranks(board: Board, loader: Any, **settings: Any) -> list[GlobalLoader]:
    """One GlobalLoader a rank; `loader` is a DataLoader, or makes one for each rank."""
    return [
        GlobalLoader(
            loader() if callable(loader) and not isinstance(loader, DataLoader) else loader,
            board.planner(rank),
            **{"seed": 7, "device": CPU, "keyed_rng": True, "clock": StepClock(CPU), **settings},
        )
        for rank in range(board.world_size)
    ]


def lockstep(ranks: list[GlobalLoader], commit: bool = True) -> Iterator[list[GlobalBatch]]:
    """The batches of one step on every rank, rank 0 first."""
    iterators = [iter(rank) for rank in ranks]
    while True:
        batches = [next(iterator, None) for iterator in iterators]
        if any(batch is None for batch in batches):
            assert batches == [None] * len(ranks)
            return
        found = [batch for batch in batches if batch is not None]
        yield found
        if commit:
            for rank, batch in zip(ranks, found, strict=True):
                rank.commit(batch)


def joined(batches: list[GlobalBatch]) -> list[list[int]]:
    """The samples of each micro-batch over all ranks, in order of rank, idle ranks left out."""
    rows = []
    for micro_index in range(batches[0].plan.num_micro):
        row: list[int] = []
        for rank, batch in enumerate(batches):
            part = batch.micro(micro_index)
            values = part.data.tolist()
            assert part.num_samples == batch.plan.micro[micro_index][rank]
            assert part.idle == (part.num_samples == 0)
            assert len(values) == max(1, part.num_samples)
            if not part.idle:
                row += values
        rows.append(row)
    return rows


def flat(rows: list[list[int]]) -> list[int]:
    return [value for row in rows for value in row]


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        return index
