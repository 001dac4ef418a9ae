"""Progress lines for output without a terminal, one line per interval.

``step 120/400 | loss 2.346 | 412 samples/s | busy 97 % | rank 0: share 171, busy 98 %, wait 1 % | ... | 3:12 left``
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from evenload.records.summary import RankRange, RankSummary, StepBottleneck, WindowSummary, summarize_steps
from evenload.records.values import LateMetrics, Record, RunEvent, StepRecord

MAX_RANKS_SHOWN = 8
"""With more ranks, a line shows their range and the rank that waits least (the slowest one)."""
ETA_STEPS = 100
"""Number of last steps whose mean time gives the time left."""


class RunInfo:
    """Device names, solo speeds, lengths and step times of a run, collected from its records."""

    def __init__(self) -> None:
        self.devices: tuple[str, ...] = ()
        self.solo_per_s: tuple[float, ...] = ()
        self.total_steps: int | None = None
        self.epoch_steps: int | None = None
        self._times: deque[tuple[int, float, float]] = deque(maxlen=ETA_STEPS)
        self._is_opening = False
        self._first: StepRecord | None = None
        """First step of this session: its seconds hold the start of the loader and of libraries."""
        self._usual: dict[str, StepRecord] = {}
        """By arm, the last step with a whole global batch."""

    def add(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._times.append((record.step, record.time, record.seconds))
            if self._is_opening:
                self._is_opening, self._first = False, record
            usual = self._usual.get(record.arm)
            if usual is None or record.num_samples >= usual.num_samples or len(record.shares) != len(usual.shares):
                self._usual[record.arm] = record
        elif isinstance(record, RunEvent):
            self._add_event(record)

    def _add_event(self, event: RunEvent) -> None:
        if event.kind == "open":
            self._times.clear()
            self._usual.clear()
            self._is_opening = True
        self.total_steps = _count(event.fields.get("total_steps")) or self.total_steps
        self.epoch_steps = _count(event.fields.get("epoch_steps")) or self.epoch_steps
        devices, speeds = event.fields.get("devices"), event.fields.get("speeds_per_s")
        if isinstance(devices, list | tuple):
            self.devices = tuple(str(name) for name in devices)
        if event.kind == "solo_speeds" and isinstance(speeds, list | tuple):
            self.solo_per_s = tuple(float(speed) for speed in speeds)

    def name(self, rank: int) -> str:
        return self.devices[rank] if rank < len(self.devices) else f"rank {rank}"

    def summarize(self, window: Sequence[StepRecord]) -> WindowSummary | None:
        """Summarize a window with the shares of a whole global batch; None for the first step, which has no rate yet."""
        timed = [step for step in window if step is not self._first]
        if not timed:
            return None
        summary = summarize_steps(timed, self.solo_per_s)
        if summary.many is not None:
            return summary
        shares = self.usual_shares(timed[-1])
        return replace(
            summary, ranks=tuple(replace(rank, share=share) for rank, share in zip(summary.ranks, shares, strict=True))
        )

    def usual_shares(self, last: StepRecord) -> tuple[int, ...]:
        """Return the shares of the last whole global batch; the last batch of an epoch may be smaller."""
        usual = self._usual.get(last.arm, last)
        return usual.shares if len(usual.shares) == len(last.shares) else last.shares

    def left_s(self, last: StepRecord) -> float | None:
        """Estimate the wall seconds left in the run, or in the epoch if the length of the run is unknown."""
        if self.total_steps is not None:
            num_left = self.total_steps - last.step - 1
        elif self.epoch_steps is not None:
            num_left = self.epoch_steps - last.epoch_step - 1
        else:
            return None
        if not self._times:
            return None
        (first_step, first_s, _), (last_step, last_s, seconds) = self._times[0], self._times[-1]
        if last_step > first_step and last_s > first_s:
            seconds = (last_s - first_s) / (last_step - first_step)
        return max(0, num_left) * seconds

    def position(self, last: StepRecord) -> str:
        """Format the step, counted from 1: ``step 12/400`` or ``step 52 (epoch 1: 12/40)``."""
        if self.total_steps is not None:
            return f"step {last.step + 1}/{self.total_steps}"
        if self.epoch_steps is not None:
            return f"step {last.step + 1} (epoch {last.epoch}: {last.epoch_step + 1}/{self.epoch_steps})"
        return f"step {last.step + 1}"

    def left(self, last: StepRecord) -> str:
        """Format the time left: ``3:12 left``, ``0:40 left in the epoch``, or an empty string if it is unknown."""
        left_s = self.left_s(last)
        if left_s is None:
            return ""
        return f"{format_seconds(left_s)} left" + ("" if self.total_steps is not None else " in the epoch")


class ProgressLines:
    """Convert records to the lines to print: the first step, then one line per interval, and the events.

    Intervals are measured by the times of the records, not by a clock.
    """

    def __init__(self, log_every_s: float) -> None:
        self.info = RunInfo()
        self._log_every_s = log_every_s
        self._window: list[StepRecord] = []
        self._shown_s = -math.inf

    def add(self, record: Record) -> list[str]:
        """Return the lines to print after this record; usually none."""
        self.info.add(record)
        if isinstance(record, LateMetrics):
            return []
        if isinstance(record, RunEvent):
            # What to do after a stop comes last, below the progress.
            last = self.finish() if record.kind == "stopped" else []
            return [*last, f"evenload: {record.message}"] if record.message else last
        if self._window and self._window[-1].arm != record.arm:
            self._window.clear()  # a line covers steps of one arm only
        self._window.append(record)
        if record.time - self._shown_s < self._log_every_s:
            return []
        return self.finish()

    def finish(self) -> list[str]:
        if not self._window:
            return []
        text = plain_line(self._window, self.info)
        self._shown_s = self._window[-1].time
        self._window.clear()
        return [text]


def header_parts(last: StepRecord, summary: WindowSummary | None, info: RunInfo) -> list[str]:
    """Return the parts of a line about all ranks; without a summary those that the first step has."""
    first = [last.arm, info.position(last), f"loss {format_number(last.loss)}"]
    if summary is None:
        return first
    if summary.staleness is not None:
        first[1] = first[1].replace("step", "updates", 1)
    return [
        *first,
        f"{format_number(summary.samples_per_s)} samples/s" if summary.seconds > 0 else "",
        "" if summary.staleness is None else f"mean staleness {summary.staleness:.1f}",
        format_busy(summary),
        format_bottleneck(summary.bottleneck) if summary.seconds > 0 else "",
    ]


def plain_line(window: Sequence[StepRecord], info: RunInfo) -> str:
    last = window[-1]
    summary = info.summarize(window)
    parts = header_parts(last, summary, info)
    if summary is not None:
        parts += [*(_rank_parts(summary) if summary.staleness is None else ()), info.left(last)]
    return " | ".join(part for part in parts if part)


def format_busy(summary: WindowSummary) -> str:
    """Format ``efficiency 96 %`` if the solo speeds are known, else ``busy 97 %``."""
    if summary.efficiency is not None:
        return f"efficiency {format_percent(summary.efficiency)}"
    return f"busy {format_percent(summary.busy)}"


def format_bottleneck(bottleneck: StepBottleneck | None) -> str:
    """Format ``data-bound: 41 % of rank 1's step``; empty for None."""
    if bottleneck is None:
        return ""
    return f"{bottleneck.kind}-bound: {format_percent(bottleneck.fraction)} of rank {bottleneck.rank}'s step"


def format_percent(fraction: float) -> str:
    return f"{fraction * 100:.0f} %" if math.isfinite(fraction) else "? %"


def format_number(value: float) -> str:
    """Format four significant digits, without an exponent from 0.001 to a billion."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-3:
        return f"{value:.3e}"
    digits = max(0, 3 - math.floor(math.log10(size))) if size else 0
    return f"{value:.{min(digits, 6)}f}"


def format_seconds(seconds: float) -> str:
    """Format a duration: ``0:40``, ``3:12``, ``1:02:03``, ``2 d 03 h``."""
    whole = round(seconds)
    if whole >= 86_400:
        return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def format_rank_range(ranks: Sequence[RankSummary], first: int = 0) -> str:
    """Format shares and busy times of one or more ranks from index ``first`` on as ranges, and the rank that waits least."""
    least = min(range(len(ranks)), key=lambda index: ranks[index].wait)
    shares, busy = [rank.share for rank in ranks], [rank.busy for rank in ranks]
    return _range_of(
        RankRange(len(ranks), (min(shares), max(shares)), (min(busy), max(busy)), first + least, ranks[least].wait)
    )


def format_many(many: RankRange) -> str:
    """Format the ranks of records that sum them up."""
    return f"{many.num_ranks} ranks: {_range_of(many)}"


def _range_of(many: RankRange) -> str:
    return (
        f"shares {many.shares[0]} to {many.shares[1]}, "
        f"busy {format_percent(many.busy[0])} to {format_percent(many.busy[1])}, "
        f"rank {many.waits_least} waits least ({format_percent(many.wait)})"
    )


def _rank_parts(summary: WindowSummary) -> list[str]:
    ranks = summary.ranks
    if summary.many is not None:
        return [format_many(summary.many)]
    if len(ranks) > MAX_RANKS_SHOWN:
        return [f"{len(ranks)} ranks: {format_rank_range(ranks)}"]
    return [
        f"rank {index}: share {rank.share}, busy {format_percent(rank.busy)}, wait {format_percent(rank.wait)}"
        for index, rank in enumerate(ranks)
    ]


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
