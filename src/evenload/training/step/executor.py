"""`Executor`: computes one attempt of a backward. `RankExecutor` does it for one rank among others."""

from __future__ import annotations

import resource
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from evenload.errors import StepError
from evenload.job import stop_requested
from evenload.training.comm.clock import StepClock
from evenload.training.comm.control import Control, Operation
from evenload.training.compute import batchnorm, randomness
from evenload.training.compute.micro_steps import LossFn, LossSums, StepContext, run_micro_steps
from evenload.training.compute.out_of_memory import is_out_of_memory
from evenload.training.compute.weighting import ignores_labels
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.launch.throttle import ComputeThrottle
from evenload.training.parallel.strategy import Strategy
from evenload.training.step.consistency import Consistency
from evenload.training.step.planner import Planner
from evenload.training.step.report import LATE_GRADIENT, OK, OUT_OF_MEMORY, RankReport, read_rows
from evenload.training.step.stats import StepStats


@dataclass(frozen=True)
class BackwardAttempt:
    batch: GlobalBatch
    planner: Planner
    stats: StepStats
    loss_fn: LossFn
    last_units: float | None
    """N of the same call in the last step, if there was one."""


@dataclass(frozen=True)
class AttemptResult:
    """Reports of all who share the step; the same on all ranks."""

    reports: list[RankReport]
    nominal: float
    """Divisor of the backwards."""
    dtype: torch.dtype


class Executor(Protocol):
    """Computes an attempt: this rank among others, or the replicas of this process (threaded_executor.py)."""

    def attach(self, models: Sequence[nn.Module]) -> None:
        """Take the models of the job."""

    @property
    def num_ranks(self) -> int:
        """Number of processes that take part."""

    def attempt(self, attempt: BackwardAttempt) -> AttemptResult:
        """Compute the global batch, everyone its part, and return all reports."""


class LabelWatch:
    """Warns once if labels are ignored but loss_fn returns no weight; checks the first micro-batches only."""

    def __init__(self) -> None:
        self._left = 3
        self._lock = threading.Lock()

    def check(self, data: Any) -> None:
        """Check the data of a micro-batch whose loss came without weight."""
        if not self._left:
            return
        with self._lock:  # replicas check concurrently
            if not self._left:
                return
            self._left -= 1
            if not ignores_labels(data):
                return
            self._left = 0
        warnings.warn(
            "the batch's labels contain -100, but loss_fn returned no weight, so its mean over tokens is not the global "
            "batch's. Return (loss, evenload.count_tokens(batch['labels'])) instead",
            stacklevel=2,
        )


class RankExecutor:
    """Computes one rank's part of the batch and exchanges one row of numbers with the other ranks."""

    def __init__(
        self,
        context: StepContext,
        strategy: Strategy,
        control: Control,
        clock: StepClock,
        throttle: ComputeThrottle,
        consistency: Consistency,
    ) -> None:
        self._context = context
        self._strategy = strategy
        self._control = control
        self._clock = clock
        self._throttle = throttle
        self._consistency = consistency
        self._started = time.monotonic()
        self._has_statistics = False

    def attach(self, models: Sequence[nn.Module]) -> None:
        self._has_statistics = any(batchnorm.has_global_statistics(model) for model in models)
        self._context = replace(self._context, other_gpus=randomness.other_gpus(models, self._context.device))

    @property
    def num_ranks(self) -> int:
        return self._context.statistics.world_size

    def attempt(self, attempt: BackwardAttempt) -> AttemptResult:
        """Compute this rank's part and exchange reports; a failure of a device becomes a status that all ranks receive."""
        if self._exchanges_in_forward:
            # A rank that does something else would leave the others inside a collective of the forward.
            with self._clock.segment("wait"):
                self._control.exchange(Operation.BEGIN)
        sums = LossSums()
        status = self._compute(attempt, sums)
        return AttemptResult(self._exchange(attempt, sums, status), sums.nominal, sums.dtype)

    @property
    def _exchanges_in_forward(self) -> bool:
        return self._has_statistics and self._context.statistics.world_size > 1

    def _compute(self, attempt: BackwardAttempt, sums: LossSums) -> int:
        graphs = compiled_graphs()
        started_s = time.perf_counter()
        stats = attempt.stats
        try:
            run_micro_steps(self._context, attempt.batch, attempt.loss_fn, stats.calls, attempt.last_units, sums)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self._exchanges_in_forward:
                raise StepError(
                    f"rank {self._context.rank} ran out of memory in a model whose BatchNorm takes its statistics over all "
                    "ranks, so one rank alone can't repeat the step; set --micro-batch (or "
                    "init(micro_batch=...)) lower"
                ) from error
            return OUT_OF_MEMORY
        slow_down(self._throttle, self._context.device, started_s)
        if compiled_graphs() != graphs:
            stats.compiled = True
        return LATE_GRADIENT if self._strategy.report()[1] else OK

    def _exchange(self, attempt: BackwardAttempt, sums: LossSums, status: int) -> list[RankReport]:
        grad_norms = self._context.grad_norms
        seconds = dict(self._clock.take())
        if attempt.stats.compiled:
            attempt.planner.coarsen()
            seconds["compile"], seconds["compute"] = seconds["compile"] + seconds["compute"], 0.0
        own = RankReport(
            status=status,
            weighted=sums.weighted,
            units=sums.units,
            loss_sum=float(sums.loss_sum),
            touched_key=self._strategy.report()[0],
            has_decision=attempt.planner.has_decision,
            elapsed_s=time.monotonic() - self._started,
            memory_bytes=float(memory_bytes(self._context.device)),
            state_key=self._consistency.key(),
            reading=attempt.batch.reading.code(),
            stop_requested=stop_requested(),
            seconds=seconds,
            metrics={name: float(value) for name, value in sums.metrics.items()} if status == OK else {},
            squared_norm=grad_norms.own() if grad_norms is not None and grad_norms.on else None,
        )
        self._clock.switch("wait")
        rows = self._control.exchange(Operation.BACKWARD, own.row())
        return read_rows(rows, sorted(own.metrics), measured=own.squared_norm is not None)


def slow_down(throttle: ComputeThrottle, device: torch.device, since_s: float) -> None:
    """Compute on, if this rank is throttled, for what it computed since `since_s` (`time.perf_counter`)."""
    if not throttle.active:
        return
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # queued kernels have not taken their time yet
    throttle.slow_down(time.perf_counter() - since_s)


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has made so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
