"""`StepStats`: a step, summed over its backwards."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenload.balance.noise import Norms
from evenload.balance.values import StepPlan
from evenload.records.values import RankColumns, RankSpread, RankTimes
from evenload.training.comm.clock import SEGMENTS
from evenload.training.compute.device_sums import UnreadTotals
from evenload.training.compute.grad_norms import UnreadNorms
from evenload.training.data.tuning import ReadSettings, StepCost, decode_settings
from evenload.training.step.report import OwnReport, Reports

_DATA, _COMPUTE, _WAIT, _COMM, _OPTIMIZER, _COMPILE = map(
    SEGMENTS.index, ("data", "compute", "wait", "comm", "optimizer", "compile")
)
_IN_STEP_OF = itemgetter(_COMPUTE, _OPTIMIZER, _WAIT, _COMM)
_NO_SECONDS = np.empty((0, len(SEGMENTS)))


@functools.lru_cache(maxsize=64)
def _same_settings(code: float, num_ranks: int) -> tuple[ReadSettings, ...]:
    return (decode_settings(code),) * num_ranks


class StepStats:
    """One step so far: its backwards, loss, metrics, and the times of each rank."""

    # What most steps leave as it is lies in the class: a step of a millisecond has no time to set it.
    calls = 0
    loss = math.nan
    unread: UnreadTotals | None = None
    """Totals of the last backward, until the host has read them (totals_reader.py)."""
    skipped = False
    norms: Norms | None = None
    """Norms of the first backward's gradients, in a step that is measured for `batch_max`."""
    unread_norms: UnreadNorms | None = None
    """The same, until the host has read them."""
    plan: StepPlan | None = None
    """The plan that was carried out, and the global index of the step; set when the step ends."""
    global_step = 0
    earlier: StepStats | None = None
    """The step whose times came with this one's reports (late_times.py), if they were not this one's."""
    is_timed = False
    """True if its own reports brought its times."""
    other_s = 0.0
    """Seconds outside of steps (evaluation, checkpoints) that this rank spent since the last backward of the step before."""
    sync_s = 0.0
    """Seconds before the step in which islands synchronised."""
    is_first = False
    """True in the first step of a session, whose times are not usual."""
    redone = False
    compiled = False
    stop_requested = False
    """True if a rank had received a request to stop before one of the backwards; the same on all ranks."""
    agreed_membership = 0
    """Number of the newest membership that all ranks had received; the same on all ranks."""
    _reports: Reports | None = None
    _seconds = _NO_SECONDS
    _delays_s: NDArray[np.float64] | None = None
    """Seconds in which each rank waited for a CPU that others had."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.begun_s = time.perf_counter()
        self.body_since_s = self.begun_s
        """Time at which the user's code continued after the last backward."""
        self._untaken: list[Reports] = []
        """Reports of backwards whose seconds `_seconds` does not contain yet."""

    @property
    def metrics_now(self) -> Mapping[str, float | torch.Tensor]:
        """The metrics, on the device as long as the host has not read them."""
        return self.metrics if self.unread is None else {**self.metrics, **self.unread.metrics}

    def add(self, reports: Reports, earlier: StepStats | None = None) -> None:
        """Add the reports of a backward; their times are those of the step `earlier`, if that is given."""
        self._reports, agreed = reports, reports.agreed
        if (delays_s := reports.delays_s) is not None:
            before_s = self._delays_s
            self._delays_s = delays_s if before_s is None or len(before_s) != len(delays_s) else before_s + delays_s
        if earlier is not None:
            self.earlier, earlier.earlier = earlier, None
            earlier._untaken.append(reports)
        elif agreed.has_times:
            self.is_timed = True
            self._untaken.append(reports)
        self.stop_requested = self.stop_requested or agreed.stop_requested
        self.agreed_membership = agreed.membership

    @property
    def _times(self) -> NDArray[np.float64]:
        """Seconds of each rank in each segment."""
        for reports in self._untaken:
            # A process whose replicas failed reported one row for all.
            seconds, known = reports.seconds, self._seconds
            self._seconds = seconds + known if len(known) == len(seconds) else seconds
        self._untaken.clear()
        return self._seconds

    @property
    def timed(self) -> StepStats | None:
        """The newest step whose times all ranks know: this one, or on GPUs an earlier one; None in the first steps there."""
        return self if self.is_timed else self.earlier

    def miss(self, loss: float, world_size: int) -> None:
        """Count a backward that other ranks have the gradients of, and this rank has not."""
        self.calls += 1
        self.loss, self.skipped, self.redone = loss, True, True
        self._reports, self._seconds, self.is_timed = None, np.zeros((world_size, len(SEGMENTS))), True
        self._untaken.clear()

    def own_seconds(self) -> list[float]:
        """Return the seconds that each rank computed, without waiting."""
        times = self._times
        own_s: list[float] = (times[:, _COMPUTE] + times[:, _OPTIMIZER]).tolist()
        return own_s

    def costs(self) -> tuple[list[float], bool, float, float]:
        """Return what `Planner.observe` takes."""
        return self.own_seconds(), self.unusual, self.whole_seconds(), self.delay_s

    @property
    def delay_s(self) -> float:
        """Seconds by which the ranks computed longer because other programs had their CPUs.

        Not the longest delay: a rank that a quota holds waits for a CPU too, and the others take as long as they need.
        """
        times, delays_s = self._times, self._delays_s
        if delays_s is None or len(delays_s) != len(times) or not delays_s.any():
            return 0.0
        own_s = times[:, _COMPUTE] + times[:, _OPTIMIZER]
        return float(max(0.0, own_s.max() - (own_s - delays_s).max()))

    def whole_seconds(self) -> float:
        """Return the seconds of the step on the first rank, with waiting and collectives, without waiting for samples."""
        times = self._times
        return sum(_IN_STEP_OF(times[0].tolist())) if len(times) else 0.0

    def cost(self, num_samples: int) -> StepCost:
        """Return the cost of the step for the loader's tuning."""
        return StepCost(
            seconds=sum(seconds for name, seconds in self._first().items() if name != "other"),
            num_samples=num_samples,
            data_s=self._times[:, _DATA].tolist(),
            busy_s=self.own_seconds(),
            readings=self.readings(),
        )

    def readings(self) -> tuple[ReadSettings, ...]:
        reports = self._reports
        if reports is None:
            return ()
        if reports.is_same("reading"):
            return _same_settings(reports.first("reading"), len(reports))
        return tuple([decode_settings(code) for code in reports.column("reading")])

    @property
    def unusual(self) -> bool:
        """True if the times are not those of a usual step: it is the first, was repeated, or a rank compiled."""
        times = self._times
        return self.is_first or self.redone or not len(times) or bool(times[:, _COMPILE].any())

    @property
    def is_usual(self) -> bool:
        """True if the times of the step, or those of `timed`, are typical; see `unusual`."""
        if self.is_first or self.redone or self.compiled:
            return False
        return (timed := self.timed) is None or not timed.unusual

    def rank_times(self) -> tuple[RankTimes, ...]:
        """Return what is known of each rank when the step is recorded; see `_known_times`."""
        reports = self._reports
        if isinstance(reports, OwnReport) and self._untaken == [reports] and not len(self._seconds):
            own: list[Any] = [*reports.own_seconds, int(reports.most("memory_bytes"))]
            return (RankTimes(*own),)
        times = self._known_times()
        memory = reports.column("memory_bytes") if reports is not None else [0.0] * len(times)
        table: list[list[Any]] = times.tolist()
        # The segments have the same order in the records.
        return tuple([RankTimes(*(*times, int(held))) for times, held in zip(table, memory, strict=True)])

    @property
    def num_ranks(self) -> int:
        return len(self._times) if (reports := self._reports) is None else len(reports)

    @property
    def most_memory_bytes(self) -> int:
        """Peak memory of the rank that uses most."""
        return 0 if self._reports is None else int(self._reports.most("memory_bytes"))

    def columns(self) -> RankColumns:
        """Return what `rank_times` does, in columns."""
        times, memory = self._known_times().T, self._memory_bytes()
        return RankColumns(np.rint(1e6 * times).astype(int).tolist(), memory.astype(int).tolist())

    def spread(self, shares: tuple[int, int]) -> RankSpread:
        """Return the times of all ranks, summed up; `shares` are the smallest and the largest."""
        columns, memory = self._known_times().T, self._memory_bytes()  # a contiguous row for each segment
        num_ranks = len(memory)
        busy_s = columns[_DATA] + columns[_COMPUTE]
        busy_s += columns[_OPTIMIZER]
        busy_s += columns[_COMPILE]
        busiest, waits_least = int(busy_s.argmax()), int((columns[_WAIT] + columns[_COMM]).argmin())
        mean, most = np.add.reduce(columns, axis=1) / num_ranks, np.maximum.reduce(columns, axis=1)
        rows: list[list[Any]] = [
            [*mean.tolist(), int(np.add.reduce(memory) / num_ranks)],
            [*most.tolist(), self.most_memory_bytes],
            *[[*columns[:, rank].tolist(), int(memory.item(rank))] for rank in (busiest, waits_least, 0)],
        ]
        times = [RankTimes(*row) for row in rows]
        return RankSpread(
            num_ranks=num_ranks,
            shares=shares,
            least_busy_s=busy_s.item(busy_s.argmin()),
            mean=times[0],
            most=times[1],
            busiest=(busiest, times[2]),
            waits_least=(waits_least, times[3]),
            first=times[4],
        )

    def _known_times(self) -> NDArray[np.float64]:
        """Return the seconds that are known when the step is recorded: on GPUs those of an earlier step, at first zeros."""
        times = self._times if self.earlier is None or len(self._times) else self.earlier._times
        num_ranks = len(times) if self._reports is None else len(self._reports)
        return times if len(times) == num_ranks else np.zeros((num_ranks, len(SEGMENTS)))

    def _memory_bytes(self) -> NDArray[np.float64]:
        return np.zeros(self.num_ranks) if self._reports is None else self._reports.values("memory_bytes")

    def _first(self) -> dict[str, float]:
        return dict(zip(SEGMENTS, self._times[0].tolist(), strict=True))
