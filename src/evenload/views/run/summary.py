"""The story of a run, from its records: shares and why, where time went, how fast, how even, how it learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.records.console import Facts
from evenload.records.lines import spell_floats
from evenload.records.reader import read_events, read_steps
from evenload.records.summary import Summary, summarise
from evenload.records.values import SEGMENTS, Event, StepRecord


@dataclass(frozen=True)
class SharesSpan:
    """Steps in a row that were split alike; ragged last batches of an epoch are passed over."""

    first_step: int
    last_step: int
    arm: str
    num_samples: int
    shares: tuple[int, ...]
    num_micro: int
    reason: str
    """The sentence of the event that decided it; empty where none did."""


@dataclass(frozen=True)
class RankStory:
    """One rank over the run: fractions of its seconds by segment, and the most memory it held."""

    device: str
    """What a person calls it; empty where nobody told."""
    num_steps: int
    """Steps that had this rank."""
    fractions: dict[str, float]
    """By segment (``data``, ``compute``, ...); they sum to 1."""
    memory_bytes: int


@dataclass(frozen=True)
class Losses:
    """The loss of the first and the last step, and the lowest one."""

    first: float
    last: float
    best: float
    best_step: int


@dataclass(frozen=True)
class Story:
    """All that `evenload show` tells. ``whole``, ``early`` and ``late`` are None without a committed step."""

    folder: str
    num_steps: int
    num_samples: int
    num_sittings: int
    first_epoch: int
    last_epoch: int
    seconds: float
    """Wall seconds of all steps."""
    solo_per_s: tuple[float, ...]
    whole: Summary | None
    early: Summary | None
    """The first tenth of the steps."""
    late: Summary | None
    """The last tenth of the steps."""
    losses: Losses | None
    metrics: dict[str, float]
    """The newest value of each metric."""
    arms: dict[str, Summary]
    """One summary an arm, where steps have arms."""
    spans: tuple[SharesSpan, ...]
    ranks: tuple[RankStory, ...]
    events: tuple[Event, ...]
    """Those with a message."""


def tell(folder: Path) -> Story:
    """Reads a run folder and sums it up.

    Raises:
        ConfigError: it is written by another version of Evenload.
    """
    steps = read_steps(folder)
    events = read_events(folder)
    facts = Facts()
    for event in events:
        facts.take(event)
    solo = facts.solo_per_s
    tenth = max(1, len(steps) // 10)
    arms = dict.fromkeys(step.arm for step in steps)
    return Story(
        folder=str(folder),
        num_steps=len(steps),
        num_samples=sum(step.num_samples for step in steps),
        num_sittings=max(1, sum(event.kind == "open" for event in events)),
        first_epoch=min((step.epoch for step in steps), default=0),
        last_epoch=max((step.epoch for step in steps), default=0),
        seconds=sum(step.seconds for step in steps),
        solo_per_s=solo,
        whole=summarise(steps, solo) if steps else None,
        early=summarise(steps[:tenth], solo) if steps else None,
        late=summarise(steps[-tenth:], solo) if steps else None,
        losses=_losses(steps),
        metrics={name: value for step in steps for name, value in step.metrics.items()},
        arms={arm: summarise([step for step in steps if step.arm == arm], solo) for arm in arms} if any(arms) else {},
        spans=_spans(steps, events),
        ranks=_ranks(steps, facts),
        events=tuple(event for event in events if event.message),
    )


def as_table(story: Story) -> dict[str, Any]:
    """The story as plain values for JSON; numbers that aren't finite are strings, as in the records."""
    table = spell_floats(dataclasses.asdict(story))
    if not isinstance(table, dict):  # asdict of a dataclass always is one; said for the type checker
        raise TypeError(type(table))
    return table


def _losses(steps: Sequence[StepRecord]) -> Losses | None:
    if not steps:
        return None
    numbers = [step for step in steps if step.loss == step.loss] or [steps[-1]]
    best = min(numbers, key=lambda step: step.loss)
    return Losses(first=steps[0].loss, last=steps[-1].loss, best=best.loss, best_step=best.step)


def _spans(steps: Sequence[StepRecord], events: Sequence[Event]) -> tuple[SharesSpan, ...]:
    decisions = [event for event in events if event.message and isinstance(event.fields.get("shares"), list)]
    whole: dict[str, int] = {}
    for step in steps:
        whole[step.arm] = max(whole.get(step.arm, 0), step.num_samples)
    spans: list[SharesSpan] = []
    for step in steps:
        if step.num_samples < whole[step.arm]:
            continue
        last = spans[-1] if spans else None
        if last and (last.arm, last.shares, last.num_micro) == (step.arm, step.shares, step.num_micro):
            spans[-1] = dataclasses.replace(last, last_step=step.step)
            continue
        reason = _reason(step, decisions)
        spans.append(SharesSpan(step.step, step.step, step.arm, step.num_samples, step.shares, step.num_micro, reason))
    return tuple(spans)


def _reason(step: StepRecord, decisions: Sequence[Event]) -> str:
    """The newest decision for these shares that was made before the step was committed."""
    for event in reversed(decisions):
        if event.time <= step.time and tuple(event.fields["shares"]) == step.shares:
            return event.message
    return ""


def _ranks(steps: Sequence[StepRecord], facts: Facts) -> tuple[RankStory, ...]:
    stories = []
    for rank in range(max((len(step.ranks) for step in steps), default=0)):
        times = [step.ranks[rank] for step in steps if rank < len(step.ranks)]
        seconds = {name.removesuffix("_s"): sum(getattr(time, name) for time in times) for name in SEGMENTS}
        total_s = sum(seconds.values())
        fractions = {name: part_s / total_s if total_s > 0 else 0.0 for name, part_s in seconds.items()}
        device = facts.devices[rank] if rank < len(facts.devices) else ""
        stories.append(RankStory(device, len(times), fractions, max(time.memory_bytes for time in times)))
    return tuple(stories)
