"""What a run writes down: frozen, plain, the same when read back."""

from __future__ import annotations

import time as _time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RankTimes:
    """Where one rank's seconds went in one step, and the most memory it held.

    The segments are those of the step clock: ``wait_s`` is the rest of the reduction after the own backward,
    ``comm_s`` the collectives inside forward and backward, ``other_s`` what is no training at all (evaluation,
    checkpoints).
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
        """The rank's own seconds: compute + optimizer + data + compile."""
        return self.compute_s + self.optimizer_s + self.data_s + self.compile_s


SEGMENTS = ("data_s", "compute_s", "wait_s", "comm_s", "optimizer_s", "compile_s", "other_s")
"""The fields of RankTimes that are seconds, in the order in which views show them."""


@dataclass(frozen=True)
class StepRecord:
    """One committed step, as rank 0 knows it."""

    step: int
    """Global index of the step, counted over all epochs and sittings."""
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
    """Wall seconds of the whole step, without what is no training (the ranks' ``other_s``)."""
    ranks: tuple[RankTimes, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further scalars of the step: those of `loss_fn`, and what `run.log` gave for it."""
    arm: str = ""
    """Which of several alternating arms the step belongs to; empty in a normal run."""
    time: float = field(default_factory=_time.time)
    """When it was committed, in seconds since 1970."""


@dataclass(frozen=True)
class Event:
    """One thing that happened or was decided, with its reason as a sentence."""

    kind: str
    message: str
    """For people; empty where there is nothing to say aloud."""
    time: float = field(default_factory=_time.time)
    """Seconds since 1970."""
    step: int | None = None
    """Global index of the step it belongs to, where there is one."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The same as plain values, for programs."""


@dataclass(frozen=True)
class Logged:
    """Metrics that `run.log` gave for a step whose record was already written."""

    step: int
    metrics: Mapping[str, float]
    time: float = field(default_factory=_time.time)


Record = StepRecord | Event | Logged
