"""Conversion between records and lines of JSON.

The seconds of the ranks are columns: ``"ranks": {"wait_s": [0.1, 0.2], ...}``. Lines of more than 128 ranks have a ``spread``
besides; most of them have no columns then, ``"ranks": {}``, and no shares.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from evenload.errors import ConfigError
from evenload.records.values import (
    SEGMENTS,
    LateMetrics,
    OwnStep,
    RankColumns,
    RankSpread,
    RankTimes,
    Record,
    RunEvent,
    StepRecord,
)

SCHEMA = 1
"""Increased when an older reader would misread a line; a new key does not require it."""

EVENTS_FILE = "events.jsonl"
STEPS_FILE = "steps.jsonl"
_SECONDS_OF = attrgetter(*SEGMENTS)
_STEP = (
    '{"step":%d,"epoch":%d,"epoch_step":%d,"num_samples":%d,"loss":%s,"shares":[%s],"num_micro":%d,"seconds":%s,'
    '"ranks":{%s},"time":%.6f'
)
_OWN_TIMES = ",".join([f'"{name}":[%.6f]' for name in SEGMENTS]) + ',"memory_bytes":[%d]'


def header_line(time: float) -> bytes:
    return _encode({"schema": SCHEMA, "time": time})


def step_line(record: StepRecord, metrics: Mapping[str, float]) -> bytes:
    """Encode a step, newline included; ``metrics`` replaces the metrics of the record.

    Each step writes one, so the line is formatted here: the general encoder takes three times as long.
    """
    ranks = memory = ""
    if isinstance(record.ranks, RankColumns):
        named_us = zip(SEGMENTS, record.ranks.columns_us, strict=True)
        # As numbers like 12345e-6, which takes a fifth of the time of their digits.
        ranks = "".join([f'"{name}":[{_column(column, "%de-6")}],' for name, column in named_us])
        memory = _column(record.ranks.memory_bytes, "%d")
    elif record.ranks:
        texts = [f"{value:.6f}" if value else "0" for times in record.ranks for value in _SECONDS_OF(times)]
        step = len(SEGMENTS)
        ranks = "".join([f'"{name}":[{",".join(texts[index::step])}],' for index, name in enumerate(SEGMENTS)])
        memory = ",".join([str(rank.memory_bytes) for rank in record.ranks])
    times = f'{ranks}"memory_bytes":[{memory}]' if record.ranks else ""
    line = _STEP % (
        *(record.step, record.epoch, record.epoch_step, record.num_samples),
        *(_loss(record.loss), _column(record.shares, "%d"), record.num_micro, _seconds(record.seconds), times),
        record.time,
    )
    if record.spread is not None:
        line += f',"spread":{_spread(record.spread)}'
    if metrics:
        line += f',"metrics":{_dump(metrics)}'
    if record.arm:
        line += f',"arm":{_dump(record.arm)}'
    return line.encode() + b"}\n"


def own_step_line(step: OwnStep, metrics: Mapping[str, float]) -> bytes:
    """Encode a step of a rank alone as `step_line` does its record."""
    times = _OWN_TIMES % (*step.times, step.memory_bytes)
    line = _STEP % (*step[:4], _loss(step.loss), step.num_samples, 1, _seconds(step.seconds), times, step.time)
    if metrics:
        line += f',"metrics":{_dump(metrics)}'
    return line.encode() + b"}\n"


def event_line(event: RunEvent) -> bytes:
    """Encode an event, newline included; fields of types unknown to JSON are written as text."""
    row: dict[str, Any] = {
        "kind": event.kind,
        "message": event.message,
        "time": round(event.time, 6),
        "step": event.step,
    }
    if event.fields:
        row["fields"] = event.fields
    return _encode(row)


def late_metrics_line(late: LateMetrics) -> bytes:
    """Encode late metrics, newline included."""
    media = {"media": late.media} if late.media else {}
    return _encode({"step": late.step, "log": late.metrics, "time": round(late.time, 6), **media})


def parse_line(line: bytes) -> Record | None:
    """Return None for the header and for a line cut short by a crash.

    Raises `ConfigError` if another version of Evenload wrote the file, with another schema.
    """
    try:
        row = json.loads(line)
        if "schema" in row:
            _check_schema(row["schema"])
            return None
        if "kind" in row:
            return RunEvent(row["kind"], row["message"], float(row["time"]), row["step"], row.get("fields", {}))
        if "log" in row:
            return LateMetrics(row["step"], _floats(row["log"]), float(row["time"]), row.get("media", {}))
        return _parse_step(row)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        return None


def _parse_step(row: dict[str, Any]) -> StepRecord:
    columns, spread = row["ranks"], row.get("spread")
    ranks: tuple[RankTimes, ...] = ()
    if columns:
        seconds = zip(*(columns[name] for name in SEGMENTS), strict=True)
        memory = columns["memory_bytes"]
        rows: list[list[Any]] = [[*map(float, times), held] for times, held in zip(seconds, memory, strict=True)]
        ranks = tuple([RankTimes(*row) for row in rows])
    return StepRecord(
        step=row["step"],
        epoch=row["epoch"],
        epoch_step=row["epoch_step"],
        num_samples=row["num_samples"],
        loss=float(row["loss"]),
        shares=tuple(row["shares"]),
        num_micro=row["num_micro"],
        seconds=float(row["seconds"]),
        ranks=ranks,
        metrics=_floats(row.get("metrics", {})),
        arm=row.get("arm", ""),
        time=float(row["time"]),
        spread=None if spread is None else _parse_spread(spread),
    )


def _parse_spread(row: dict[str, Any]) -> RankSpread:
    def of_rank(values: list[Any]) -> tuple[int, RankTimes]:
        return values[0], _times(values[1:])

    least, most = row["shares"]
    return RankSpread(
        num_ranks=row["num_ranks"],
        shares=(least, most),
        least_busy_s=float(row["least_busy_s"]),
        mean=_times(row["mean"]),
        most=_times(row["most"]),
        busiest=of_rank(row["busiest"]),
        waits_least=of_rank(row["waits_least"]),
        first=_times(row["first"]),
    )


def _times(row: list[Any]) -> RankTimes:
    values: list[Any] = [*map(float, row[:-1]), row[-1]]
    return RankTimes(*values)


def _check_schema(schema: Any) -> None:
    if schema != SCHEMA:
        raise ConfigError(
            f"the records of this run have schema {schema!r}, this Evenload reads schema {SCHEMA}; use the version of "
            f"Evenload that wrote them, or another run folder"
        )


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _column(values: Sequence[int], pattern: str) -> str:
    if not any(values):
        return _repeated("0", len(values))
    return _repeated(pattern, len(values)) % tuple(values)


@functools.lru_cache(maxsize=64)
def _repeated(text: str, count: int) -> str:
    return ",".join([text] * count)


def _spread(spread: RankSpread) -> str:
    def times(rank: RankTimes) -> str:
        texts = [f"{value:.6f}" if value else "0" for value in _SECONDS_OF(rank)]
        return f"{','.join(texts)},{rank.memory_bytes}"

    least, most = spread.shares
    return (
        f'{{"num_ranks":{spread.num_ranks},"shares":[{least},{most}],"least_busy_s":{_seconds(spread.least_busy_s)},'
        f'"mean":[{times(spread.mean)}],"most":[{times(spread.most)}],'
        f'"busiest":[{spread.busiest[0]},{times(spread.busiest[1])}],'
        f'"waits_least":[{spread.waits_least[0]},{times(spread.waits_least[1])}],"first":[{times(spread.first)}]}}'
    )


def _encode(row: dict[str, Any]) -> bytes:
    return _dump(row).encode() + b"\n"


def _loss(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else _dump(value)


def _seconds(value: float) -> str:
    return f"{value:.6f}" if value else "0"


def _dump(value: Any) -> str:
    try:
        return _ENCODER.encode(value)
    except ValueError:  # a non-finite number: rare, so the search for it happens only here
        return _ENCODER.encode(spell_floats(value))


def spell_floats(value: Any) -> Any:
    """Replace NaN and infinities, at any depth, with strings that `float` reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): spell_floats(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [spell_floats(part) for part in value]
    return value


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return spell_floats(item())
    return str(value)


_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_to_json_value)
