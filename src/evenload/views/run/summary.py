"""Summary of a run from its records: shares and their reasons, time by segment, throughput, balance, losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.records.checkpoints import CheckpointInfo, list_checkpoints
from evenload.records.console import RunInfo
from evenload.records.folder_lock import holder_is_gone
from evenload.records.lines import spell_floats
from evenload.records.reader import read_events, read_steps
from evenload.records.summary import WindowSummary, summarize_steps
from evenload.records.values import SEGMENTS, RunEvent, StepRecord
from evenload.stored_names import RUN_SUMMARY_JSON
from evenload.training.launch.run_control import members_of

GONE_S = 10.0
"""Time without a record in which a launcher may start the processes again."""


@dataclass(frozen=True)
class SharesSpan:
    """Consecutive steps with the same split; the smaller last batch of an epoch is ignored."""

    first_step: int
    last_step: int
    arm: str
    num_samples: int
    shares: tuple[int, ...]
    num_micro: int
    reason: str
    """The message of the event that decided it; empty if there is none."""


@dataclass(frozen=True)
class RankBreakdown:
    device: str
    num_steps: int
    """Steps in which this rank took part, of those whose records have the times of each rank."""
    fractions: dict[str, float]
    """By segment (``data``, ``compute``, ...); they sum to 1."""
    memory_bytes: int


@dataclass(frozen=True)
class Losses:
    first: float
    last: float
    best: float
    best_step: int


@dataclass(frozen=True)
class RunSummary:
    """Content of `evenload show`. ``whole``, ``early`` and ``late`` are None without a committed step."""

    folder: str
    num_steps: int
    num_samples: int
    num_sessions: int
    first_epoch: int
    last_epoch: int
    seconds: float
    solo_per_s: tuple[float, ...]
    whole: WindowSummary | None
    early: WindowSummary | None
    """The first tenth of the steps."""
    late: WindowSummary | None
    """The last tenth of the steps."""
    losses: Losses | None
    metrics: dict[str, float]
    """The newest value of each metric."""
    by_arm: dict[str, WindowSummary]
    spans: tuple[SharesSpan, ...]
    ranks: tuple[RankBreakdown, ...]
    events: tuple[RunEvent, ...]
    """Those with a message."""
    checkpoints: tuple[CheckpointInfo, ...]
    """Oldest first."""


def summarize_run(folder: Path, is_wanted: Callable[[float], bool] | None = None) -> RunSummary:
    """Read a run folder and summarize it; of its records only those that `is_wanted` by their time, if given.

    Raises:
        ConfigError: another version of Evenload wrote it.
    """
    steps = read_steps(folder, is_wanted)
    events = [event for event in read_events(folder) if is_wanted is None or is_wanted(event.time)]
    info = RunInfo()
    for event in events:
        info.add(event)
    solo = info.solo_per_s
    tenth = max(1, len(steps) // 10)
    arms = dict.fromkeys(step.arm for step in steps)
    return RunSummary(
        folder=str(folder),
        num_steps=len(steps),
        num_samples=sum(step.num_samples for step in steps),
        num_sessions=max(1, sum(event.kind == "open" for event in events)),
        first_epoch=min((step.epoch for step in steps), default=0),
        last_epoch=max((step.epoch for step in steps), default=0),
        seconds=sum(step.seconds for step in steps),
        solo_per_s=solo,
        whole=summarize_steps(steps, solo) if steps else None,
        early=summarize_steps(steps[:tenth], solo) if steps else None,
        late=summarize_steps(steps[-tenth:], solo) if steps else None,
        losses=_losses(steps),
        metrics={name: value for step in steps for name, value in step.metrics.items()},
        by_arm={arm: summarize_steps([step for step in steps if step.arm == arm], solo) for arm in arms}
        if any(arms)
        else {},
        spans=_spans(steps, events),
        ranks=_ranks(steps, info),
        events=tuple(event for event in events if event.message),
        checkpoints=list_checkpoints(folder),
    )


def is_open(events: Sequence[RunEvent]) -> bool:
    """Return whether the newest session has no end in the records."""
    return next((event.kind == "open" for event in reversed(events) if event.kind in ("open", "close")), False)


def describe_lost_end(folder: Path) -> str:
    """Return how to go on with an open run whose processes are gone; empty if they aren't, or that is unknown."""
    if members_of(folder) or not holder_is_gone(folder):  # a launcher may start the processes again
        return ""
    found = list_checkpoints(folder)
    where = (
        "all its checkpoints are damaged, so only --fresh begins anew"
        if found
        else "it has no checkpoint, and begins anew"
    )
    where = next((f"it resumes at step {info.step}" for info in found if info.is_last), where)
    return f"its processes are gone (killed, or their machine went down): start the same command again; {where}"


def summary_to_json(summary: RunSummary) -> dict[str, Any]:
    """Convert a summary to plain values for JSON; non-finite numbers are strings, as in the records."""

    def to_json(fields: list[tuple[str, Any]]) -> dict[str, Any]:
        return {RUN_SUMMARY_JSON.get(name, name): spell_floats(value) for name, value in fields}

    return dataclasses.asdict(summary, dict_factory=to_json)


def _losses(steps: Sequence[StepRecord]) -> Losses | None:
    if not steps:
        return None
    numbers = [step for step in steps if step.loss == step.loss] or [steps[-1]]
    best = min(numbers, key=lambda step: step.loss)
    return Losses(first=steps[0].loss, last=steps[-1].loss, best=best.loss, best_step=best.step)


def _spans(steps: Sequence[StepRecord], events: Sequence[RunEvent]) -> tuple[SharesSpan, ...]:
    decisions = [event for event in events if event.message and isinstance(event.fields.get("shares"), list)]
    whole: dict[str, int] = {}
    for step in steps:
        whole[step.arm] = max(whole.get(step.arm, 0), step.num_samples)
    spans: list[SharesSpan] = []
    for step in steps:
        if step.num_samples < whole[step.arm]:
            continue
        last = spans[-1] if spans else None
        if last and not step.shares:  # of many ranks: records name the shares where they change
            spans[-1] = dataclasses.replace(last, last_step=step.step)
            continue
        if last and (last.arm, last.shares, last.num_micro) == (step.arm, step.shares, step.num_micro):
            spans[-1] = dataclasses.replace(last, last_step=step.step)
            continue
        reason = _reason(step, decisions)
        spans.append(SharesSpan(step.step, step.step, step.arm, step.num_samples, step.shares, step.num_micro, reason))
    return tuple(spans)


def _reason(step: StepRecord, decisions: Sequence[RunEvent]) -> str:
    """Return the message of the newest decision for these shares before the commit of the step."""
    for event in reversed(decisions):
        if event.time <= step.time and tuple(event.fields["shares"]) == step.shares:
            return event.message
    return ""


def _ranks(steps: Sequence[StepRecord], info: RunInfo) -> tuple[RankBreakdown, ...]:
    found = []
    for rank in range(max((len(step.ranks) for step in steps), default=0)):
        times = [step.ranks[rank] for step in steps if rank < len(step.ranks)]
        seconds = {name.removesuffix("_s"): sum(getattr(time, name) for time in times) for name in SEGMENTS}
        total_s = sum(seconds.values())
        fractions = {name: part_s / total_s if total_s > 0 else 0.0 for name, part_s in seconds.items()}
        device = info.devices[rank] if rank < len(info.devices) else ""
        found.append(RankBreakdown(device, len(times), fractions, max(time.memory_bytes for time in times)))
    return tuple(found)
