"""The plain line: what a run says where there is no terminal, one line an interval.

``step 120/400 | loss 2.346 | 412 samples/s | busy 97 % | rank 0: share 171, busy 98 %, wait 1 % | ... | 3:12 left``
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from evenload.records.summary import RankSummary, Summary, Verdict, summarise
from evenload.records.values import Event, Logged, Record, StepRecord

MAX_RANKS_SHOWN = 8
"""With more ranks, a line gives their range and the one that waits least: the one the others wait for."""
ETA_STEPS = 100
"""Over how many last steps the time of a step is taken for the time left."""


class Facts:
    """What the events say about a run, for lines and views: names, solo speeds, lengths, the time of a step."""

    def __init__(self) -> None:
        self.devices: tuple[str, ...] = ()
        self.solo_per_s: tuple[float, ...] = ()
        self.total_steps: int | None = None
        self.epoch_steps: int | None = None
        self._times: deque[tuple[int, float, float]] = deque(maxlen=ETA_STEPS)

    def take(self, record: Record) -> None:
        """Learns from one record."""
        if isinstance(record, StepRecord):
            self._times.append((record.step, record.time, record.seconds))
        elif isinstance(record, Event):
            self._take_event(record)

    def _take_event(self, event: Event) -> None:
        if event.kind == "open":
            self._times.clear()
        self.total_steps = _count(event.fields.get("total_steps")) or self.total_steps
        self.epoch_steps = _count(event.fields.get("epoch_steps")) or self.epoch_steps
        devices, speeds = event.fields.get("devices"), event.fields.get("speeds_per_s")
        if isinstance(devices, list | tuple):
            self.devices = tuple(str(name) for name in devices)
        if event.kind == "solo_speeds" and isinstance(speeds, list | tuple):
            self.solo_per_s = tuple(float(speed) for speed in speeds)

    def name(self, rank: int) -> str:
        """What a person calls a rank."""
        return self.devices[rank] if rank < len(self.devices) else f"rank {rank}"

    def left_s(self, last: StepRecord) -> float | None:
        """Wall seconds left to the end of the run, or of the epoch where the run's length isn't known."""
        num_left = self._num_left(last)
        if num_left is None or not self._times:
            return None
        (first_step, first_s, _), (last_step, last_s, seconds) = self._times[0], self._times[-1]
        if last_step > first_step and last_s > first_s:
            seconds = (last_s - first_s) / (last_step - first_step)
        return num_left * seconds

    def _num_left(self, last: StepRecord) -> int | None:
        if self.total_steps is not None:
            return max(0, self.total_steps - last.step - 1)
        if self.epoch_steps is not None:
            return max(0, self.epoch_steps - last.epoch_step - 1)
        return None

    def position(self, last: StepRecord) -> str:
        """``step 12/400`` or ``epoch 1 step 12/40``; steps are counted from 1, as done."""
        if self.total_steps is not None:
            return f"step {last.step + 1}/{self.total_steps}"
        if self.epoch_steps is not None:
            return f"step {last.step + 1} (epoch {last.epoch}: {last.epoch_step + 1}/{self.epoch_steps})"
        return f"step {last.step + 1}"

    def left(self, last: StepRecord) -> str:
        """``3:12 left``, ``0:40 left in the epoch``, or nothing where it isn't known."""
        left_s = self.left_s(last)
        if left_s is None:
            return ""
        return f"{format_seconds(left_s)} left" + ("" if self.total_steps is not None else " in the epoch")


class PlainLines:
    """Turns records into the lines to print: the first step, then one line an interval, and what events say.

    Reads no clock: the interval is taken from the records' own times.
    """

    def __init__(self, log_every_s: float) -> None:
        self.facts = Facts()
        self._log_every_s = log_every_s
        self._window: list[StepRecord] = []
        self._shown_s = -math.inf

    def take(self, record: Record) -> list[str]:
        """Lines to print after this record; mostly none."""
        self.facts.take(record)
        if isinstance(record, Logged):
            return []
        if isinstance(record, Event):
            return [f"evenload: {record.message}"] if record.message else []
        if self._window and self._window[-1].arm != record.arm:
            self._window.clear()  # a line over two arms would describe neither
        self._window.append(record)
        if record.time - self._shown_s < self._log_every_s:
            return []
        return self.finish()

    def finish(self) -> list[str]:
        """A last line for the steps since the last one; empty where there are none."""
        if not self._window:
            return []
        text = plain_line(self._window, self.facts)
        self._shown_s = self._window[-1].time
        self._window.clear()
        return [text]


def head_parts(last: StepRecord, summary: Summary, facts: Facts) -> list[str]:
    """What is said of a window first, whoever shows it."""
    return [
        last.arm,
        facts.position(last),
        f"loss {format_number(last.loss)}",
        f"{format_number(summary.samples_per_s)} samples/s" if summary.seconds > 0 else "",
        format_busy(summary),
        format_verdict(summary.verdict) if summary.seconds > 0 else "",
    ]


def plain_line(window: Sequence[StepRecord], facts: Facts) -> str:
    """One line for a window of at least one step."""
    last = window[-1]
    summary = summarise(window, facts.solo_per_s)
    parts = [*head_parts(last, summary, facts), *_rank_parts(summary.ranks), facts.left(last)]
    return " | ".join(part for part in parts if part)


def format_busy(summary: Summary) -> str:
    """``efficiency 96 %`` where the solo speeds are known, else ``busy 97 %``."""
    if summary.efficiency is not None:
        return f"efficiency {format_percent(summary.efficiency)}"
    return f"busy {format_percent(summary.busy)}"


def format_verdict(verdict: Verdict | None) -> str:
    """``data-bound: 41 % of rank 1's step``; nothing where there is no verdict."""
    if verdict is None:
        return ""
    return f"{verdict.kind}-bound: {format_percent(verdict.fraction)} of rank {verdict.rank}'s step"


def format_percent(fraction: float) -> str:
    """``97 %``."""
    return f"{fraction * 100:.0f} %" if math.isfinite(fraction) else "? %"


def format_number(value: float) -> str:
    """Four significant digits, without an exponent from 0.001 to a billion."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-3:
        return f"{value:.3e}"
    digits = max(0, 3 - math.floor(math.log10(size))) if size else 0
    return f"{value:.{min(digits, 6)}f}"


def format_seconds(seconds: float) -> str:
    """``0:40``, ``3:12``, ``1:02:03``, ``2 d 03 h``."""
    whole = round(seconds)
    if whole >= 86_400:
        return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _rank_parts(ranks: Sequence[RankSummary]) -> list[str]:
    if len(ranks) <= MAX_RANKS_SHOWN:
        return [
            f"rank {index}: share {rank.share}, busy {format_percent(rank.busy)}, wait {format_percent(rank.wait)}"
            for index, rank in enumerate(ranks)
        ]
    least = min(range(len(ranks)), key=lambda index: ranks[index].wait)
    return [
        f"{len(ranks)} ranks: shares {min(r.share for r in ranks)} to {max(r.share for r in ranks)}, busy "
        f"{format_percent(min(r.busy for r in ranks))} to {format_percent(max(r.busy for r in ranks))}, rank {least} "
        f"waits least ({format_percent(ranks[least].wait)})"
    ]


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
