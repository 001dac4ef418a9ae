"""Statistics over a window of steps: throughput, busy and waiting time of each rank, efficiency, bottleneck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from evenload.records.values import RankSpread, RankTimes, StepRecord

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
class RankRange:
    """Many ranks in a window of steps: the range of their values, as fractions of the steps."""

    num_ranks: int
    shares: tuple[int, int]
    busy: tuple[float, float]
    """Means over the steps of the least and the most busy rank of each."""
    waits_least: int
    """The rank that waited least in most steps."""
    wait: float
    """Mean over the steps of the least wait of any rank."""


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
    """Empty for records that sum many ranks up."""
    bottleneck: StepBottleneck | None = None
    """None if compute limits the steps, as it should."""
    staleness: float | None = None
    """Mean staleness of the updates of strategy ``async``, whose rank 0 is a server; None under another one."""
    many: RankRange | None = None
    """The ranks where records sum many up."""


def summarize_steps(steps: Sequence[StepRecord], solo_per_s: Sequence[float] = ()) -> WindowSummary:
    """Compute the statistics of at least one step; if the number of ranks changed, ``ranks`` covers the last number.

    ``solo_per_s`` is ignored unless there is one value for each rank of the last step.
    """
    if steps[-1].spread is not None:
        return _summarize_many(steps, [step.spread for step in steps if step.spread is not None], solo_per_s)
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


def _summarize_many(
    steps: Sequence[StepRecord], spreads: Sequence[RankSpread], solo_per_s: Sequence[float]
) -> WindowSummary:
    """Compute the statistics of steps with a spread: the extremes are means over those of each step."""
    last = spreads[-1]
    spreads = [spread for spread in spreads if spread.num_ranks == last.num_ranks]
    seconds = sum(step.seconds for step in steps)
    same_size_s = sum(step.seconds for step in steps if step.num_ranks == last.num_ranks)
    num_samples = sum(step.num_samples for step in steps)
    samples_per_s = num_samples / seconds if seconds > 0 else 0.0
    stale = [step.metrics["staleness"] for step in steps if {"staleness", "worker"} <= step.metrics.keys()]
    busiest, waits_least = [spread.busiest[1] for spread in spreads], [spread.waits_least[1] for spread in spreads]
    mean_s, most_s = sum(spread.mean.busy_s for spread in spreads), sum(times.busy_s for times in busiest)
    # Like the whole of few ranks; see above.
    whole_s = max(same_size_s, *map(_held_and_busy_s, (busiest, waits_least))) or float("inf")
    data = sum(times.data_s for times in busiest) / whole_s
    least_wait = sum(times.wait_s + times.comm_s for times in waits_least) / whole_s
    rank = _most_common(spread.waits_least[0] for spread in spreads)
    known = len(solo_per_s) == last.num_ranks and sum(solo_per_s) > 0
    bottleneck = None
    if data >= DATA_BOUND:
        bottleneck = StepBottleneck("data", _most_common(spread.busiest[0] for spread in spreads), data)
    elif least_wait >= COMMUNICATION_BOUND:
        bottleneck = StepBottleneck("communication", rank, least_wait)
    is_async = len(stale) == len(steps)
    return WindowSummary(
        num_steps=len(steps),
        num_samples=num_samples,
        seconds=seconds,
        samples_per_s=samples_per_s,
        busy=mean_s / whole_s,
        imbalance=most_s / mean_s - 1 if mean_s > 0 else 0.0,
        efficiency=samples_per_s / sum(solo_per_s) if known else None,
        ranks=(),
        bottleneck=None if is_async else bottleneck,
        staleness=sum(stale) / len(stale) if is_async else None,
        many=RankRange(
            last.num_ranks,
            last.shares,
            (sum(spread.least_busy_s for spread in spreads) / whole_s, most_s / whole_s),
            rank,
            least_wait,
        ),
    )


def _held_and_busy_s(times: Sequence[RankTimes]) -> float:
    return sum(one.busy_s + one.wait_s + one.comm_s for one in times)


def _most_common(ranks: Iterable[int]) -> int:
    return Counter(ranks).most_common(1)[0][0]


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
