"""`RunHistory`: a run summed up while its records are read, in 32 bytes a step and tables of bounded size."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from evenload.records.console import RunInfo, format_seconds
from evenload.records.measurement import MeasurementResult, blocks_from_rows, evaluate
from evenload.records.values import SEGMENTS, LateMetrics, RankTimes, Record, RunEvent, StepRecord
from evenload.stored_names import MEASUREMENT
from evenload.views.bins import TimeBins
from evenload.views.run.incidents import Incident, group_of, incident_of
from evenload.views.run.many_ranks import RankEstimate, busiest_rank, has_compiled
from evenload.views.run.step_batch import SECONDS_OF, PlacedStep, StepBatch, carry_back

RECENT_STEPS = 100
_USUAL_STEPS = 31
_MIN_USUAL = 8
_SLOW, _SLOW_S = 5.0, 1.0
"""A step without an event is an incident from this many times the usual seconds on, and this many seconds more."""
MAX_METRICS = 8
_MAX_SINCE = 16
"""Incidents between two steps that are compared with the length of the second."""


@dataclass
class DeviceHistory:
    """One device over all sessions; sums over the steps that it took part in."""

    name: str
    rank: int
    """The last one that it had."""
    alive_s: float = 0.0
    """In sessions, from the beginning of the session or its first step to its last step."""
    in_steps_s: float = 0.0
    repeated_s: float = 0.0
    """In steps that were computed again later; part of ``in_steps_s``."""
    before_s: float = 0.0
    """From the beginning of a session to its first step."""
    segments_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SEGMENTS, 0.0))
    solo_per_s: float | None = None
    share: int = 0
    num_samples: int = 0
    memory_bytes: int = 0

    @property
    def busy_s(self) -> float:
        times: dict[str, Any] = {**self.segments_s}
        return RankTimes(**times).busy_s

    @property
    def outside_s(self) -> float:
        """Seconds alive that no segment covers: recovery, rebuilt groups, the end of a session."""
        return max(0.0, self.alive_s - self.before_s - sum(self.segments_s.values()))


class RunHistory:
    """Everything that the page of a run shows, from its records in the order of their times.

    The time axis counts seconds in sessions: pauses between them are left out. Steps of measurements (arms) count as time
    outside the training steps.
    """

    def __init__(self) -> None:
        self.info = RunInfo()
        self.bins = TimeBins()
        self.devices: dict[Hashable, DeviceHistory] = {}
        self.present: tuple[Hashable, ...] = ()
        """Keys of the devices of the last step, by rank."""
        self.events: list[tuple[float, RunEvent]] = []
        """Events with a message, and their places on the axis."""
        self.incidents: list[Incident] = []
        self.measurement: MeasurementResult | None = None
        self.expected: RunEvent | None = None
        """The last decision with an expected speed-up."""
        self.metrics: dict[str, float] = {}
        """The newest value of each."""
        self.num_sessions = 0
        self.began_s: float | None = None
        self.last_s = 0.0
        """Time of the last record, since 1970."""
        self.is_open = False
        self.num_samples = 0
        self.num_repeated = 0
        self.steps_s = 0.0
        self.last: StepRecord | None = None
        self.first_loss = self.best_loss = math.nan
        self.best_step = 0
        self.recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self._offset_s = 0.0
        """Time since 1970 at the beginning of the axis, pauses left out."""
        self._covered_s = 0.0
        """Place on the axis of the last record of a step, or of the session's beginning."""
        self._in_first_step = True
        self._usual: deque[float] = deque(maxlen=_USUAL_STEPS)
        self._usual_s: float | None = None
        self._num_usual = 0
        self._batch: StepBatch | None = None
        self._held: PlacedStep | None = None
        self._reopened: tuple[float, int, float | None] | None = None
        """Of a session that began with no end of the last: the offset before, the index of the incident, the usual step."""
        self._key_of_worker: dict[str, Hashable] = {}
        self._workers: tuple[str, ...] = ()
        self._unpriced: list[int] = []
        """Indices of the incidents since the last step that name no seconds."""
        self._solo: tuple[float, ...] = ()
        self._estimate = RankEstimate()
        self._step_at = (array("q"), array("d"))
        """Step numbers and their places on the axis, of committed steps; the next two belong to them."""
        self._step_samples = array("q")
        self._step_seconds = array("d")

    @property
    def num_steps(self) -> int:
        return len(self._step_samples)

    @property
    def usual_step_s(self) -> float | None:
        """Median of the last steps; None at the beginning of a session."""
        return self._usual_s

    def step_at(self, at_s: float) -> int | None:
        """Return the step that was committed last at a place on the axis."""
        steps, places = self._step_at
        index = bisect_left(places, at_s + 1e-9) - 1
        return steps[index] if index >= 0 else None

    def add(self, record: Record) -> None:
        if self.began_s is None:
            self._begin(record.time - (record.seconds if isinstance(record, StepRecord) else 0.0))
        self.last_s = max(self.last_s, record.time)
        self.info.add(record)
        if isinstance(record, RunEvent):
            self._add_event(record)
        elif isinstance(record, StepRecord):
            self._add_step(record)
        else:
            self._add_metrics(record)

    def _begin(self, time_s: float) -> None:
        """Begin a session at a time; the axis continues where the last one ended."""
        self.settle()
        self._workers = ()
        if self.began_s is None:
            self.began_s = time_s
        self._offset_s = time_s - self.bins.end_s
        self._covered_s = self.bins.end_s
        self._in_first_step, self.is_open = True, True
        self._usual.clear()
        self._usual_s, self._num_usual = None, 0
        self._unpriced.clear()
        self.recent.clear()

    def _at(self, time_s: float) -> float:
        """Return the place of a time on the axis; a clock that was set back stands still."""
        return max(self._covered_s, time_s - self._offset_s)

    def _add_event(self, event: RunEvent) -> None:
        if event.kind == "open":
            self._open(event)
            return
        at_s = self._at(event.time)
        self.bins.extend(at_s)
        if event.kind == "close":
            self.is_open = False
            self._cover(at_s, self.present)
            return
        if self.info.solo_per_s and self.info.solo_per_s != self._solo:
            self._solo = self.info.solo_per_s
            for key, speed in zip(self._keys(len(self._solo)), self._solo, strict=True):
                self._device(key).solo_per_s = speed
        if event.kind == MEASUREMENT and isinstance(blocks := event.fields.get("blocks"), list) and blocks:
            self.measurement = evaluate(blocks_from_rows(blocks))
        if event.kind == "loader":  # a new session has begun indeed
            self._reopened = None
        if isinstance(workers := event.fields.get("workers"), list | tuple) and workers:
            self._follow_workers(workers)
            if self._reopened is not None and group_of(event) == "recovery":
                self._go_on()
                at_s = self._at(event.time)
        if event.fields.get("over_equal"):
            self.expected = event
        if event.message:
            self.events.append((at_s, event))
        if (group := group_of(event)) is not None:
            if (found := incident_of(event, group, at_s)).seconds is None:
                self._unpriced.append(len(self.incidents))
            self.incidents.append(found)

    def _open(self, event: RunEvent) -> None:
        before_s, was_open, last = self.last_before(event.time), self.is_open, self.last
        first = self.num_sessions == 0
        self.num_sessions += 1
        if first and last is None and not self.events:
            self._begin(event.time)
            return
        pause_s = max(0.0, event.time - before_s)
        at_s = self.bins.end_s
        step = last.step if last is not None else None
        if was_open:
            text = (
                f"session {self.num_sessions - 1} ended without closing its records (killed, or its machine failed); "
                f"the next began {format_seconds(pause_s)} later"
            )
            self._reopened = self._offset_s, len(self.incidents), self._usual_s
            self.incidents.append(Incident("no_close", "death", text, "", step, at_s, pause_s))
        else:
            text = f"the run stood still between sessions {self.num_sessions - 1} and {self.num_sessions}"
            self.incidents.append(Incident("pause", "pause", text, "", step, at_s, pause_s))
        self._begin(event.time)

    def _go_on(self) -> None:
        """Take a session back that was none: rank 0 was lost, and another rank went on with its records."""
        if self._reopened is None:
            return
        offset_s, index, self._usual_s = self._reopened
        self.num_sessions -= 1
        moved_s = self._offset_s - offset_s
        self._offset_s, self._in_first_step, self._reopened = offset_s, False, None
        later = [replace(found, at_s=found.at_s + moved_s) for found in self.incidents[index + 1 :]]
        self.incidents[index:] = later
        self._unpriced = [number - 1 for number in self._unpriced if number > index]

    def last_before(self, time_s: float) -> float:
        """Return the time since 1970 at which the axis ends, of a session that ended before ``time_s``."""
        return min(time_s, self.bins.end_s + self._offset_s)

    def _add_step(self, step: StepRecord) -> None:
        at_s = self._at(step.time)
        keys = self._keys(step.num_ranks)
        if step.arm:  # of a measurement: nothing of it is committed
            self._cover(at_s, keys if len(keys) > 1 else self.present)
            return
        step = self._estimate.fill(step)
        others_s = step.first_other_s
        begin_s = min(at_s, max(self._covered_s, at_s - step.seconds - others_s))
        before_s = begin_s - self._covered_s if self._in_first_step else 0.0
        self._note_length(step, at_s, before_s, others_s)
        if self._in_first_step:
            for key in keys:
                self._device(key).before_s += before_s
        rows = [SECONDS_OF(times) for times in step.ranks]
        covered_s = at_s - self._covered_s
        self._place(PlacedStep(keys, begin_s, at_s, covered_s, step.seconds + others_s, step, rows))
        self._covered_s = at_s
        self.bins.extend(at_s)
        self._take_back(step)
        if math.isfinite(step.loss):
            self.bins.sample("loss", step.loss, at_s)
            if math.isnan(self.first_loss):
                self.first_loss = step.loss
            if not step.loss >= self.best_loss:
                self.best_loss, self.best_step = step.loss, step.step
        if step.metrics:
            self._add_values(step.metrics, at_s)
        self.present, self.last, self._in_first_step = keys, step, False
        self.recent.append(step)
        self._step_at[0].append(step.step)
        self._step_at[1].append(at_s)
        self._step_samples.append(step.num_samples)
        self._step_seconds.append(step.seconds)
        self.num_samples += step.num_samples
        self.steps_s += step.seconds

    def _place(self, step: PlacedStep) -> None:
        """Hold a step until the next one has brought what its ranks spent at its end."""
        before, self._held = self._held, step
        if before is None:
            return
        if before.keys == step.keys and not self._in_first_step:
            for rank, row in enumerate(step.rows):
                before.rows[rank], step.rows[rank] = carry_back(before.rows[rank], before.length_s, row, step.length_s)
        self._add_to_batch(before)

    def _add_to_batch(self, step: PlacedStep) -> None:
        batch = self._batch
        if batch is None or batch.keys != step.keys or self.bins.index(step.end_s) != self.bins.index(batch.begin_s):
            self._spread()
            batch = self._batch = StepBatch(step.keys, step.begin_s)
        batch.add(step)

    def settle(self) -> None:
        """Account for the last steps; call it before reading `devices` or `bins`."""
        held, self._held = self._held, None
        if held is not None:
            self._add_to_batch(held)
        self._spread()

    def _spread(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        values: dict[Hashable, float] = {"samples": batch.num_samples}
        for rank, key in enumerate(batch.keys):
            device = self._device(key)
            device.rank, device.share = rank, batch.last_shares[rank] if rank < len(batch.last_shares) else 0
            device.alive_s += batch.covered_s
            device.in_steps_s += batch.seconds
            device.num_samples += batch.shares[rank] if rank < len(batch.shares) else 0
            device.memory_bytes = max(device.memory_bytes, batch.memory_bytes[rank])
            values[key, "share"] = batch.shares[rank] if rank < len(batch.shares) else 0
            for name, seconds in zip(SEGMENTS, batch.segments_s[rank], strict=True):
                device.segments_s[name] += seconds
                values[key, name] = seconds
        self.bins.spread(values, batch.begin_s, batch.end_s)

    def _add_metrics(self, late: LateMetrics) -> None:
        self._add_values(late.metrics, self._at(late.time))

    def _add_values(self, metrics: Mapping[str, float], at_s: float) -> None:
        for name, value in metrics.items():
            known = name in self.metrics or len(self.metrics) < MAX_METRICS
            self.metrics[name] = value
            if known and name != "loss" and math.isfinite(value):
                self.bins.sample(("metric", name), value, at_s)

    def _cover(self, at_s: float, keys: tuple[Hashable, ...]) -> None:
        self.settle()
        for key in keys:
            self._device(key).alive_s += at_s - self._covered_s
        self._covered_s = at_s
        self.bins.extend(at_s)

    def _note_length(self, step: StepRecord, at_s: float, before_s: float, others_s: float) -> None:
        """Price the incidents since the last step, and note a step that was slow without one."""
        seconds = at_s - self._covered_s - others_s - before_s
        usual_s, compiled = self._usual_s, has_compiled(step)
        excess_s = None if usual_s is None or compiled else max(0.0, seconds - usual_s)
        is_slow = excess_s is not None and usual_s is not None and excess_s > max(_SLOW_S, (_SLOW - 1) * usual_s)
        since: list[Incident] = []
        if self._unpriced or is_slow:
            since = [found for found in self.incidents[-_MAX_SINCE:] if found.at_s >= self._covered_s]
        if excess_s is not None and self._unpriced:
            named_s = sum(found.seconds or 0.0 for found in since)
            for index in self._unpriced:
                part_s = max(0.0, excess_s - named_s) / len(self._unpriced)
                self.incidents[index] = replace(self.incidents[index], seconds=part_s, measured=False)
        if is_slow and not since:
            rank, times = busiest_rank(step)
            name = max(SEGMENTS, key=lambda segment: getattr(times, segment))
            text = (
                f"step {step.step} took {seconds:.3g} s instead of {usual_s:.3g} s: rank {rank} spent "
                f"{getattr(times, name):.3g} s on {name.removesuffix('_s')}; no event names a cause"
            )
            self.incidents.append(Incident("slow_step", "slow", text, f"rank {rank}", step.step, at_s, excess_s))
        elif not compiled and not self._in_first_step:
            self._usual.append(seconds)
            self._num_usual += 1
            if self._num_usual % _MIN_USUAL == 0:
                self._usual_s = median(self._usual)
        self._unpriced.clear()

    def _take_back(self, step: StepRecord) -> None:
        """Forget steps that a resume from an older checkpoint computes again."""
        steps, places = self._step_at
        keep = bisect_left(steps, step.step)
        if (num_lost := len(steps) - keep) == 0:
            return
        first, last = steps[keep], steps[-1]
        seconds, samples = sum(self._step_seconds[keep:]), sum(self._step_samples[keep:])
        self.num_samples -= samples
        self.steps_s -= seconds
        self.num_repeated += num_lost
        for key in self.present:
            self._device(key).repeated_s += seconds
        text = (
            f"steps {first} to {last} were computed again, from the checkpoint at step {step.step} on"
            if num_lost > 1
            else f"step {first} was computed again"
        )
        self.incidents.append(Incident("repeated", "repeated", text, "", step.step, self._at(step.time), seconds))
        for table in (steps, places, self._step_samples, self._step_seconds):
            del table[keep:]

    def _keys(self, world_size: int) -> tuple[Hashable, ...]:
        """Identify the devices of a step by worker, else by name (equal names are counted), else by rank."""
        if len(self._workers) == world_size:
            return tuple(self._key_of_worker[worker] for worker in self._workers)
        names = self.info.devices
        if len(names) != world_size:
            return tuple(("rank", rank) for rank in range(world_size))
        return tuple((name, names[:rank].count(name)) for rank, name in enumerate(names))

    def _follow_workers(self, workers: Sequence[object]) -> None:
        """Give each worker the row that it has, and a new one the first free row of its device: it may be a restarted one."""
        self._workers = tuple(map(str, workers))
        names = self.info.devices if len(self.info.devices) == len(workers) else ("rank",) * len(workers)
        kept = {worker: key for worker, key in self._key_of_worker.items() if worker in self._workers}
        self._key_of_worker = kept
        for worker, name in zip(self._workers, names, strict=True):
            if worker not in kept:
                number = next(count for count in range(len(kept) + 1) if (name, count) not in kept.values())
                kept[worker] = (name, number)

    def _device(self, key: Hashable) -> DeviceHistory:
        if key not in self.devices:
            name, number = key if isinstance(key, tuple) else (key, 0)
            self.devices[key] = DeviceHistory("" if name == "rank" else str(name), number)
        return self.devices[key]
