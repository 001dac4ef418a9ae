"""One rank's report on a `backward`: a row of numbers in the step's only exchange."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from evenload.errors import StepError
from evenload.training.comm.clock import SEGMENTS, Segment
from evenload.training.comm.control import CAPACITY
from evenload.training.parallel.strategy import AWAY, OK

_SCALARS: dict[str, Callable[[float], float]] = {
    "status": int,
    "weighted": bool,
    "units": float,
    "loss_sum": float,
    "touched_key": float,
    "has_decision": bool,
    "elapsed_s": float,
    "memory_bytes": float,
    "state_key": float,
    "reading": float,
    "stop_requested": bool,
    "may_leave": bool,
}
"""Fields of a row and their types; a checksum of the names of the metrics follows."""
_FIXED = len(_SCALARS) + 1
_TIMES_END = _FIXED + len(SEGMENTS)
MAX_METRICS = CAPACITY - _TIMES_END


@dataclass(frozen=True)
class RankReport:
    """One rank's row."""

    status: int
    weighted: bool
    units: float
    """Sum of this rank's weights."""
    loss_sum: float
    """Sum of weight x mean loss over this rank's micro-batches."""
    touched_key: float
    has_decision: bool
    elapsed_s: float
    """Since the start of the run; rank 0's is used."""
    memory_bytes: float
    state_key: float
    """Checksum of the parameters and buffers (consistency.py); 0 in a step without one."""
    reading: float
    """Code of how this rank reads its samples (data/tuning.py)."""
    stop_requested: bool
    may_leave: bool
    """The rank could compute nothing for a while, and return (elastic/)."""
    seconds: Mapping[Segment, float]
    """Of each segment since the last report."""
    metrics: Mapping[str, float]
    """Name -> sum of weight x value; nothing in an attempt that failed here."""
    squared_norm: float | None = None
    """The squared norm of this rank's own gradient, in the units of its backwards; None in a step that measures none."""

    def row(self) -> list[float]:
        """Return the report as numbers, always equally many: a rank that failed early does not know the metrics."""
        names = sorted(self.metrics)
        limit = MAX_METRICS - (self.squared_norm is not None)
        if len(names) > limit:
            raise StepError(f"loss_fn returned {len(names)} metrics beside the loss; at most {limit} are averaged")
        checksum = _checksum(names)
        values = [*(float(getattr(self, name)) for name in _SCALARS), checksum]
        values += [*(self.seconds[name] for name in SEGMENTS), *(self.metrics[name] for name in names)]
        values += [0.0] * (CAPACITY - len(values))
        if self.squared_norm is not None:
            values[-1] = self.squared_norm
        return values


def read_rows(rows: Sequence[Sequence[float]], names: Sequence[str], *, measured: bool = False) -> list[RankReport]:
    """Read all ranks' rows; `names` are this rank's own metrics, sorted; `measured` rows hold norms."""
    present = [row for row in rows if row[0] != AWAY]
    checksums = {row[_FIXED - 1] for row in present}
    if all(row[0] == OK for row in present) and len(checksums) > 1:
        raise StepError(f"loss_fn returned different metrics on different ranks (here: {', '.join(names) or 'none'})")
    if len(present) < len(rows) and _checksum(names) not in checksums:
        names = ()  # this rank is away, and has never seen these metrics
    return [
        RankReport(
            **{name: kind(value) for (name, kind), value in zip(_SCALARS.items(), row, strict=False)},  # type: ignore[arg-type]
            seconds=dict(zip(SEGMENTS, row[_FIXED:_TIMES_END], strict=True)),
            metrics=dict(zip(names, row[_TIMES_END : _TIMES_END + len(names)], strict=True)),
            squared_norm=row[CAPACITY - 1] if measured else None,
        )
        for row in rows
    ]


def _checksum(names: Sequence[str]) -> float:
    return float(zlib.crc32("\0".join(names).encode()))
