"""`StepRecorder`: writes steps and events to the run's records, on the rank that writes."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from evenload.balance.rank_costs import MANY_RANKS
from evenload.balance.values import StepPlan
from evenload.records.recorder import Recorder, is_media
from evenload.records.values import OwnStep, RankTimes, StepRecord
from evenload.training.step.bottleneck import LoadingMonitor
from evenload.training.step.stats import StepStats
from evenload.training.step.unread_log import UnreadLog

_WHOLE_EVERY = 10
"""Of more than 128 ranks, the times of each are recorded in every so many steps, and whenever shares change."""
_WRITE_EVERY_S = 0.1
"""Short steps are written together, so often: a line by itself takes four times as long, as nothing of its code is cached."""


class _EndedStep(NamedTuple):
    """A step that is not written yet."""

    step: int
    plan: StepPlan
    stats: StepStats
    arm: str
    seconds: float
    time: float
    """Of the end of its loop body, since 1970."""
    ended_s: float
    """The same by `time.perf_counter`."""


class StepRecorder:
    """Writes steps and events through the recorder, on the rank that writes; the others keep their last steps for a takeover.

    Without a recorder it holds them until `open`. Steps are written together every 100 ms, and before an event: a process that
    is killed has not written the last of them.
    """

    def __init__(self, recorder: Recorder | None, writes: bool, *, on_device: bool = False) -> None:
        """`on_device`: what is logged may lie on a device, which the host does not wait for."""
        self._recorder = recorder
        self.writes = writes
        self._on_device = on_device
        self._written = -1
        """The last step that a rank before this one has written."""
        self._held: list[Callable[[Recorder], None]] = []
        self._unread_log = UnreadLog(self._write_log) if writes and on_device else None
        self._last_s: float | None = None
        self._wrote_s = -math.inf
        """When steps were last written, on the clock of `_last_s`."""
        self._thread = 0
        """The thread in which steps end."""
        self._ended: deque[_EndedStep] = deque()
        """The last steps: those that are not written yet, or that this rank would write if the one that writes were lost."""
        self._own: list[OwnStep] = []
        """Later ones that are not written yet; empty while there are earlier ones."""
        self._bottleneck = LoadingMonitor()
        self._whole: tuple[tuple[int, ...], str] | None = None
        """Shares and arm of the last record with the times of each of many ranks."""
        self._share_range = (0, 0)

    def event(self, kind: str, message: str, step: int | None = None, **fields: Any) -> None:
        """Record an event; every rank may call it, rank 0 writes it."""
        if not self.writes:
            return
        if threading.get_ident() == self._thread:  # another one must not wait for a device that may hang
            self._write_ended(but_unread=True)
        self._write_event(kind, message, step, fields)

    def open(self, recorder: Recorder) -> None:
        """Write from now on, what was held first."""
        self._recorder = recorder
        for write in self._held:
            write(recorder)
        self._held.clear()

    def take_over(self, recorder: Recorder, last_step: int) -> None:
        """Write from now on, in place of a rank that is gone; `last_step` is the last that it has written."""
        self._recorder, self.writes, self._written = recorder, True, last_step
        self._held.clear()
        self._unread_log = UnreadLog(self._write_log) if self._on_device else None
        self._write_ended()

    def step(self, index: int, plan: StepPlan, stats: StepStats, arm: str = "", *, at_once: bool = False) -> None:
        """Record a step whose loop body has ended; one that a device holds a part of waits for the next.

        `at_once`: write it now, unless a device holds a part of it: a checkpoint holds the step, or no step follows soon.
        """
        if plan.of is not None and not plan.of.num_samples:
            return  # a batch of an island, whose step another one ends
        now = time.perf_counter()
        since = stats.begun_s if self._last_s is None else self._last_s
        self._last_s = now
        if not stats.calls:
            return
        ended = self._ended
        if self._own:
            self._write_ended()
        ended.append(_EndedStep(index, plan, stats, arm, now - since, time.time(), now))
        if self.writes:
            if at_once or now - self._wrote_s >= _WRITE_EVERY_S:
                self._wrote_s, self._thread = now, threading.get_ident()
                self._write_ended(but_unread=True)
            return
        # This rank may be the next that writes. The one that does has begun this step, and so written those before.
        while len(ended) > 2 and ended[-2].ended_s - ended[0].ended_s > 3 * _WRITE_EVERY_S:
            ended.popleft()

    def own_step(
        self,
        index: int,
        plan: StepPlan,
        stats: StepStats,
        times: tuple[float, ...],
        memory_bytes: int,
        ended_s: float,
        *,
        at_once: bool,
    ) -> None:
        """Do what `step` does on a rank that is alone and writes, for a step of one micro-batch that ended at `ended_s`."""
        seconds, self._last_s = ended_s - (self._last_s or stats.begun_s) - stats.other_s, ended_s
        if self._ended:
            self._write_ended()
        ended = OwnStep(
            *(index, plan.epoch, plan.step, plan.num_samples, stats.loss, max(0.0, seconds), times, memory_bytes),
            *(stats.metrics, time.time()),
        )
        self._own.append(ended)
        if at_once or ended_s - self._wrote_s >= _WRITE_EVERY_S:
            self._wrote_s = ended_s
            self._write_ended(but_unread=True)

    def _write_ended(self, *, but_unread: bool = False) -> None:
        """Write the steps that have ended; `but_unread` leaves the last one where a device holds a part of it."""
        ended, log = self._ended, self._unread_log
        while ended:
            if but_unread and len(ended) == 1 and (ended[0].stats.unread is not None or (log and log.is_waiting)):
                return
            self._write_step(ended.popleft())
        if own := self._own:
            self._own = []
            self._write(lambda recorder: recorder.own_steps(own))
            for step, event in self._bottleneck.take_own(own):
                self._write_event(event.kind, event.message, step, event.fields)

    def _write_step(self, ended: _EndedStep) -> None:
        index, plan, stats, arm, whole_s, ended_at, _ = ended
        if index <= self._written and not arm:
            return
        if self._unread_log is not None:
            self._unread_log.write(index)
        # A rank alone (measure.py) has the times of no other.
        num_ranks = stats.num_ranks
        shares = plan.shares if num_ranks == len(plan.shares) else (plan.num_samples,)
        ranks: Sequence[RankTimes] = ()
        spread = None
        if num_ranks > MANY_RANKS:
            is_whole = index % _WHOLE_EVERY == 0 or self._whole != (shares, arm)
            if is_whole:
                self._whole, self._share_range = (shares, arm), (min(shares), max(shares))
            spread = stats.spread(self._share_range)
            ranks, shares = (stats.columns(), shares) if is_whole else ((), ())
        else:
            ranks = stats.rank_times()
        record = StepRecord(
            step=index,
            epoch=plan.epoch,
            epoch_step=plan.step,
            num_samples=plan.progress.num_samples,
            loss=stats.loss,
            shares=shares,
            num_micro=plan.num_micro,
            seconds=max(0.0, whole_s - stats.other_s),
            ranks=ranks,
            metrics=dict(stats.metrics),
            arm=arm,
            time=ended_at,
            spread=spread,
        )
        self._write(lambda recorder: recorder.step(record))
        for event in () if arm else self._bottleneck.take(record, stats.readings()):
            self._write_event(event.kind, event.message, index, event.fields)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        if self._unread_log is not None:
            shown = {name: value for name, value in metrics.items() if is_media(name, value)}
            if shown:
                self._write_log(shown, step)
            self._unread_log.add({name: value for name, value in metrics.items() if name not in shown}, step)
        else:
            self._write_log(metrics, step)

    def write_waiting(self, *, waits: bool = True) -> None:
        """Write what waits for a device: the last step, and what was logged; without `waits` only what the host has."""
        if not self.writes:
            return
        if self._unread_log is not None:
            self._unread_log.write(waits=waits)
        self._write_ended()

    def tracker(self, name: str) -> Any | None:
        """Return the own object of a logger's library on the rank that writes; None on the others."""
        if self.writes:
            self._write_ended(but_unread=True)
        return None if self._recorder is None else self._recorder.tracker(name)

    def hand_over(self) -> None:
        """Write what waits as this rank leaves; leave the steps to the rank that writes from now on if it has begun."""
        if self.writes and self._recorder is not None and self._recorder.is_followed:
            self._ended.clear()
            self._own.clear()
        self.write_waiting()

    def close(self, ended_well: bool) -> None:
        try:
            self.write_waiting(waits=ended_well)
        except RuntimeError:  # a device that failed gives nothing back
            self._unread_log = None
            self._write_ended()
        if self._recorder is not None:
            self._recorder.close(ended_well)

    def _write_event(self, kind: str, message: str, step: int | None, fields: Mapping[str, Any]) -> None:
        self._write(lambda recorder: recorder.event(kind, message, step=step, **fields))

    def _write(self, write: Callable[[Recorder], None]) -> None:
        if not self.writes:
            return
        if self._recorder is None:
            self._held.append(write)
        else:
            write(self._recorder)

    def _write_log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._write(lambda recorder: recorder.log(metrics, step))
