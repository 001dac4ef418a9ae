"""The arithmetic over a window of steps: throughput, who was busy, who waited, efficiency, what it is bound by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from evenload.records.values import StepRecord

DATA_BOUND = 0.1
"""From this part of its step on, waiting for samples is what holds the busiest rank up."""
COMMUNICATION_BOUND = 0.25
"""From this part of its step on, collectives are, where even the rank that waits least is in them so long."""


@dataclass(frozen=True)
class RankSummary:
    """One rank over a window, as fractions of the window's wall seconds."""

    share: int
    """Samples in the last step."""
    busy: float
    """Own work: compute, optimizer, data, compile."""
    wait: float
    """In collectives: waiting for the others, and the transfer itself."""
    data: float = 0.0
    """The part of `busy` that goes by waiting for samples."""


@dataclass(frozen=True)
class Verdict:
    """What the steps are bound by, where it is not computing."""

    kind: Literal["data", "communication"]
    rank: int
    """The rank whose step it is measured on: the busiest, which all others wait for."""
    fraction: float
    """Of that rank's step."""


@dataclass(frozen=True)
class Summary:
    """A window of steps; the ranks are those of its last step."""

    num_steps: int
    num_samples: int
    seconds: float
    samples_per_s: float
    busy: float
    """Mean over the ranks of busy seconds / step seconds; 1 when nobody ever waits."""
    imbalance: float
    """max / mean − 1 of the ranks' busy seconds; 0 when all are equally loaded."""
    efficiency: float | None
    """Throughput / Σ solo speeds; None where the solo speeds are not known."""
    ranks: tuple[RankSummary, ...]
    verdict: Verdict | None = None
    """None where the steps are bound by computing, as they should be."""


def summarise(steps: Sequence[StepRecord], solo_per_s: Sequence[float] = ()) -> Summary:
    """Sums up a window.

    Args:
        steps: at least one record. Where the number of ranks changed, ranks are judged by the steps of the last number.
        solo_per_s: samples/s of each rank alone; used where there is one for each rank of the last step.

    Returns:
        The summary; efficiency = (Σ samples / Σ seconds) / Σ solo speeds, busy = Σ_r busy_r / (world · Σ seconds).
    """
    world_size = len(steps[-1].ranks)
    alike = [step for step in steps if len(step.ranks) == world_size]
    alike_s = sum(step.seconds for step in alike)
    busy_s = [sum(step.ranks[rank].busy_s for step in alike) for rank in range(world_size)]
    held_s = [sum(step.ranks[rank].wait_s + step.ranks[rank].comm_s for step in alike) for rank in range(world_size)]
    data_s = [sum(step.ranks[rank].data_s for step in alike) for rank in range(world_size)]
    seconds = sum(step.seconds for step in steps)
    num_samples = sum(step.num_samples for step in steps)
    samples_per_s = num_samples / seconds if seconds > 0 else 0.0
    mean_s = sum(busy_s) / world_size if world_size else 0.0
    known = len(solo_per_s) == world_size and sum(solo_per_s) > 0
    # A sitting's first step may hold seconds from before it began (the loader's start).
    whole_s = max([alike_s, *(own_s + other_s for own_s, other_s in zip(busy_s, held_s, strict=True))]) or float("inf")
    ranks = tuple(
        RankSummary(share, own_s / whole_s, other_s / whole_s, reading_s / whole_s)
        for share, own_s, other_s, reading_s in zip(steps[-1].shares, busy_s, held_s, data_s, strict=True)
    )
    return Summary(
        num_steps=len(steps),
        num_samples=num_samples,
        seconds=seconds,
        samples_per_s=samples_per_s,
        busy=mean_s / whole_s,
        imbalance=max(busy_s) / mean_s - 1 if mean_s > 0 else 0.0,
        efficiency=samples_per_s / sum(solo_per_s) if known else None,
        ranks=ranks,
        verdict=judge(ranks),
    )


def judge(ranks: Sequence[RankSummary]) -> Verdict | None:
    """What holds the steps up: looked for on the busiest rank, for whatever the others wait for is their wait for it."""
    if not ranks:
        return None
    rank = max(range(len(ranks)), key=lambda index: ranks[index].busy)
    if ranks[rank].data >= DATA_BOUND:
        return Verdict("data", rank, ranks[rank].data)
    least = min(range(len(ranks)), key=lambda index: ranks[index].wait)
    if ranks[least].wait >= COMMUNICATION_BOUND:
        return Verdict("communication", least, ranks[least].wait)
    return None
