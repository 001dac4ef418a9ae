"""The records of a run: frozen values that read back the same as they were written."""

from __future__ import annotations

import time as _time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank in one step by segment, and its peak memory.

    ``wait_s`` is the part of the reduction after the rank's own backward, ``comm_s`` the collectives inside forward and
    backward, ``other_s`` everything outside training (evaluation, checkpoints).
    """

    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    comm_s: float = 0.0
    optimizer_s: float = 0.0
    compile_s: float = 0.0
    other_s: float = 0.0
    memory_bytes: int = 0

    @property
    def busy_s(self) -> float:
        return self.compute_s + self.optimizer_s + self.data_s + self.compile_s


SEGMENTS = ("data_s", "compute_s", "wait_s", "comm_s", "optimizer_s", "compile_s", "other_s")
"""The fields of RankTimes in seconds, in display order."""


class RankColumns(Sequence[RankTimes]):
    """The times of many ranks by column, in microseconds, without an object for each rank."""

    def __init__(self, columns_us: Sequence[Sequence[int]], memory_bytes: Sequence[int]) -> None:
        """`columns_us`: a column for each of `SEGMENTS`."""
        self.columns_us = columns_us
        self.memory_bytes = memory_bytes

    def __len__(self) -> int:
        return len(self.memory_bytes)

    @overload
    def __getitem__(self, index: int) -> RankTimes: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RankTimes, ...]: ...
    def __getitem__(self, index: int | slice) -> RankTimes | tuple[RankTimes, ...]:
        if isinstance(index, slice):
            return tuple(self[rank] for rank in range(len(self))[index])
        row: list[Any] = [*(column[index] / 1e6 for column in self.columns_us), self.memory_bytes[index]]
        return RankTimes(*row)


@dataclass(frozen=True)
class RankSpread:
    """The times of all ranks in one step, summed up: what each record holds of more than 128 ranks."""

    num_ranks: int
    shares: tuple[int, int]
    """The smallest and the largest."""
    least_busy_s: float
    mean: RankTimes
    most: RankTimes
    """The most seconds of any rank in each segment, and the most memory."""
    busiest: tuple[int, RankTimes]
    """The rank with the most busy seconds, and its times."""
    waits_least: tuple[int, RankTimes]
    """The rank that spends the least time in collectives, and its times."""
    first: RankTimes
    """Rank 0."""


@dataclass(frozen=True)
class StepRecord:
    """One committed step, as recorded by rank 0.

    Of more than 128 ranks it holds `spread`, and `shares` and `ranks` are empty but in every tenth step and where shares change.
    """

    step: int
    """Global index of the step, counted over all epochs and sessions."""
    epoch: int
    epoch_step: int
    """Index of the step within its epoch."""
    num_samples: int
    """Samples of the global batch."""
    loss: float
    """Weighted mean over the global batch; may be NaN or infinite."""
    shares: tuple[int, ...]
    """Samples of each rank; their sum is ``num_samples``."""
    num_micro: int
    """K, the number of micro-batches."""
    seconds: float
    """Wall seconds of the whole step, without the ranks' ``other_s``."""
    ranks: Sequence[RankTimes]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further scalars of the step, from `loss_fn` and `run.log`."""
    arm: str = ""
    time: float = field(default_factory=_time.time)
    spread: RankSpread | None = None
    """None of up to 128 ranks, all of which are in `ranks`."""

    @property
    def num_ranks(self) -> int:
        return len(self.ranks) if self.spread is None else self.spread.num_ranks

    @property
    def first_other_s(self) -> float:
        """Seconds of rank 0 outside training, which `seconds` does not contain."""
        first = self.spread.first if self.spread is not None else self.ranks[0] if self.ranks else RankTimes()
        return first.other_s


class OwnStep(NamedTuple):
    """A step of a rank alone, with one micro-batch: what its `StepRecord` holds, made in a fifth of the time."""

    step: int
    epoch: int
    epoch_step: int
    num_samples: int
    loss: float
    seconds: float
    """Of the whole step, as in `StepRecord`."""
    times: tuple[float, ...]
    """Seconds of each of `SEGMENTS`."""
    memory_bytes: int
    metrics: Mapping[str, float]
    time: float

    def record(self) -> StepRecord:
        times: list[Any] = [*self.times, self.memory_bytes]
        return StepRecord(
            *self[:5],
            shares=(self.num_samples,),
            num_micro=1,
            seconds=self.seconds,
            ranks=(RankTimes(*times),),
            metrics=self.metrics,
            time=self.time,
        )


@dataclass(frozen=True)
class RunEvent:
    """One occurrence or decision, with its reason as a sentence."""

    kind: str
    message: str
    """For people; empty for events that are not printed."""
    time: float = field(default_factory=_time.time)
    """Seconds since 1970."""
    step: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LateMetrics:
    """Metrics from `run.log` for a step whose record was already written."""

    step: int
    metrics: Mapping[str, float]
    time: float = field(default_factory=_time.time)
    media: Mapping[str, str] = field(default_factory=dict)
    """Images, texts, histograms and tables: files in the run folder (media.py)."""


Record = StepRecord | RunEvent | LateMetrics
