"""What the steps of a run look like to a logger: records in, points out, each step once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evenload.records.lines import parse_line
from evenload.records.loggers.logger import Point
from evenload.records.summary import summarise
from evenload.records.values import SEGMENTS, Logged, Record, StepRecord

STEP = "evenload/step"
"""The step's own index as a scalar: a place that is asked for its newest values tells by it how far it got."""
BLOCK_BYTES = 1 << 18


@dataclass(frozen=True)
class Mark:
    """How far a logger has got in the records of a run."""

    run_id: str = ""
    """What the place calls the run."""
    start: int = 0
    """Where in `steps.jsonl` the records of that run begin, in bytes."""
    offset: int = 0
    """Bytes of `steps.jsonl` that it has."""
    newest: int = -1
    """The newest step it was given."""
    own_loss: bool = False
    """Whether the user has logged a ``loss`` of their own."""
    passing: bool = False
    """Whether the last step was left out, because the place had it already; late metrics of it are, too."""


def read_records(path: Path, offset: int) -> tuple[list[Record], int]:
    """The records from an offset on, about a block of them, and the offset behind them; a line still being written waits.

    A step 0 is always the first record of what is returned.

    Raises:
        OSError: the file can't be read.
    """
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


def begins_anew(records: Sequence[Record], mark: Mark) -> bool:
    """Whether training has begun again at step 0, with nothing resumed: for most places that is another run."""
    return mark.newest >= 0 and bool(records) and _is_first_step(records[0])


def to_points(records: Iterable[Record], mark: Mark, takes_again: bool) -> tuple[list[Point], Mark]:
    """The points that a logger lacks, and its mark behind them (its offset is the caller's).

    Steps of alternating arms are no training and left out. After a resume from an older checkpoint steps are done again.
    Those of them that are both in ``records`` count as last done; those that the logger was given earlier are given
    ``again``, or left out where it doesn't take that. Metrics of a step that was never committed are left out: the step
    will be done by the next sitting.
    """
    points: list[Point] = []
    uncommitted: list[Point] = []
    given, newest = mark.newest, mark.newest
    own_loss, passing = mark.own_loss, mark.passing
    for record in records:
        if isinstance(record, StepRecord) and not record.arm:
            points = [point for point in points if point.step < record.step]
            points += [point for point in uncommitted if point.step < record.step]
            uncommitted = []
            own_loss = own_loss or "loss" in record.metrics
            newest = max(given, min(newest, record.step - 1))  # what was dropped just now was never given
            again = record.step <= given
            passing = again and not takes_again
            if not passing:
                points.append(Point(record.step, record.time, scalars_of(record, own_loss), again))
                newest = record.step
                given = newest if again else given  # what follows is no longer told as done again
        elif isinstance(record, Logged) and not passing:
            target = points if record.step <= newest else uncommitted
            target.append(Point(record.step, record.time, record.metrics))
    return points, replace(mark, newest=newest, own_loss=own_loss, passing=passing)


def scalars_of(record: StepRecord, own_loss: bool) -> dict[str, float]:
    """The user's metrics under their own names; loss, throughput, and for each rank share, seconds and memory.

    Args:
        record: the step.
        own_loss: the user logs a ``loss``, here or in other steps; Evenload's is left out.
    """
    summary = summarise([record])
    scalars = dict(record.metrics)
    if not own_loss:
        scalars["loss"] = record.loss
    scalars[STEP] = record.step
    scalars["evenload/samples_per_s"] = summary.samples_per_s
    scalars["evenload/step_s"] = record.seconds
    scalars["evenload/busy"] = summary.busy
    for index, rank in enumerate(record.ranks):
        scalars[f"share/rank{index}"] = record.shares[index]
        scalars[f"memory_bytes/rank{index}"] = rank.memory_bytes
        for name in SEGMENTS:
            scalars[f"{name}/rank{index}"] = getattr(rank, name)
    return scalars


def _is_first_step(record: Record | None) -> bool:
    return isinstance(record, StepRecord) and not record.arm and record.step == 0
