"""Statistics over a window of steps: throughput, busy and waiting time of each rank, efficiency, bottleneck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from evenload.records.values import StepRecord

DATA_BOUND = 0.1
"""Fraction of the busiest rank's step from which on waiting for samples counts as the bottleneck."""
COMMUNICATION_BOUND = 0.25
"""Fraction of a step from which on collectives count as the bottleneck, on the rank that waits least."""


@dataclass(frozen=True)
class RankSummary:
    share: int
    busy: float
    """Own work: compute, optimizer, data, compile."""
    wait: float
    """Collectives: waiting for other ranks, and the transfer itself."""
    data: float = 0.0
    """Waiting for samples; part of `busy`."""


@dataclass(frozen=True)
class StepBottleneck:
    kind: Literal["data", "communication"]
    rank: int
    """The rank that it is measured on: the busiest for data, the one that waits least for communication."""
    fraction: float
    """Of that rank's step."""


@dataclass(frozen=True)
class WindowSummary:
    num_steps: int
    num_samples: int
    seconds: float
    samples_per_s: float
    busy: float
    """Mean over ranks of busy seconds / step seconds; 1 if no rank ever waits."""
    imbalance: float
    """max / mean − 1 of the ranks' busy seconds; 0 for equal load."""
    efficiency: float | None
    """Throughput / Σ solo speeds; None if the solo speeds are unknown."""
    ranks: tuple[RankSummary, ...]
    bottleneck: StepBottleneck | None = None
    """None if compute limits the steps, as it should."""
    staleness: float | None = None
    """Mean staleness of the updates of strategy ``async``, whose rank 0 is a server; None under another one."""


def summarize_steps(steps: Sequence[StepRecord], solo_per_s: Sequence[float] = ()) -> WindowSummary:
    """Compute the statistics of at least one step; if the number of ranks changed, ``ranks`` covers the last number.

    ``solo_per_s`` is ignored unless there is one value for each rank of the last step.
    """
    world_size = len(steps[-1].ranks)
    same_size = [step for step in steps if len(step.ranks) == world_size]
    same_size_s = sum(step.seconds for step in same_size)
    busy_s = [sum(step.ranks[rank].busy_s for step in same_size) for rank in range(world_size)]
    held_s = [
        sum(step.ranks[rank].wait_s + step.ranks[rank].comm_s for step in same_size) for rank in range(world_size)
    ]
    data_s = [sum(step.ranks[rank].data_s for step in same_size) for rank in range(world_size)]
    seconds = sum(step.seconds for step in steps)
    num_samples = sum(step.num_samples for step in steps)
    samples_per_s = num_samples / seconds if seconds > 0 else 0.0
    stale = [step.metrics["staleness"] for step in steps if {"staleness", "worker"} <= step.metrics.keys()]
    is_async = len(stale) == len(steps) and world_size > 1
    mean_s = sum(busy_s) / (world_size - is_async) if world_size else 0.0
    known = len(solo_per_s) == world_size and sum(solo_per_s) > 0
    # The first step of a session may include seconds from before it began (the start of the loader).
    whole_s = max([same_size_s, *(own + wait for own, wait in zip(busy_s, held_s, strict=True))]) or float("inf")
    ranks = tuple(
        RankSummary(share, own_s / whole_s, other_s / whole_s, reading_s / whole_s)
        for share, own_s, other_s, reading_s in zip(steps[-1].shares, busy_s, held_s, data_s, strict=True)
    )
    return WindowSummary(
        num_steps=len(steps),
        num_samples=num_samples,
        seconds=seconds,
        samples_per_s=samples_per_s,
        busy=mean_s / whole_s,
        imbalance=max(busy_s) / mean_s - 1 if mean_s > 0 else 0.0,
        efficiency=samples_per_s / sum(solo_per_s) if known else None,
        ranks=ranks,
        bottleneck=None if is_async else _find_bottleneck(ranks),
        staleness=sum(stale) / len(stale) if is_async else None,
    )


def _find_bottleneck(ranks: Sequence[RankSummary]) -> StepBottleneck | None:
    # The busiest rank decides: a delay of it shows up on the other ranks as time in collectives.
    if not ranks:
        return None
    rank = max(range(len(ranks)), key=lambda index: ranks[index].busy)
    if ranks[rank].data >= DATA_BOUND:
        return StepBottleneck("data", rank, ranks[rank].data)
    least = min(range(len(ranks)), key=lambda index: ranks[index].wait)
    if ranks[least].wait >= COMMUNICATION_BOUND:
        return StepBottleneck("communication", least, ranks[least].wait)
    return None
