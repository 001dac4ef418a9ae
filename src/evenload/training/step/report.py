"""`RankReport`, one rank's row of numbers in the only exchange of a `backward`, and `Reports`, the rows of all ranks."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

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
    "has_zero": bool,
    "membership": float,
    "times_of": float,
    "delay_s": float,
}
"""Fields of a row and their types; a checksum of the names of the metrics follows."""
_SCALARS_OF = attrgetter(*_SCALARS)
_SECONDS_OF = itemgetter(*SEGMENTS)
_FIXED = len(_SCALARS) + 1
_TIMES_END = _FIXED + len(SEGMENTS)
SECONDS = slice(_FIXED, _TIMES_END)
"""Columns of the seconds of each segment."""
WAIT = _FIXED + SEGMENTS.index("wait")
COLUMNS = {name: index for index, name in enumerate((*_SCALARS, "metrics_key"))} | {"squared_norm": CAPACITY - 1}
"""Name of a field -> its column."""
_VARIABLE = ("units", "loss_sum", "elapsed_s", "memory_bytes", "reading", "delay_s")
_CONCLUDED_OF = itemgetter(*(column for name, column in COLUMNS.items() if name not in (*_VARIABLE, "squared_norm")))
"""What decides on what ranks do."""
_FEW_RANKS = 8
"""So many rows Python compares faster than numpy."""
MAX_METRICS = CAPACITY - _TIMES_END
OWN_TIMES, NO_TIMES, TIMES_OF_FIRST = 0.0, 1.0, 2.0
"""Of `RankReport.times_of`: the seconds are those of this step; there are none; they are those of step 0."""


class RankReport(NamedTuple):
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
    has_zero: bool
    """A weight on the rank's device is 0, in a step that looks for it."""
    seconds: Mapping[Segment, float]
    """Of each segment since the last report, or of an earlier step (`times_of`)."""
    metrics: Mapping[str, float]
    """Name -> sum of weight x value; nothing in an attempt that failed here."""
    touched: tuple[float, ...] = ()
    """Bits of the parameters that received a gradient; left out of a row without room for them."""
    squared_norm: float | None = None
    """The squared norm of this rank's own gradient, in the units of its backwards; None in a step that measures none."""
    membership: float = 0.0
    """Number of the newest membership that the rank has received (elastic/)."""
    times_of: float = OWN_TIMES
    """The step whose times `seconds` are (late_times.py): `OWN_TIMES`, `NO_TIMES`, or `TIMES_OF_FIRST` and a global index."""
    delay_s: float = 0.0
    """Seconds in which the rank was ready to compute on a CPU that others had."""

    def row(self) -> list[float]:
        """Return the report as numbers, always equally many: a rank that failed early does not know the metrics."""
        names = self.metric_names() if self.metrics else []
        checksum = _checksum(tuple(names))
        values = [*map(float, _SCALARS_OF(self)), checksum]
        values += [*_SECONDS_OF(self.seconds), *map(self.metrics.__getitem__, names)]
        if len(values) + len(self.touched) < CAPACITY:
            values += self.touched
        values += [0.0] * (CAPACITY - len(values))
        if self.squared_norm is not None:
            values[-1] = self.squared_norm
        return values

    def metric_names(self) -> list[str]:
        """Return the names of the metrics, sorted; StepError if there are too many for a row."""
        names = sorted(self.metrics)
        limit = MAX_METRICS - (self.squared_norm is not None)
        if len(names) > limit:
            raise StepError(f"loss_fn returned {len(names)} metrics beside the loss; at most {limit} are averaged")
        return names


class Agreed(NamedTuple):
    """Conclusions from the reports of all ranks."""

    failed: bool
    """True if the attempt failed on some rank."""
    stop_requested: bool
    """True if some rank received a request to stop."""
    has_decision: bool
    """True if rank 0 has a decision to send."""
    elapsed_s: float
    """Rank 0's."""
    membership: int
    """The newest that all ranks have received."""
    has_times: bool
    """True if the seconds are those of this step, on all ranks."""


class ReportSums(NamedTuple):
    """Sums over ranks."""

    units: float
    loss_sum: float
    same_touched: bool
    has_zero: bool


class Reports(Sequence[RankReport]):
    """The rows of all ranks as one table, shape ``(num_ranks, CAPACITY)``: sums, maxima and equality go by column.

    An index makes the `RankReport` of one rank, which takes as long as a column of a thousand.
    """

    repeats = False
    """True if all conclusions are those of a step before; see `later`."""

    def __init__(self, table: NDArray[np.float64], names: Sequence[str] = (), *, measured: bool = False) -> None:
        """`names`: of the metrics, sorted. `measured`: the rows hold norms."""
        self.names = tuple(names)
        self.table = table
        """Shape ``(num_ranks, CAPACITY)``."""
        self._measured = measured

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> RankReport: ...
    @overload
    def __getitem__(self, index: slice) -> list[RankReport]: ...
    def __getitem__(self, index: int | slice) -> RankReport | list[RankReport]:
        if isinstance(index, slice):
            return [self[rank] for rank in range(len(self))[index]]
        row = self.table[index].tolist()
        return RankReport(
            **{name: kind(value) for (name, kind), value in zip(_SCALARS.items(), row, strict=False)},  # type: ignore[arg-type]
            seconds=dict(zip(SEGMENTS, row[_FIXED:_TIMES_END], strict=True)),
            metrics=dict(zip(self.names, row[_TIMES_END : _TIMES_END + len(self.names)], strict=True)),
            squared_norm=row[CAPACITY - 1] if self._measured else None,
        )

    def later(self, table: NDArray[np.float64], first: Sequence[float]) -> Reports | None:
        """Return the reports of a step in which the first row alone is new; None if other conclusions may follow from it."""
        if _CONCLUDED_OF(first) != _CONCLUDED_OF(self.table[0].tolist()):
            return None
        found = Reports(table, self.names, measured=self._measured)
        found.repeats, found.agreed = True, self.agreed._replace(elapsed_s=first[COLUMNS["elapsed_s"]])
        return found

    def of(self, ranks: Sequence[int]) -> Reports:
        """Return the reports of some ranks."""
        return Reports(self.table[list(ranks)], self.names, measured=self._measured)

    def column(self, name: str) -> list[float]:
        """Return a field of all ranks, flags as 0 or 1; `squared_norm` is 0 where none is measured."""
        if len(self.table) <= _FEW_RANKS and (index := COLUMNS[name]) < _FIXED:
            return list(map(itemgetter(index), self._rows))
        values: list[float] = self.values(name).tolist()
        return values

    def values(self, name: str) -> NDArray[np.float64]:
        """Return what `column` does, as an array."""
        index = COLUMNS[name]
        return self._columns[index] if index < _FIXED and len(self.table) > _FEW_RANKS else self.table[:, index]

    def metric(self, name: str) -> list[float]:
        values: list[float] = self.table[:, _TIMES_END + self.names.index(name)].tolist()
        return values

    def touched(self, num_words: int) -> tuple[list[int], list[int]] | None:
        """Return the bits that are set on any rank, and on all ranks; None if the rows have no room for them."""
        first = _TIMES_END + len(self.names)
        if not num_words or first + num_words >= CAPACITY:
            return None
        words = self.table[:, first : first + num_words].astype(np.int64)
        return np.bitwise_or.reduce(words).tolist(), np.bitwise_and.reduce(words).tolist()

    @property
    def seconds(self) -> NDArray[np.float64]:
        """The seconds of all ranks, shape ``(num_ranks, len(SEGMENTS))``."""
        return self.table[:, SECONDS] if len(self.table) <= _FEW_RANKS else self._columns[SECONDS].T

    def most(self, name: str) -> float:
        """Return the most of a field of all ranks, none of which is NaN."""
        return self._bounds[1][COLUMNS[name]]

    def flags(self, name: str) -> tuple[bool, ...]:
        """Return whether a field is set on each rank; the same object as long as it is the same on all."""
        (low, high), column = self._bounds, COLUMNS[name]
        if low[column] == high[column]:  # nearly always, and a list from a column of a thousand takes ten times as long
            return _repeated(low[column] != 0, len(self.table))
        return tuple((self.values(name) != 0).tolist())

    def first(self, name: str) -> float:
        """Return a field of the first rank."""
        return self.table.item(0, COLUMNS[name])

    def any(self, name: str) -> bool:
        """Return whether a field, none of which is negative, is above 0 on some rank."""
        return self._bounds[1][COLUMNS[name]] > 0

    def all(self, name: str) -> bool:
        """Return whether a field, none of which is negative, is above 0 on all ranks."""
        return self._bounds[0][COLUMNS[name]] > 0

    def is_same(self, name: str) -> bool:
        """Return whether a field, none of which is NaN, is the same on all ranks."""
        (low, high), column = self._bounds, COLUMNS[name]
        return low[column] == high[column]

    @functools.cached_property
    def agreed(self) -> Agreed:
        low, high = self._bounds
        return Agreed(
            failed=high[COLUMNS["status"]] > 0 and any(status not in (OK, AWAY) for status in self.column("status")),
            stop_requested=high[COLUMNS["stop_requested"]] > 0,
            has_decision=self.table.item(0, COLUMNS["has_decision"]) > 0,
            elapsed_s=self.table.item(0, COLUMNS["elapsed_s"]),
            membership=int(low[COLUMNS["membership"]]),
            has_times=high[COLUMNS["times_of"]] <= OWN_TIMES,
        )

    def sums(self) -> ReportSums:
        """Add up what the ranks computed; StepError if some weight their losses and others do not."""
        (low, high), weighted_at, touched_at = self._bounds, COLUMNS["weighted"], COLUMNS["touched_key"]
        if low[weighted_at] != high[weighted_at]:
            weighted = ", ".join(str(rank) for rank, flag in enumerate(self.flags("weighted")) if flag)
            raise StepError(f"loss_fn returned a weight on ranks {weighted} only; return one always or never")
        units, loss_sum = exact_sum(self.column("units")), exact_sum(self.column("loss_sum"))
        return ReportSums(units, loss_sum, low[touched_at] == high[touched_at], high[COLUMNS["has_zero"]] > 0)

    @property
    def delays_s(self) -> NDArray[np.float64] | None:
        """Seconds in which each rank waited for a CPU that others had; None of a rank that is alone."""
        return self.values("delay_s")

    @functools.cached_property
    def _bounds(self) -> tuple[list[float], list[float]]:
        """The least and the most of each field."""
        if len(self.table) > _FEW_RANKS:
            columns = self._columns[:_FIXED]
            with np.errstate(invalid="ignore"):  # a loss may be NaN
                return np.minimum.reduce(columns, axis=1).tolist(), np.maximum.reduce(columns, axis=1).tolist()
        rows = self._rows
        return (list(map(min, *rows)), list(map(max, *rows))) if len(rows) > 1 else (rows[0], rows[0])

    @functools.cached_property
    def _columns(self) -> NDArray[np.float64]:
        # A row for each field: of many ranks every pass over a column of the table takes as long as this copy.
        return np.ascontiguousarray(self.table[:, :_TIMES_END].T)

    @functools.cached_property
    def _rows(self) -> list[list[float]]:
        rows: list[list[float]] = self.table[:, :_TIMES_END].tolist()
        return rows


class OwnReport(Reports):
    """The report of a rank that is alone: it was never a row."""

    delays_s = None
    _changed: Mapping[str, Any] = {}

    def __init__(self, report: RankReport) -> None:
        self.names = tuple(report.metric_names()) if report.metrics else ()
        self._first = self._report = own = report
        self.own_seconds: tuple[float, ...] = _SECONDS_OF(report.seconds)
        """Of each segment."""
        failed, has_times = own.status not in (OK, AWAY), own.times_of == OWN_TIMES
        self.agreed = Agreed(
            failed, own.stop_requested, own.has_decision, own.elapsed_s, int(own.membership), has_times
        )

    def again(self, **changed: Any) -> OwnReport:
        """Return the report of a later step that ended well, and differs in these fields alone."""
        later = object.__new__(OwnReport)
        later._first, later._changed, stops = self._first, changed, changed["stop_requested"]
        later.own_seconds = _SECONDS_OF(changed["seconds"])
        later.names = tuple(later._report.metric_names()) if changed["metrics"] else ()
        is_same = stops == self.agreed.stop_requested
        later.agreed = self.agreed if is_same else self.agreed._replace(stop_requested=stops)
        return later

    @functools.cached_property
    def _report(self) -> RankReport:
        return self._first._replace(**self._changed)

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, index: int) -> RankReport: ...
    @overload
    def __getitem__(self, index: slice) -> list[RankReport]: ...
    def __getitem__(self, index: int | slice) -> RankReport | list[RankReport]:
        return [self._report][index]

    def of(self, ranks: Sequence[int]) -> Reports:
        return self

    def column(self, name: str) -> list[float]:
        # Not by `first`: these are calls of each step.
        return [getattr(self._report, name) or 0.0]

    def values(self, name: str) -> NDArray[np.float64]:
        return np.array(self.column(name))

    def metric(self, name: str) -> list[float]:
        return [self._report.metrics[name]]

    @property
    def seconds(self) -> NDArray[np.float64]:
        return np.array([self.own_seconds])

    def flags(self, name: str) -> tuple[bool, ...]:
        return (bool(self.first(name)),)

    def first(self, name: str) -> float:
        value: float = getattr(self._report, name) or 0.0
        return value

    def any(self, name: str) -> bool:
        return (getattr(self._report, name) or 0.0) > 0

    def all(self, name: str) -> bool:
        return (getattr(self._report, name) or 0.0) > 0

    def is_same(self, name: str) -> bool:
        return True

    def most(self, name: str) -> float:
        return getattr(self._report, name) or 0.0

    def sums(self) -> ReportSums:
        own = self._report
        return ReportSums(own.units, own.loss_sum, True, own.has_zero)


NO_REPORTS = Reports(np.empty((0, CAPACITY)))


def read_table(table: NDArray[np.float64], names: Sequence[str], *, measured: bool = False) -> Reports:
    """Return the reports in all ranks' rows; `names` are this rank's own metrics, sorted; `measured` rows hold norms."""
    reports = Reports(table, names, measured=measured)
    if reports.is_same("metrics_key") and not reports.any("status"):
        return reports
    statuses = reports.column("status")
    present = [status for status in statuses if status != AWAY]
    keys = {key for status, key in zip(statuses, reports.column("metrics_key"), strict=True) if status != AWAY}
    if all(status == OK for status in present) and len(keys) > 1:
        raise StepError(f"loss_fn returned different metrics on different ranks (here: {', '.join(names) or 'none'})")
    if len(present) < len(statuses) and _checksum(tuple(names)) not in keys:
        return Reports(table, (), measured=measured)  # this rank is away, and has never seen these metrics
    return reports


@functools.lru_cache(maxsize=64)
def _repeated(flag: bool, num_ranks: int) -> tuple[bool, ...]:
    return (flag,) * num_ranks


def exact_sum(terms: Sequence[float]) -> float:
    """Return the exact sum; where there is none (inf - inf, overflow), the sum of floats."""
    try:
        return math.fsum(terms)
    except (ValueError, OverflowError):
        return sum(terms)


@functools.lru_cache(maxsize=64)
def _checksum(names: tuple[str, ...]) -> float:
    return float(zlib.crc32("\0".join(names).encode()))
