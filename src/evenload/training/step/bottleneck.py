"""Detect on rank 0 that ranks wait for samples, and describe it in events. No clock and no I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter, itemgetter
from statistics import mean, median
from typing import Any

from evenload.records.console import format_bottleneck, format_number, format_percent
from evenload.records.summary import DATA_BOUND, summarize_steps
from evenload.records.values import OwnStep, RankTimes, StepRecord
from evenload.training.data.tuning import SKIPPED_STEPS, ReadSettings, SettingsOrigin

WINDOW_STEPS = 10
LEAST_STEPS = 8
"""Steps needed before the first event."""
_EVERY_STEPS = 4
"""Steps between two checks: a check takes rank 0 about 0.1 ms."""
LEAST_DATA_S = 0.002
"""Shorter waits in a step are ignored, however short the step is."""
_DATA_S, _RANKS, _ORIGIN = attrgetter("data_s"), itemgetter(1), attrgetter("origin")


@dataclass(frozen=True)
class LoadingEvent:
    kind: str
    message: str
    fields: Mapping[str, Any]


@dataclass
class _Reader:
    reading: ReadSettings
    waited: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    """Fraction of each step spent waiting for samples, since the last change."""
    sample_s: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    """Seconds per sample of the global batch in the same steps: what the search minimises."""
    tried: list[tuple[ReadSettings, float, float]] = field(default_factory=list)
    """Settings tried before, with their fraction of waiting and seconds per sample."""
    reported: set[ReadSettings] = field(default_factory=set)
    """Settings that an event has reported; several loaders may alternate."""


class LoadingMonitor:
    def __init__(self) -> None:
        self._window: deque[tuple[StepRecord, Sequence[RankTimes]]] = deque(maxlen=WINDOW_STEPS)
        """Each step with the ranks that are looked at."""
        self._readers: list[_Reader] = []
        self._reported: set[int] = set()
        """Ranks reported as waiting, until that is over; if all wait, the busiest rank alternates."""
        self._num_steps = 0
        self._busiest: deque[int] = deque(maxlen=WINDOW_STEPS)
        """The busiest rank of each step, where records sum many ranks up."""
        self._untaken: list[OwnStep] = []
        """The last steps of a rank alone, none of which waited for samples."""

    def take(self, record: StepRecord, readings: Sequence[ReadSettings]) -> list[LoadingEvent]:
        """Return the events to record for one committed step of training, given each rank's reading of its samples.

        Of many ranks the busiest one of each step is looked at, and how rank 0 reads: they search together.
        """
        steps, self._untaken = self._untaken, []
        events = [event for _, event in self._take_own(steps)] if steps else []
        return events + self._take(record, readings)

    def take_own(self, steps: Sequence[OwnStep]) -> list[tuple[int, LoadingEvent]]:
        """Return each event with its step, as `take` finds them, for steps of a rank alone that reads as before.

        Steps that can't bring one wait, and the oldest of them are dropped: the windows are judged at other steps then.
        """
        steps, self._untaken = [*self._untaken, *steps], []
        if not self._reported and all(step.times[0] < LEAST_DATA_S for step in steps):
            # No event comes of them: they wait until one may, and only the last ones count then.
            self._untaken, steps = steps[-WINDOW_STEPS:], []
        return self._take_own(steps)

    def _take_own(self, steps: Sequence[OwnStep]) -> list[tuple[int, LoadingEvent]]:
        readings = [reader.reading for reader in self._readers]
        return [(step.step, event) for step in steps for event in self._take(step.record(), readings)]

    def _take(self, record: StepRecord, readings: Sequence[ReadSettings]) -> list[LoadingEvent]:
        ranks = record.ranks
        if record.spread is not None:
            busiest, times = record.spread.busiest
            self._busiest.append(busiest)
            ranks, readings = (times,), readings[:1]
        else:
            self._busiest.clear()
        if len(readings) != len(self._readers):
            # The first step of a session, or of another set of ranks: workers start in it.
            self._readers = [_Reader(reading) for reading in readings]
            self._window.clear()
            self._reported.clear()
            return []
        events: list[LoadingEvent] = []
        for rank, (reader, reading) in enumerate(zip(self._readers, readings, strict=True)):
            # Replicas of one process read together: the first one's event is enough.
            together = rank > 0 and ranks[rank].data_s == ranks[0].data_s and reading == readings[0]
            if reading != reader.reading:
                changed = _change(rank, reader, reading)
                events += [] if together else changed
            reader.waited.append(ranks[rank].data_s / record.seconds if record.seconds > 0 else 0.0)
            reader.sample_s.append(record.seconds / max(1, record.num_samples))
        if SettingsOrigin.TRIAL in map(_ORIGIN, readings):
            self._window.clear()  # a search is running: its trials are not typical of the run
            return events
        self._window.append((record, ranks))
        self._num_steps += 1
        return events + self._judge() if self._num_steps % _EVERY_STEPS == 0 else events

    def _judge(self) -> list[LoadingEvent]:
        if len(self._window) < LEAST_STEPS:
            return []
        if not self._reported and max(map(_DATA_S, chain(*map(_RANKS, self._window)))) < LEAST_DATA_S:
            return []  # no rank can be found to wait, and this takes a few microseconds instead of a hundred
        over = [rank for rank in sorted(self._reported) if self._usual(rank) < DATA_BOUND / 2]
        self._reported.difference_update(over)
        events = []
        for rank in over:
            name = "no rank" if self._busiest else f"rank {rank} no longer"
            events.append(
                LoadingEvent("data_bound_over", f"{name} waits for samples", {} if self._busiest else {"rank": rank})
            )
        steps = [record for record, _ in self._window]
        if self._busiest:
            steps = [replace(s, ranks=r, shares=(s.num_samples,), spread=None) for s, r in self._window]
        verdict = summarize_steps(steps).bottleneck
        if (
            verdict is None
            or verdict.kind != "data"
            or verdict.rank in self._reported
            or not self._is_steady(verdict.rank)
        ):
            return events
        self._reported.add(verdict.rank)
        reading = self._readers[verdict.rank].reading
        if self._busiest:
            verdict = replace(verdict, rank=Counter(self._busiest).most_common(1)[0][0])
        message = f"{format_bottleneck(verdict)} is spent waiting for samples ({reading}); {_advice(reading)}"
        fields = {"rank": verdict.rank, "fraction": verdict.fraction, "num_workers": reading.num_workers}
        return [*events, LoadingEvent("data_bound", message, fields)]

    def _is_steady(self, rank: int) -> bool:
        # The median ignores single steps in which workers start or a cache fills.
        waited_s = median(ranks[rank].data_s for _, ranks in self._window)
        return waited_s >= LEAST_DATA_S and self._usual(rank) >= DATA_BOUND

    def _usual(self, rank: int) -> float:
        return median(ranks[rank].data_s / max(step.seconds, 1e-9) for step, ranks in self._window)


def _change(rank: int, reader: _Reader, reading: ReadSettings) -> list[LoadingEvent]:
    before, reader.reading = reader.reading, reading
    if reading.origin is SettingsOrigin.USER:
        return []
    if (reading.num_workers, reading.prefetch) != (before.num_workers, before.prefetch):
        if reader.waited:
            reader.tried.append((before, _usual(reader.waited), _usual(reader.sample_s)))
        reader.waited.clear()
        reader.sample_s.clear()
    if reading in reader.reported:
        return []
    reader.reported.add(reading)
    message = ""
    if reading.origin is SettingsOrigin.CHOSEN:
        tried = {str(one): (waited, sample_s) for one, waited, sample_s in reader.tried}
        if reader.waited:
            tried[str(reading)] = _usual(reader.waited), _usual(reader.sample_s)
        measured = "; ".join(
            f"{_speed(sample_s)} with {name} (waiting {format_percent(waited)} of a step)"
            for name, (waited, sample_s) in tried.items()
        )
        message = f"rank {rank} reads with {reading}, as measured, with all ranks searching together: {measured}"
        reader.tried = []
    fields = {
        "rank": rank,
        "num_workers": reading.num_workers,
        "prefetch": reading.prefetch,
        "pinned": reading.pinned,
        "chosen": reading.origin is SettingsOrigin.CHOSEN,
    }
    return [LoadingEvent("workers", message, fields)]


def _usual(waited: Sequence[float]) -> float:
    # Without the steps in which workers started, if there are others.
    return mean(list(waited)[SKIPPED_STEPS:] or waited)


def _speed(sample_s: float) -> str:
    return f"{format_number(1 / sample_s)} samples/s" if sample_s > 0 else "unmeasured"


def _advice(reading: ReadSettings) -> str:
    if reading.origin is SettingsOrigin.CHOSEN:
        return "other numbers of loader workers were tried and were no faster: read less, from closer, or at less cost"
    return (
        "try --num-workers auto, which measures how many loader workers are needed, or move the data to faster storage"
    )
