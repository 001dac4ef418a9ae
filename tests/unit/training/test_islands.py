"""How a batch is divided over islands, and schedules that follow the global step."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from evenload.errors import DataError, StepError
from evenload.training.comm.islands import IslandLink, IslandMap
from evenload.training.comm.pending import Pending
from evenload.training.islands.learning_rates import LearningRates
from evenload.training.islands.schedulers import FollowedScheduler
from evenload.training.islands.shares import NUM_BLOCKS, IslandShares, ReportTimes, at_least_one, blocks_of
from evenload.training.parallel.outer import OuterState
from evenload.training.parallel.wire.outer_wire import OuterWire


def test_shares_come_near_the_measured_speeds() -> None:
    parts = IslandShares(96, [1, 1], decides=True)
    for step in range(12):
        noise = [1 + 0.01 * ((7 * step + index) % 3 - 1) for index in range(NUM_BLOCKS)]
        first, second = parts.shares
        decision = parts.observe([[0.001 * first * n for n in noise], [0.002 * second * n for n in noise]])
        if decision is not None:
            parts.set(decision.shares)
    assert parts.shares[0] == pytest.approx(64, abs=2)
    assert sum(parts.shares) == 96


def test_no_island_is_left_without_samples() -> None:
    assert at_least_one((7, 0, 0, 1)) == (5, 1, 1, 1)
    parts = IslandShares(30, [29, 1], decides=False)
    assert parts.cut(30) == [0, 29, 30]
    assert parts.cut(3) == [0, 2, 3]
    with pytest.raises(DataError, match="drop_last=True"):
        parts.cut(1)


def test_parts_that_are_no_whole_samples_change_by_one_about_their_mean() -> None:
    parts = IslandShares(16, [85, 43], decides=False, pieces=8)
    assert parts.means == (10.625, 5.375)
    first = [parts.cut(16, 16 * step)[1] for step in range(8)]
    assert (min(first), max(first), sum(first)) == (10, 11, 85)
    assert all(abs(sum(first[:count]) - 10.625 * count) < 1 for count in range(9))
    # A short last batch is divided as near as it can be; and no island is ever left without a sample.
    assert parts.cut(3) == [0, 2, 3]
    parts = IslandShares(3, [22, 1, 1], decides=False, pieces=8)
    assert parts.means == (1, 1, 1)
    assert all(low < high for step in range(20) for low, high in itertools.pairwise(parts.cut(4, 4 * step)))


def test_short_rounds_are_divided_by_what_earlier_ones_left() -> None:
    parts = IslandShares(40, [213, 107], decides=False, pieces=8)
    cuts = [parts.cut(size, before)[1] for before, size in [(0, 8), (8, 8), (16, 24), (40, 40), (80, 40)]]
    assert cuts == [5, 5, 16, 27, 26]
    assert sum(cuts) == 120 * 213 // 320


@pytest.mark.parametrize("count", [0, 1, 3, 8, 20])
def test_blocks_hold_every_step(count: int) -> None:
    blocks = blocks_of([float(index + 1) for index in range(count)])
    assert len(blocks) == NUM_BLOCKS
    assert [block > 0 for block in blocks] == [index < count for index in range(NUM_BLOCKS)]
    if count >= NUM_BLOCKS:
        assert all(low < high for low, high in itertools.pairwise(blocks))


def test_times_are_exchanged_early_and_then_as_often_as_is_cheap() -> None:
    times = ReportTimes()
    times.cost_s = 0.08
    done, at = 0, []
    while (done := done + times.gap) < 300:
        at.append(done)
        times.gap = times.next_gap(0.5, has_moved=done == 128)
    assert at == [4, 8, 16, 32, 64, 96, 128, 136, 152, 184, 216, 248, 280]
    # The wait is half a percent of 3200 steps of 5 ms, and two percent of 800.
    assert (times.next_gap(0.005, has_moved=True), times.next_gap(0.0, has_moved=True)) == (800, 8)
    times.gap = 3000
    assert times.next_gap(0.005, has_moved=False) == 3200


def make(kind: str) -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.4, momentum=0.5)
    if kind == "sequential":
        return optimizer, SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1.0, 4), StepLR(optimizer, 3)], [5])
    if kind == "chained":
        return optimizer, ChainedScheduler([LinearLR(optimizer, 0.1, 1.0, 4), ExponentialLR(optimizer, 0.9)])
    if kind == "cosine":
        return optimizer, CosineAnnealingLR(optimizer, 30)
    return optimizer, OneCycleLR(optimizer, 0.8, total_steps=60)


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("kind", ["cosine", "one_cycle", "sequential", "chained"])
@pytest.mark.parametrize("num_batches", [2, 7])
def test_a_schedule_stands_at_the_global_step(kind: str, num_batches: int) -> None:
    (ours, followed), (theirs, plain) = make(kind), make(kind)
    watch = FollowedScheduler(followed)
    for _ in range(3):
        watch.begin()
        for _ in range(num_batches):
            followed.step()
        watch.end(num_batches, 4, left_early=False)
        for _ in range(4):
            plain.step()
        for group, wanted in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert {k: v for k, v in group.items() if k != "params"} == {
                k: v for k, v in wanted.items() if k != "params"
            }


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_a_schedule_between_loops_stays_and_a_partial_one_is_named() -> None:
    optimizer, scheduler = make("cosine")
    watch = FollowedScheduler(scheduler)
    watch.end(3, 4, left_early=False)
    assert optimizer.param_groups[0]["lr"] == 0.4
    scheduler.step()
    with pytest.raises(StepError, match="made 1 steps in the 3 steps of an island"):
        watch.end(3, 4, left_early=False)


def test_a_schedule_by_a_metric_is_refused_inside_the_loop_also_while_islands_take_equal_steps() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.4)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    scheduler.step(1.0)  # between two loops
    watch = FollowedScheduler(scheduler)
    watch.end(4, 4, left_early=False)
    for _ in range(4):
        scheduler.step(1.0)
    with pytest.raises(StepError, match="Call it once an epoch, after the loop, with one value for all"):
        watch.end(4, 4, left_early=False)


def test_an_imaginary_part_synchronises() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, dtype=torch.complex128))
    groups: Any = SimpleNamespace(nccl_ranks=(), begin=None, gradients=None)
    link = IslandLink(groups, groups, IslandMap(((0,),), 0))
    outer = OuterState([model], link, lr=0.5, momentum=0.0, num_fragments=1)
    with torch.no_grad():
        model.weight.fill_(2 + 4j)
    outer.synchronise(5.0)
    assert torch.equal(model.weight, torch.full((3,), 1 + 2j, dtype=torch.complex128))


def test_a_fragment_beside_a_large_parameter_may_hold_none() -> None:
    model = nn.Sequential(nn.Linear(64, 1, bias=False), nn.Linear(1, 1, bias=False), nn.Linear(1, 64, bias=False))
    groups: Any = SimpleNamespace(nccl_ranks=(), begin=None, gradients=None)
    link = IslandLink(groups, groups, IslandMap(((0,),), 0))
    outer = OuterState([model], link, lr=1.0, momentum=0.0, num_fragments=4)
    assert [len(fragment.tensors) for fragment in outer.fragments] == [1, 0, 1, 1]
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    outer.show()
    assert not torch.equal(model[0].weight, torch.full((1, 64), 3.0))
    outer.hide()
    outer.synchronise(5.0)
    assert torch.equal(model[0].weight, torch.full((1, 64), 3.0))


def test_errors_of_a_checkpoint_follow_the_weights_to_their_device() -> None:
    """A checkpoint is read onto the CPU; `meta` stands for a GPU, whose sums take nothing from the CPU."""
    sent: list[torch.Tensor] = []

    def sum_async(tensor: torch.Tensor) -> Pending:
        sent.append(tensor)
        return Pending(None, blocking=False)

    groups = SimpleNamespace(leads=True, on_gpus=True, leaders=(0, 1), index=0)
    link: Any = SimpleNamespace(num_islands=2, begin=None, groups=groups, sum_async=sum_async)
    wire = OuterWire("int8", link, seed=0)
    wire.load_state_dict({"errors": {"weight": torch.ones(6)}, "total_per_own": 2.0})
    wire.gather({"weight": torch.zeros(2, 3, device="meta"), "bias": torch.zeros(2, device="meta")})
    assert [(tensor.device.type, tensor.numel()) for tensor in sent] == [("meta", 6), ("meta", 2)]


def _optimizer(lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def test_schedules_that_round_differently_are_equal() -> None:
    """As on unlike machines: a cosine that differs in its last digits, to the end, where its rate comes near 0."""
    num_steps = 1000
    rates = []
    for ulps in (0, 1, -1):
        optimizer = _optimizer()

        def factor(step: int, ulps: int = ulps) -> float:
            cosine = math.cos(math.pi * step / num_steps)
            return (1 + math.nextafter(cosine, ulps * math.inf) if ulps else 1 + cosine) / 2

        rates.append((LearningRates([optimizer], []), optimizer, LambdaLR(optimizer, factor)))
    unlike = 0
    for _ in range(num_steps - 1):
        rows = [rate.row() for rate, _, _ in rates]
        unlike += len({row[0] for row in rows}) > 1
        LearningRates.check(rows, [0, 1, 2])
        for _, optimizer, scheduler in rates:
            optimizer.step()
            scheduler.step()
    assert unlike > num_steps / 2


def test_schedules_that_part_are_named() -> None:
    """By the rate, or before it by the metric; a metric of all that unlike devices round differently is the same."""
    for metrics, factor, words in (
        ((1.0, 1.0 + 1e-6), 1.0, ""),
        ((1.0, 1.001), 1.0, r"learning rates 0.1, 0.1\)"),
        ((1.0, 1.0), 0.5, r"learning rates 0.1, 0.05\)"),
        ((math.inf, 1.0), 1.0, r"learning rates 0.1, 0.1\)"),
    ):
        rows = []
        for metric, rate in zip(metrics, (0.1, 0.1 * factor), strict=True):
            optimizer = _optimizer(rate)
            plateau = ReduceLROnPlateau(optimizer)
            plateau.step(metric)
            rows += 2 * [LearningRates([optimizer], [plateau]).row()]
        if words:
            with pytest.raises(StepError, match=words):
                LearningRates.check(rows, [0, 2])
        else:
            LearningRates.check(rows, [0, 2])
