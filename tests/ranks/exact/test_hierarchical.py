"""Training where some ranks sum their gradients first (GPUs beside CPU ranks): as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import evenload
from evenload.balance.decision import Decision
from evenload.testing import run_ranks
from tests.ranks.elastic.test_leaving import BATCH, STEPS, Net, _data
from tests.ranks.exact.measure import check
from tests.ranks.exact.ranks import Setting
from tests.ranks.exact.tasks import Recorder
from tests.ranks.exact.test_methods import expected_of, train_methods
from tests.ranks.training import test_exceptions

NAMES = (
    *(
        "Clipped",
        "Ragged",
        "Normed",
        "PenalisedNormed",
        "SilentRank",
        "SilentRankNormed",
        "Gan",
        "Unused",
        "Unfreezing",
    ),
    *("Checkpointed", "CheckpointedReentrant", "Deepening", "Experts", "ComplexWeights", "Lbfgs", "LateDrawing"),
    *("OutOfMemory", "OutOfMemoryNormed"),
)
LAYOUTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "0 and 1 of 3": (3, (0, 1)),
    "1 and 2 of 3": (3, (1, 2)),
    "0 of 3": (3, (0,)),
    "0 and 2 of 4": (4, (0, 2)),
}
"""Number of ranks, and those that sum first."""
SHARES = {3: ((24, 6, 2), (31, 1, 0)), 4: ((16, 10, 4, 2), (20, 11, 0, 1))}


def _jobs(num_ranks: int, inner: tuple[int, ...]) -> list[tuple[str, Setting]]:
    """Every second task with one of the splits, in turn; the first two layouts share the tasks, and so do the last two."""
    jobs = []
    for index, name in enumerate(NAMES):
        is_second = inner == (1, 2) or num_ranks == 4
        if index // 4 % 2 != is_second:
            continue
        balance, micro = SHARES[num_ranks][index % 2], ("auto", 8)[index // 2 % 2]
        jobs.append((name, Setting(balance, "auto" if "OutOfMemory" in name else micro, options={"timeout_s": 20.0})))
    if len(inner) == 1:
        jobs += [(name, Setting("even", 8, True, options={"timeout_s": 20.0})) for name in ("Normed", "Unused")]
    return jobs


@pytest.fixture(scope="module", params=LAYOUTS)
def trained(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Setting, list[Recorder | str]]]:
    num_ranks, inner = LAYOUTS[request.param]
    jobs = _jobs(num_ranks, inner)
    ranks = run_ranks(
        train_methods,
        num_ranks,
        jobs,
        str(tmp_path_factory.mktemp("hierarchical")),
        timeout_s=150.0,
        inner_backend=lambda rank: "gloo" if rank in inner else "",
    )
    return [(name, setting, list(results)) for (name, setting), *results in zip(jobs, *ranks, strict=True)]


def test_as_in_one_process(trained: Any) -> None:
    for name, setting, records in trained:
        for record in records:
            assert not isinstance(record, str), f"{name}: {record}"
        expected = expected_of(name, tuple(records[0].num_micro))
        check(f"{name} hierarchical {setting}", records, expected)


@pytest.mark.parametrize("inner", [(0, 1), (1, 2)], ids=str)
def test_an_exception_in_a_backward_leaves_nothing_behind(inner: tuple[int, ...], tmp_path: Any) -> None:
    """It is raised on the first of the ranks that sum first, and on another."""
    jobs = [job for job in test_exceptions.JOBS if job[1] == [1]]
    ranks = run_ranks(
        test_exceptions._train_all,
        3,
        jobs,
        str(tmp_path),
        timeout_s=150.0,
        inner_backend=lambda rank: "gloo" if rank in inner else "",
    )
    for rank, results in enumerate(ranks):
        for (where, _, norm), (caught, weights) in zip(jobs, results, strict=True):
            assert len(caught) == 1 and caught[0].startswith("ValueError" if rank == 1 else "PeerLostError"), where
            expected = test_exceptions._plain(norm)
            assert float((weights - expected).norm() / expected.norm()) <= 1e-12, where


LEAVING: dict[tuple[int, ...], list[tuple[int, ...]]] = {
    # The first of the ranks that sum first, another, all of them.
    (1, 2): [(8, 0, 4, 4), (8, 4, 0, 4), (12, 0, 0, 4), (6, 4, 4, 2)],
    # All others, the second of those that sum first, all but rank 0.
    (0, 1): [(10, 6, 0, 0), (8, 0, 4, 4), (16, 0, 0, 0), (6, 4, 4, 2)],
}
"""Ranks that sum first -> shares that are decided every third step."""


def _train_leaving(norm: bool, inner: tuple[int, ...], folder: str) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    run = evenload.init(project_dir=f"{folder}/{norm}", seed=0, timeout_s=60, micro_batch=BATCH, check_every=1)
    model = Net(norm)
    model, loader = run.prepare(model, DataLoader(_data(), batch_size=BATCH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    run.resume(model=model, optimizer=optimizer)
    loader.planner._balancer = None  # the test decides alone
    groups = run._context.groups
    computing, decisions = [], iter(LEAVING[inner])
    for _ in range(loader.epoch, 2):
        for step in loader:
            if run.rank == 0 and step.index % 3 == 1 and (shares := next(decisions, None)) is not None:
                kind = "left_out"
                loader.planner._pending = Decision(shares, 1, kind, 1, None, "the test decides", 1.0, 0.5)
            step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()
            now = groups.generation
            computing.append(now.computing)
            both = len({rank in inner for rank in now.computing}) == 2
            assert (now.hierarchy is not None) == (both and now.computes)
    weights = torch.cat([v.detach().flatten().double() for v in model.state_dict().values()])
    run.close()
    return weights, computing


def _train_both(inner: tuple[int, ...], folder: str) -> list[tuple[torch.Tensor, list[tuple[int, ...]]]]:
    return [_train_leaving(norm, inner, folder) for norm in (False, True)]


def _plain(norm: bool) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model = Net(norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        x, y = _data().tensors
        for index in range(2 * STEPS):
            rows = slice(index % STEPS * BATCH, (index % STEPS + 1) * BATCH)
            nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([v.detach().flatten().double() for v in model.state_dict().values()])
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("inner", LEAVING, ids=str)
def test_ranks_leave_and_return(inner: tuple[int, ...], tmp_path: Any) -> None:
    ranks = run_ranks(
        _train_both,
        4,
        inner,
        str(tmp_path),
        timeout_s=150.0,
        inner_backend=lambda rank: "gloo" if rank in inner else "",
    )
    left = [tuple(rank for rank, share in enumerate(shares) if share) for shares in LEAVING[inner]]
    for results in ranks:
        for norm, (weights, computing) in zip((False, True), results, strict=True):
            assert list(dict.fromkeys(computing)) == [(0, 1, 2, 3), *left[:3]]
            assert computing[-1] == (0, 1, 2, 3)
            expected = _plain(norm)
            assert float((weights - expected).norm() / expected.norm()) <= 1e-12
