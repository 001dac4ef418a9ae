"""Conversion of a run's records to scalars for a logger, each step once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evenload.records.lines import parse_line
from evenload.records.loggers.logger import StepScalars
from evenload.records.summary import summarize_steps
from evenload.records.values import SEGMENTS, LateMetrics, Record, StepRecord

STEP = "evenload/step"
"""The index of the step as a scalar; its newest value shows how far a destination got."""
BLOCK_BYTES = 1 << 18


@dataclass(frozen=True)
class LoggerPosition:
    """Position of a logger in the records of a run; stored as JSON with these names."""

    run_id: str = ""
    start: int = 0
    """Byte offset in `steps.jsonl` at which the records of that run begin."""
    offset: int = 0
    """Bytes of `steps.jsonl` that were sent."""
    newest: int = -1
    own_loss: bool = False
    passing: bool = False
    """The last step was left out because the destination has it already; so are its late metrics."""


def read_records(path: Path, offset: int) -> tuple[list[Record], int]:
    """Read about one block of whole lines; a step 0 is always the first record of a block."""
    size = BLOCK_BYTES
    with path.open("rb") as file:
        while True:
            file.seek(offset)
            block = file.read(size)
            end = block.rfind(b"\n") + 1
            if end or len(block) < size:
                break
            size *= 2  # one line is longer than a block
    records: list[Record] = []
    for line in block[:end].splitlines(keepends=True):
        record = parse_line(line)
        if _is_first_step(record) and records:
            break
        offset += len(line)
        if record is not None:
            records.append(record)
    return records, offset


def starts_over(records: Sequence[Record], position: LoggerPosition) -> bool:
    """Return whether training starts again at step 0 without a resume; most destinations then need a new run."""
    return position.newest >= 0 and bool(records) and _is_first_step(records[0])


def to_scalars(
    records: Iterable[Record], position: LoggerPosition, accepts_rewrites: bool
) -> tuple[list[StepScalars], LoggerPosition]:
    """Return the scalars that a logger lacks, and its position after them (with the offset unchanged).

    Steps of a measurement are left out. A resume from an older checkpoint repeats steps. Within ``records`` the last
    repetition counts. Repetitions of steps that were sent earlier are marked ``replaces``, or left out if the logger
    does not accept that. Metrics of a step that was never committed are left out: the next session repeats the step.
    """
    found: list[StepScalars] = []
    uncommitted: list[StepScalars] = []
    sent, newest = position.newest, position.newest
    own_loss, passing = position.own_loss, position.passing
    for record in records:
        if isinstance(record, StepRecord) and not record.arm:
            found = [row for row in (*found, *uncommitted) if row.step < record.step]
            uncommitted = []
            own_loss = own_loss or "loss" in record.metrics
            newest = max(sent, min(newest, record.step - 1))  # the rows removed above were never sent
            replaces = record.step <= sent
            passing = replaces and not accepts_rewrites
            if not passing:
                found.append(StepScalars(record.step, record.time, scalars_of(record, own_loss), replaces))
                newest = record.step
                sent = newest if replaces else sent  # only the first repeated step is marked
        elif isinstance(record, LateMetrics) and not passing:
            target = found if record.step <= newest else uncommitted
            target.append(StepScalars(record.step, record.time, record.metrics, media=record.media))
    return found, replace(position, newest=newest, own_loss=own_loss, passing=passing)


def scalars_of(record: StepRecord, own_loss: bool) -> dict[str, float]:
    """Return all scalars of a step, those of more than 128 ranks summed up.

    With ``own_loss`` the user logs a ``loss``, here or in other steps, and ours is left out.
    """
    summary = summarize_steps([record])
    scalars = dict(record.metrics)
    if not own_loss:
        scalars["loss"] = record.loss
    scalars[STEP] = record.step
    scalars["evenload/samples_per_s"] = summary.samples_per_s
    scalars["evenload/step_s"] = record.seconds
    scalars["evenload/busy"] = summary.busy
    if (spread := record.spread) is not None:
        scalars["share/least"], scalars["share/most"] = spread.shares
        scalars["memory_bytes/most"] = spread.most.memory_bytes
        for name in SEGMENTS:
            scalars[f"{name}/mean"], scalars[f"{name}/most"] = getattr(spread.mean, name), getattr(spread.most, name)
        return scalars
    for index, rank in enumerate(record.ranks):
        scalars[f"share/rank{index}"] = record.shares[index]
        scalars[f"memory_bytes/rank{index}"] = rank.memory_bytes
        for name in SEGMENTS:
            scalars[f"{name}/rank{index}"] = getattr(rank, name)
    return scalars


def _is_first_step(record: Record | None) -> bool:
    return isinstance(record, StepRecord) and not record.arm and record.step == 0
