"""A tuple of loaders with workers: the same samples and the same randomness as without, at any split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.unit.data.fakes import Board, Numbers, make_ranks
from tests.unit.data.test_tuples import steps_of, two


class NoisyNumbers(Numbers):
    """Sample i with a draw of torch's generator."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), torch.rand(()).item()], dtype=torch.float64)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_randomness_inside_the_datasets_is_keyed(num_workers: int) -> None:
    def draws(shares: tuple[int, ...], num_workers: int) -> list[Any]:
        loaders = (
            DataLoader(NoisyNumbers(12), 4, shuffle=True, num_workers=num_workers),
            DataLoader(NoisyNumbers(14), 6, shuffle=True),
        )
        return list(steps_of(make_ranks(Board(shares), loaders), 2))

    wanted = draws((1,), 0)
    assert draws((2, 0, 1), num_workers) == wanted
    drawn = [row[1] for step in wanted for part in step for row in part]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_follow_changed_plans(persistent: bool) -> None:
    options = {"num_workers": 1, "persistent_workers": persistent, "prefetch_factor": 4}
    wanted = list(steps_of(make_ranks(Board((1,)), two(24, 13)), 3))
    board = Board((1, 1))
    ranks = make_ranks(board, two(24, 13, **options))
    found = []
    for number, step in enumerate(steps_of(ranks, 3)):
        found.append(step)
        board.decide(number + 2, (1 + number % 3, 2))
    for rank in ranks:
        rank.close()
    assert found == wanted
