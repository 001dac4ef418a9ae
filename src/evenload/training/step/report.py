"""What each rank tells the others once per `backward`: one row of numbers in the one exchange of a step."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenload.errors import StepError
from evenload.training.comm.clock import SEGMENTS, Segment
from evenload.training.comm.control import CAPACITY

OK, OUT_OF_MEMORY, LATE_GRADIENT, UNWANTED = 0, 1, 2, 3
"""What came of an attempt on one rank; `UNWANTED`: it was broken off, or used randomness it shared, for another's sake."""
_FIXED = 12
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
    """Rank 0 has a decision to tell."""
    elapsed_s: float
    """Since the start of the run; rank 0's counts."""
    memory_bytes: float
    state_key: float
    """Checksum of the parameters and buffers (consistency.py); 0 in a step that compares none."""
    reading: float
    """How this rank reads its samples, as one number (data/tuning.py)."""
    stop_requested: bool
    """Whether this rank received a request to stop (stop.py)."""
    seconds: Mapping[Segment, float]
    """Of each segment since the last report."""
    metrics: Mapping[str, float]
    """Name -> sum of weight x value; nothing in an attempt that failed here."""
    squared_norm: float | None = None
    """The squared norm of this rank's own gradient, in the units of its backwards; None in a step that measures none."""

    def row(self) -> list[float]:
        """As numbers; always the same length, since a rank that failed early does not know the metrics.

        Raises:
            StepError: more metrics than a row holds.
        """
        names = sorted(self.metrics)
        room = MAX_METRICS - (self.squared_norm is not None)
        if len(names) > room:
            raise StepError(f"loss_fn returned {len(names)} metrics beside the loss; at most {room} are averaged")
        values = [
            float(self.status),
            float(self.weighted),
            self.units,
            self.loss_sum,
            self.touched_key,
            float(self.has_decision),
            self.elapsed_s,
            self.memory_bytes,
            float(zlib.crc32("\0".join(names).encode())),
            self.state_key,
            self.reading,
            float(self.stop_requested),
            *(self.seconds[name] for name in SEGMENTS),
            *(self.metrics[name] for name in names),
        ]
        values += [0.0] * (CAPACITY - len(values))
        if self.squared_norm is not None:
            values[-1] = self.squared_norm
        return values


def read_rows(rows: Sequence[Sequence[float]], names: Sequence[str], *, measured: bool = False) -> list[RankReport]:
    """All ranks' rows as reports; `names` are this rank's own metrics, sorted; `measured`: with norms.

    Raises:
        StepError: ranks that succeeded returned other metrics than this one.
    """
    good = [row for row in rows if row[0] == OK]
    if len(good) == len(rows) and len({row[8] for row in good}) > 1:
        raise StepError(f"loss_fn returned other metrics on other ranks (here: {', '.join(names) or 'none'})")
    return [
        RankReport(
            status=int(row[0]),
            weighted=bool(row[1]),
            units=row[2],
            loss_sum=row[3],
            touched_key=row[4],
            has_decision=bool(row[5]),
            elapsed_s=row[6],
            memory_bytes=row[7],
            state_key=row[9],
            reading=row[10],
            stop_requested=bool(row[11]),
            seconds=dict(zip(SEGMENTS, row[_FIXED:_TIMES_END], strict=True)),
            metrics=dict(zip(names, row[_TIMES_END : _TIMES_END + len(names)], strict=True)),
            squared_norm=row[CAPACITY - 1] if measured else None,
        )
        for row in rows
    ]
