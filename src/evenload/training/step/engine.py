"""Run `step.backward`: attempts until one succeeds on all ranks.

    begin -> the executor computes each micro-batch (loss_fn, backward) and exchanges reports -> finish the reduction

All ranks repeat an attempt when memory ran out somewhere (with smaller micro-batches) or a gradient came after its bucket
had left. Buffers, randomness and gradients are restored first. See executor.py and threaded_executor.py for the executors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from evenload.errors import DesyncError, DivergenceError, NonFiniteError, StepError
from evenload.training.comm.clock import StepClock
from evenload.training.comm.control import Control
from evenload.training.compute import batchnorm, randomness
from evenload.training.compute.buffers import BufferGuard
from evenload.training.compute.grad_norms import MEASURE_EVERY, GradNorms
from evenload.training.compute.micro_steps import LossFn, StepContext
from evenload.training.compute.precision import Precision
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.launch.throttle import ComputeThrottle
from evenload.training.parallel.strategy import Strategy
from evenload.training.step.consistency import Consistency
from evenload.training.step.executor import AttemptResult, BackwardAttempt, Executor, LabelWatch, RankExecutor
from evenload.training.step.planner import Planner
from evenload.training.step.report import LATE_GRADIENT, OK, OUT_OF_MEMORY, RankReport
from evenload.training.step.stats import StepRecorder, StepStats

MAX_SKIPPED_STEPS = 3
"""Steps in a row that may be skipped for a non-finite gradient that no loss scale explains."""
MAX_ATTEMPTS = 40


class Engine:
    """Runs the backwards of one job on this rank; knows nothing of loops and epochs."""

    def __init__(
        self,
        *,
        rank: int,
        device: torch.device,
        seed: int,
        control: Control,
        strategy: Strategy,
        statistics: batchnorm.Statistics,
        precision: Precision,
        clock: StepClock,
        recorder: StepRecorder,
        throttle: ComputeThrottle,
        check_every: int = 0,
        executor: Executor | None = None,
        grad_norms: GradNorms | None = None,
    ) -> None:
        self.device = device
        self.control = control
        self.strategy = strategy
        self.statistics = statistics
        self.precision = precision
        self.clock = clock
        self.recorder = recorder
        self.throttle = throttle
        self.models: list[nn.Module] = []
        self.elapsed_s = 0.0
        """Seconds since the start of the run on rank 0's clock, as of the last exchange: equal on all ranks."""
        self.context = StepContext(
            rank, device, seed, strategy, statistics, precision, LabelWatch().check, grad_norms=grad_norms
        )
        self.consistency = Consistency(check_every, control, recorder.event)
        self._executor = executor or RankExecutor(self.context, strategy, control, clock, throttle, self.consistency)
        self._buffers = BufferGuard()
        self._units: dict[int, float] = {}
        self._skipped: dict[int, int] = {}

    def attach(self, models: Sequence[nn.Module]) -> None:
        self.models = list(models)
        has_statistics = any(batchnorm.has_global_statistics(model) for model in models)
        self.statistics.in_use = has_statistics and self.statistics.world_size > 1
        self.context = replace(self.context, other_gpus=randomness.other_gpus(models, self.device))
        self._executor.attach(models)
        self._buffers = BufferGuard(models)
        self.consistency.attach(models)

    def state_dict(self) -> tuple[Mapping[int, float], Mapping[int, Any]]:
        """Return what earlier steps left for the next, equal on all ranks: N of each call, and the strategy's state."""
        return dict(self._units), self.strategy.state_dict()

    def load_state_dict(self, state: tuple[Mapping[int, float], Mapping[int, Any]]) -> None:
        """Restore what `state_dict` returned, after steps of each rank alone."""
        self._units = dict(state[0])
        self.strategy.load_state_dict(state[1])

    def backward(
        self, batch: GlobalBatch, planner: Planner, stats: StepStats, loss_fn: LossFn, *, stepped: bool = False
    ) -> torch.Tensor:
        """Run one backward of a step; see `Step.backward`. `stepped`: an optimizer stepped since the last one."""
        if not self.models:
            raise StepError(
                "step.backward was called before run.prepare(model, ...): there is no model whose gradients it could sum"
            )
        if stats.calls == 0:
            self._check_leftovers()
        if stats.calls == 0 or stepped:
            self.strategy.clear_skip()
        self.clock.switch("compute")
        self.consistency.begin(batch.global_step, first_call=stats.calls == 0, world_size=self._executor.num_ranks)
        try:
            with randomness.set_aside(self.device, self.context.other_gpus), batchnorm.active(self.statistics):
                loss = self._attempts(batch, planner, stats, loss_fn)
        except BaseException:
            self.strategy.abort()
            raise
        finally:
            self.clock.switch("optimizer")
            self.statistics.idle = False
        stats.calls += 1
        stats.body_since_s = time.perf_counter()
        return loss

    def _attempts(self, batch: GlobalBatch, planner: Planner, stats: StepStats, loss_fn: LossFn) -> torch.Tensor:
        expect = True
        for _ in range(MAX_ATTEMPTS):
            self._buffers.save()
            self.strategy.begin(stats.calls, expect=expect)
            if self.context.grad_norms is not None:
                # Only the first of several backwards is measured.
                self.context.grad_norms.begin(stats.calls == 0 and batch.global_step % MEASURE_EVERY == 0)
            result = self._executor.attempt(
                BackwardAttempt(batch, planner, stats, loss_fn, self._units.get(stats.calls))
            )
            reports = result.reports
            self._receive(batch, planner, stats, reports)
            if all(report.status == OK for report in reports):
                self._buffers.forget()
                return self._finish(batch, stats, result)
            self._rollback(batch, planner, stats, reports)
            expect = expect and not any(report.status == LATE_GRADIENT for report in reports)
        raise StepError(f"step {batch.global_step} still failed after {MAX_ATTEMPTS} attempts")

    def _receive(self, batch: GlobalBatch, planner: Planner, stats: StepStats, reports: Sequence[RankReport]) -> None:
        stats.add(reports)
        self.elapsed_s = reports[0].elapsed_s
        if reports[0].has_decision:
            planner.sync_decision(batch.global_step)
        try:
            self.consistency.check(batch.global_step, [report.state_key for report in reports])
        except DivergenceError:
            self.strategy.rollback()
            raise

    def _rollback(self, batch: GlobalBatch, planner: Planner, stats: StepStats, reports: Sequence[RankReport]) -> None:
        # All ranks do the same here.
        self.strategy.rollback()
        self._buffers.restore()
        stats.redone = True
        failed = [report.status == OUT_OF_MEMORY for report in reports]
        if len(failed) < planner.world_size:  # this rank runs alone, in a measurement
            failed = [failed[0] and rank == self.context.rank for rank in range(planner.world_size)]
        if any(failed):
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.empty_cache()
            before = batch.plan.num_micro
            batch.replan(planner.lower_caps(batch.plan, failed))
            ranks = ", ".join(str(rank) for rank, out in enumerate(failed) if out)
            self.recorder.event(
                "memory",
                f"rank {ranks} ran out of memory in step {batch.global_step}: micro-batches {before} → "
                f"{batch.plan.num_micro}; the step is repeated",
                step=batch.global_step,
                num_micro=batch.plan.num_micro,
            )
        self.clock.switch("compute")

    def _finish(self, batch: GlobalBatch, stats: StepStats, result: AttemptResult) -> torch.Tensor:
        reports = result.reports
        num_trainable = [int(report.touched_key) >> 32 for report in reports]
        if len(set(num_trainable)) > 1:
            raise DesyncError(
                f"the ranks train different numbers of parameters in step {batch.global_step}: {num_trainable}; freeze and "
                "unfreeze the same parameters on all ranks"
            )
        weighted = [report.weighted for report in reports]
        if any(weighted) and not all(weighted):
            self.strategy.rollback()
            raise StepError(f"loss_fn returned a weight on ranks {_where(weighted)} only; return one always or never")
        units = _total(report.units for report in reports)
        if units <= 0:
            self.strategy.rollback()
            raise StepError(
                f"step {batch.global_step}: all weights are 0, so the mean loss over the global batch is undefined; are all "
                "labels -100?"
            )
        self.strategy.resolve(len({report.touched_key for report in reports}) == 1)
        finite = self.strategy.finish(result.nominal / (units * self.precision.scale))
        if finite and (grad_norms := self.context.grad_norms) is not None and grad_norms.on:
            stats.norms = grad_norms.norms(
                [report.units for report in reports],
                [report.squared_norm or 0.0 for report in reports],
                batch.num_samples,
                result.nominal / self.precision.scale,
            )
        self._units[stats.calls] = units
        loss = _total(report.loss_sum for report in reports) / units
        stats.loss = loss
        for name in reports[0].metrics:
            stats.metrics[name] = _total(report.metrics[name] for report in reports) / units
        self.precision.update(finite)
        if finite and math.isfinite(loss):
            self._skipped[stats.calls] = 0
        else:
            self._skip(batch, stats, reports)
        return torch.tensor(loss, dtype=result.dtype)

    def _skip(self, batch: GlobalBatch, stats: StepStats, reports: Sequence[RankReport]) -> None:
        # No gradient is left, so a plain optimizer.step() changes nothing, on all ranks.
        self.strategy.clear()
        stats.skipped = True
        not_finite = [not math.isfinite(report.loss_sum) for report in reports]
        what = f"the loss of rank {_where(not_finite)}" if any(not_finite) else "the gradient"
        if not self.precision.scaled or self.precision.exhausted:
            self._skipped[stats.calls] = self._skipped.get(stats.calls, 0) + 1
        in_a_row = self._skipped.get(stats.calls, 0)
        scale = f"; the loss scale is now {self.precision.scale:g}" if self.precision.scaled else ""
        self.recorder.event(
            "skipped",
            f"step {batch.global_step} is skipped on all ranks: {what} is not finite{scale}",
            step=batch.global_step,
        )
        if in_a_row >= MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"{what} was NaN or infinite in {in_a_row} steps in a row, the last at step {batch.global_step}; look "
                "at the learning rate, at the data of these steps, and at log, sqrt or division in the loss"
            )

    def _check_leftovers(self) -> None:
        # With several models (a GAN) the gradients of one may wait for its own zero_grad; they add up as in one process.
        names = self.strategy.leftovers() if len(self.models) == 1 else []
        if names:
            raise StepError(
                f"gradients are already present before the step's first backward (of {len(names)} parameters, the first is "
                f"{names[0]}): they would add to this step's. Call optimizer.zero_grad() after optimizer.step(), at "
                "the end of the loop body"
            )


def _total(values: Iterable[float]) -> float:
    """Return the exact sum; where there is none (inf - inf, overflow), the sum of floats."""
    terms = list(values)
    try:
        return math.fsum(terms)
    except (ValueError, OverflowError):
        return sum(terms)


def _where(flags: Sequence[bool]) -> str:
    return ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)
