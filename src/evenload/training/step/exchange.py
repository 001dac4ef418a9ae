"""Exchange the reports of one attempt, and add them up."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenload.errors import DesyncError, StepError
from evenload.job import stop_requested
from evenload.training.comm.clock import ProcessorDelay, Segment, StepClock
from evenload.training.comm.control import Control, Operation
from evenload.training.compute.device_state import compiled_graphs, memory_bytes
from evenload.training.compute.device_sums import ALL_ZERO
from evenload.training.compute.micro_steps import LossSums
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.parallel.strategy import AWAY, LATE_GRADIENT, OK, GlobalTotals, LocalResult
from evenload.training.step.consistency import Consistency
from evenload.training.step.late_times import LateTimes, as_compiling
from evenload.training.step.planner import Planner
from evenload.training.step.recovery import Recovery
from evenload.training.step.report import (
    COLUMNS,
    OWN_TIMES,
    SECONDS,
    WAIT,
    OwnReport,
    RankReport,
    Reports,
    read_table,
)
from evenload.training.step.stats import StepStats

_READ_MEMORY_EVERY_S = 0.05
"""A peak rises rarely, and a short step has no time to read it."""


class ReportExchange:
    """Sends one row of numbers per rank; replicas of one process need no other process."""

    def __init__(self, control: Control, clock: StepClock, consistency: Consistency, device: torch.device) -> None:
        self._control = control
        self._clock = clock
        self._consistency = consistency
        self._device = device
        self._started_s = time.monotonic()
        # A GPU's seconds are its own, whatever the host's processors do.
        self._delay = ProcessorDelay() if device.type == "cpu" else None
        self._is_cuda = device.type == "cuda"
        self._memory_bytes, self._memory_read_s = 0.0, -math.inf
        self._num_graphs = 0
        self._tuned_sizes: set[int] = set()
        """Micro-batches for whose sizes cuDNN has chosen its kernels."""
        self._metric_names: dict[int, tuple[str, ...]] = {}
        self.recovery: Recovery | None = None
        self.late_times = LateTimes()
        self.own: OwnReport
        """This rank's report in the last exchange: all that counts where the others have left."""
        self._row: list[float]
        """Its row."""
        self._last: Reports
        """Those of all ranks in the last one."""

    def set_elapsed(self, seconds: float) -> None:
        """Continue with another rank's clock."""
        self._started_s, self._memory_read_s = time.monotonic() - seconds, -math.inf

    def begin(self) -> None:
        """Begin an attempt."""
        self._num_graphs = compiled_graphs()

    def run(
        self,
        results: Sequence[LocalResult],
        batch: GlobalBatch,
        planner: Planner,
        stats: StepStats,
        *,
        may_leave: bool = False,
    ) -> Reports:
        """Return the reports of all who share the step. All ranks call it once in an attempt."""
        first = self._report(results[0], batch, planner, stats, may_leave)
        self.own = OwnReport(first)
        if (given := results[0].seconds) is not None:
            stats.other_s += given["other"]
        if len(results) > 1:
            others = [self._report(result, batch, planner, stats, may_leave) for result in results[1:]]
            table = np.array([report.row() for report in (first, *others)])
        elif self._control.is_alone:
            if self._control.is_barred:
                self._control.check_open(Operation.BACKWARD)
            return self.own
        else:
            self._clock.switch("wait")
            row, is_away = first.row(), first.status == AWAY
            self._row = row
            values = self._control.pop_row(Operation.BACKWARD, row) if is_away else None
            if values is not None:
                return read_table(self._with_first_row(values), sorted(first.metrics))
            table = self._control.exchange_table(Operation.BACKWARD, row)
        self._last = read_table(table, sorted(first.metrics), measured=first.squared_norm is not None)
        return self._last

    def repeat(
        self, sums: LossSums, batch: GlobalBatch, planner: Planner, stats: StepStats, touched_key: float | None
    ) -> Reports:
        """Do what `run` does on a rank that computes alone, whose report differs from its last one in what this call computed.

        `touched_key`: of the report; None where no other rank stands by.
        """
        if compiled_graphs() != self._num_graphs:
            stats.compiled = True
            planner.coarsen()
        seconds = self._clock.take()
        stats.other_s += seconds["other"]
        changed: dict[str, Any] = {
            "weighted": sums.weighted,
            "units": float(sums.units),
            "loss_sum": float(sums.loss_sum),
            "stop_requested": stop_requested(),
            "seconds": as_compiling(seconds) if stats.compiled else seconds,
            "metrics": {name: float(value) for name, value in sums.metrics.items()} if sums.metrics else {},
        }
        if touched_key is None:
            self.own = self.own.again(**changed)
            return self.own
        changed["touched_key"], changed["has_decision"] = touched_key, False
        changed["elapsed_s"] = time.monotonic() - self._started_s
        changed["delay_s"] = 0.0 if self._delay is None else self._delay.take_s() * _part_in_step(seconds)
        before, self.own = self.own, self.own.again(**changed)
        own = self.own
        row = own[0].row() if own.names or before.names else _changed_row(self._row, changed, own.own_seconds)
        self._row, self._metric_names[stats.calls] = row, tuple(changed["metrics"])
        self._clock.switch("wait")
        if self._control.push_row(Operation.BACKWARD, row):
            table = self._with_first_row(row)
            return self._last.later(table, row) or read_table(table, own.names)
        self._last = read_table(self._control.exchange_table(Operation.BACKWARD, row), own.names)
        return self._last

    def _with_first_row(self, row: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the rows of all ranks where rank 0 has pushed its row: the others stand by, as in the last exchange."""
        table = self._last.table.copy()
        table[0] = row
        table[1:, SECONDS] = 0.0
        table[1:, WAIT] = table[0, SECONDS].sum()
        table[1:, COLUMNS["delay_s"]] = 0.0
        return table

    def idle_result(self, call_index: int) -> LocalResult:
        """Return the result of a rank that computes nothing, with the metrics that the others will have."""
        return LocalResult(status=AWAY, metrics=dict.fromkeys(self._metric_names.get(call_index, ()), 0.0))

    def _tunes(self, batch: GlobalBatch, rank: int) -> bool:
        """Return whether cuDNN tried its kernels in this attempt (`cudnn.benchmark`): it does for each new size."""
        if not torch.backends.cudnn.benchmark:
            return False
        new = {max(row[rank], 1) for row in batch.plan.micro} - self._tuned_sizes
        self._tuned_sizes |= new
        return bool(new)

    def _report(
        self, result: LocalResult, batch: GlobalBatch, planner: Planner, stats: StepStats, may_leave: bool
    ) -> RankReport:
        self._metric_names[stats.calls] = tuple(result.metrics)
        seconds, times_of = result.seconds, OWN_TIMES
        if seconds is None:
            if compiled_graphs() != self._num_graphs or (self._is_cuda and self._tunes(batch, planner.rank)):
                stats.compiled = True
            if stats.compiled:
                planner.coarsen()
            # A rank that failed does not know how the others report their times: as before, most likely.
            failed = result.status not in (OK, LATE_GRADIENT, AWAY)
            if result.times_late or (failed and self.late_times.waiting):
                times = self._clock.cut()
                stats.other_s += times.other_s
                seconds, times_of = self.late_times.add(batch, planner, stats, times, compiled=stats.compiled)
            else:
                if self.late_times.waiting:
                    self.late_times.clear()
                seconds = self._clock.take()
                stats.other_s += seconds["other"]
                if stats.compiled:
                    seconds = as_compiling(seconds)
        elapsed_s = time.monotonic() - self._started_s
        if result.memory_bytes is None and elapsed_s - self._memory_read_s >= _READ_MEMORY_EVERY_S:
            self._memory_bytes, self._memory_read_s = float(memory_bytes(self._device)), elapsed_s
        return RankReport(
            status=result.status,
            weighted=result.weighted,
            units=result.units,
            loss_sum=result.loss_sum,
            touched_key=result.touched_key,
            has_decision=planner.has_decision,
            elapsed_s=elapsed_s,
            memory_bytes=self._memory_bytes if result.memory_bytes is None else float(result.memory_bytes),
            state_key=self._consistency.key(),
            reading=batch.reading.code(),
            stop_requested=stop_requested(),
            may_leave=may_leave,
            has_zero=result.has_zero,
            seconds=seconds,
            metrics=result.metrics,
            squared_norm=result.squared_norm,
            touched=result.touched,
            membership=0.0 if self.recovery is None else float(self.recovery.newest_number),
            times_of=times_of,
            delay_s=0.0
            if self._delay is None or planner.world_size == 1
            else self._delay.take_s() * _part_in_step(seconds),
        )


def _part_in_step(seconds: Mapping[Segment, float]) -> float:
    """Return the part of the time that was neither reading nor outside of steps."""
    whole_s = sum(seconds.values())
    return 1 - (seconds["data"] + seconds["other"]) / whole_s if whole_s else 0.0


def _changed_row(row: Sequence[float], changed: Mapping[str, Any], seconds: Sequence[float]) -> list[float]:
    """Return a row without metrics in which some fields are others."""
    later = list(row)
    for name, value in changed.items():
        if name in COLUMNS:
            later[COLUMNS[name]] = float(value)
    later[SECONDS] = seconds
    return later


def check_trained(reports: Reports, step: int) -> None:
    """Raise DesyncError if ranks, of unlike `touched_key`, train different parameters: no bucket can be waited for."""
    trained = {rank: int(key) >> 32 for rank, key in enumerate(reports.column("touched_key")) if key}
    if len(set(trained.values())) > 1:
        first = next(iter(trained))
        other = ", ".join(str(rank) for rank, key in trained.items() if key != trained[first])
        raise DesyncError(
            f"the ranks train different parameters in step {step}: rank {other} differs from rank {first} (in names, shapes or "
            "dtypes); freeze and unfreeze the same parameters on all ranks"
        )


def totals_of(reports: Reports, step: int, num_touched_words: int = 0) -> GlobalTotals:
    """Add up the reports of a successful attempt; `num_touched_words` is the length of `RankReport.touched`.

    Raises:
        StepError: some ranks weight their losses and others do not, or all weights are 0.
    """
    units, loss_sum, same_touched, has_zero = reports.sums()
    mean_loss = mean(loss_sum, units, step)
    touched = None if same_touched else reports.touched(num_touched_words)
    return GlobalTotals(units, mean_loss, same_touched, has_zero, touched)


def mean(loss_sum: float, units: float, step: int) -> float:
    """Return the mean loss; StepError if all weights are 0."""
    if units <= 0:
        raise StepError(ALL_ZERO.format(step=step))
    return loss_sum / units


def where(flags: Sequence[bool]) -> str:
    """Return the ranks whose flag is set, as text."""
    return ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)
