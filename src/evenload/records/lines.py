"""Conversion between records and lines of JSON.

The seconds of the ranks are columns: ``"ranks": {"wait_s": [0.1, 0.2], ...}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from evenload.errors import ConfigError
from evenload.records.values import SEGMENTS, LateMetrics, RankTimes, Record, RunEvent, StepRecord

SCHEMA = 1
"""Increased when an older reader would misread a line; a new key does not require it."""

EVENTS_FILE = "events.jsonl"
STEPS_FILE = "steps.jsonl"
_SECONDS_OF = attrgetter(*SEGMENTS)


def header_line(time: float) -> bytes:
    return _encode({"schema": SCHEMA, "time": time})


def step_line(record: StepRecord, metrics: Mapping[str, float]) -> bytes:
    """Encode a step, newline included; ``metrics`` replaces the metrics of the record.

    Each step writes one, so the line is formatted here: the general encoder takes three times as long.
    """
    columns = zip(SEGMENTS, zip(*map(_SECONDS_OF, record.ranks), strict=True), strict=True)
    ranks = "".join([f'"{name}":[{",".join(map(_seconds, column))}],' for name, column in columns])
    memory = _integers(rank.memory_bytes for rank in record.ranks)
    loss = repr(float(record.loss)) if math.isfinite(record.loss) else _dump(record.loss)
    line = (
        f'{{"step":{record.step},"epoch":{record.epoch},"epoch_step":{record.epoch_step},'
        f'"num_samples":{record.num_samples},"loss":{loss},"shares":[{_integers(record.shares)}],'
        f'"num_micro":{record.num_micro},"seconds":{_seconds(record.seconds)},'
        f'"ranks":{{{ranks}"memory_bytes":[{memory}]}},"time":{record.time:.6f}'
    )
    if metrics:
        line += f',"metrics":{_dump(metrics)}'
    if record.arm:
        line += f',"arm":{_dump(record.arm)}'
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
    columns = row["ranks"]
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
    )


def _check_schema(schema: Any) -> None:
    if schema != SCHEMA:
        raise ConfigError(
            f"the records of this run have schema {schema!r}, this Evenload reads schema {SCHEMA}; use the version of "
            f"Evenload that wrote them, or another run folder"
        )


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _encode(row: dict[str, Any]) -> bytes:
    return _dump(row).encode() + b"\n"


def _seconds(value: float) -> str:
    return f"{value:.6f}" if value else "0"


def _integers(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


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
