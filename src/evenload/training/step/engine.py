"""Runs `step.backward`: attempts until one is good on all ranks.

    begin -> the crew computes each micro-batch (loss_fn, backward) and exchanges reports -> finish the reduction

An attempt is done again, on all ranks alike, when memory ran out somewhere (with smaller micro-batches) or a gradient came
after its bucket had left. Buffers, randomness and gradients are put back before that. Who computes is a crew's matter: this
rank beside others (attempt.py), or the replicas of this process (replicas.py).
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
from evenload.training.compute.grad_norms import MEASURE_EVERY, Squares
from evenload.training.compute.micro_steps import LossFn, Surroundings
from evenload.training.compute.precision import Precision
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.launch.throttle import Burner
from evenload.training.parallel.strategy import Strategy
from evenload.training.step.consistency import Consistency
from evenload.training.step.executor import Attempt, Crew, LabelWatch, Outcome, RankCrew, pay
from evenload.training.step.planner import Planner
from evenload.training.step.report import LATE_GRADIENT, OK, OUT_OF_MEMORY, Report
from evenload.training.step.stats import Journal, Tally

MAX_SKIPPED_STEPS = 3
"""So many steps in a row may be skipped for a non-finite gradient that no loss scale explains."""
MAX_ATTEMPTS = 40


class Engine:
    """Does the backwards of one job on this rank; knows nothing of loops and epochs."""

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
        journal: Journal,
        burner: Burner,
        check_every: int = 0,
        crew: Crew | None = None,
        squares: Squares | None = None,
    ) -> None:
        self.device = device
        self.control = control
        self.strategy = strategy
        self.statistics = statistics
        self.precision = precision
        self.clock = clock
        self.journal = journal
        self.burner = burner
        self.models: list[nn.Module] = []
        self.elapsed_s = 0.0
        """Seconds since the start of the run on rank 0's clock, as of the last exchange: equal on all ranks."""
        self.around = Surroundings(
            rank, device, seed, strategy, statistics, precision, LabelWatch().look, squares=squares
        )
        self.consistency = Consistency(check_every, control, journal.event)
        self._crew = crew or RankCrew(self.around, strategy, control, clock, burner, self.consistency)
        self._buffers = BufferGuard()
        self._units: dict[int, float] = {}
        self._skipped: dict[int, int] = {}

    def attach(self, models: Sequence[nn.Module]) -> None:
        """Takes the models whose gradients are the job's."""
        self.models = list(models)
        has_statistics = any(batchnorm.has_global_statistics(model) for model in models)
        self.statistics.in_use = has_statistics and self.statistics.world_size > 1
        self.around = replace(self.around, other_gpus=randomness.other_gpus(models, self.device))
        self._crew.attach(models)
        self._buffers = BufferGuard(models)
        self.consistency.attach(models)

    def learnt(self) -> tuple[Mapping[int, float], Mapping[int, Any]]:
        """What earlier steps left for the next, equal on all ranks: N of each call, and what the strategy learnt."""
        return dict(self._units), self.strategy.learnt()

    def relearn(self, learnt: tuple[Mapping[int, float], Mapping[int, Any]]) -> None:
        """Puts back what `learnt` gave, after steps that ranks did alone."""
        self._units = dict(learnt[0])
        self.strategy.relearn(learnt[1])

    def backward(
        self, batch: GlobalBatch, planner: Planner, tally: Tally, loss_fn: LossFn, *, stepped: bool = False
    ) -> torch.Tensor:
        """One backward of a step; see `Step.backward`. `stepped`: an optimizer stepped since the last one."""
        if not self.models:
            raise StepError(
                "step.backward before run.prepare(model, ...): there is no model whose gradients it could sum"
            )
        if tally.calls == 0:
            self._check_leftovers()
        if tally.calls == 0 or stepped:
            self.strategy.forgive()
        self.clock.switch("compute")
        self.consistency.begin(batch.global_step, first_call=tally.calls == 0, world_size=self._crew.num_ranks)
        try:
            with randomness.set_aside(self.device, self.around.other_gpus), batchnorm.active(self.statistics):
                loss = self._attempts(batch, planner, tally, loss_fn)
        except BaseException:
            self.strategy.abandon()
            raise
        finally:
            self.clock.switch("optimizer")
            self.statistics.idle = False
        tally.calls += 1
        tally.body_since_s = time.perf_counter()
        return loss

    def pay(self, since_s: float) -> None:
        """Where this rank is slowed: computes on for what it computed since then, by `time.perf_counter`."""
        pay(self.burner, self.device, since_s)

    def _attempts(self, batch: GlobalBatch, planner: Planner, tally: Tally, loss_fn: LossFn) -> torch.Tensor:
        expect = True
        for _ in range(MAX_ATTEMPTS):
            self._buffers.save()
            self.strategy.begin(tally.calls, expect=expect)
            if self.around.squares is not None:
                # Of a step with several backwards, the first tells.
                self.around.squares.begin(tally.calls == 0 and batch.global_step % MEASURE_EVERY == 0)
            outcome = self._crew.attempt(Attempt(batch, planner, tally, loss_fn, self._units.get(tally.calls)))
            reports = outcome.reports
            self._hear(batch, planner, tally, reports)
            if all(report.status == OK for report in reports):
                self._buffers.forget()
                return self._finish(batch, tally, outcome)
            self._retreat(batch, planner, tally, reports)
            expect = expect and not any(report.status == LATE_GRADIENT for report in reports)
        raise StepError(f"step {batch.global_step} was not done after {MAX_ATTEMPTS} attempts")

    def _hear(self, batch: GlobalBatch, planner: Planner, tally: Tally, reports: Sequence[Report]) -> None:
        """What all told, whatever became of the attempt."""
        tally.add(reports)
        self.elapsed_s = reports[0].elapsed_s
        if reports[0].has_news:
            planner.hear(batch.global_step)
        try:
            self.consistency.check(batch.global_step, [report.state_key for report in reports])
        except DivergenceError:
            self.strategy.retreat()
            raise

    def _retreat(self, batch: GlobalBatch, planner: Planner, tally: Tally, reports: Sequence[Report]) -> None:
        """All ranks alike: everything as it was before the attempt, and a plan that fits."""
        self.strategy.retreat()
        self._buffers.restore()
        tally.redone = True
        failed = [report.status == OUT_OF_MEMORY for report in reports]
        if len(failed) < planner.world_size:  # this rank runs alone, in a window
            failed = [failed[0] and rank == self.around.rank for rank in range(planner.world_size)]
        if any(failed):
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.empty_cache()
            before = batch.plan.num_micro
            batch.replan(planner.lower_caps(batch.plan, failed))
            ranks = ", ".join(str(rank) for rank, out in enumerate(failed) if out)
            self.journal.event(
                "memory",
                f"rank {ranks} ran out of memory in step {batch.global_step}: micro-batches {before} → "
                f"{batch.plan.num_micro}; the step is done again",
                step=batch.global_step,
                num_micro=batch.plan.num_micro,
            )
        self.clock.switch("compute")

    def _finish(self, batch: GlobalBatch, tally: Tally, outcome: Outcome) -> torch.Tensor:
        reports = outcome.reports
        num_trainable = [int(report.touched_key) >> 32 for report in reports]
        if len(set(num_trainable)) > 1:
            raise DesyncError(
                f"the ranks train different numbers of parameters in step {batch.global_step}: {num_trainable}; freeze and "
                "unfreeze on all ranks alike"
            )
        weighted = [report.weighted for report in reports]
        if any(weighted) and not all(weighted):
            self.strategy.retreat()
            raise StepError(f"loss_fn returned a weight on ranks {_where(weighted)} only; return one always or never")
        units = _total(report.units for report in reports)
        if units <= 0:
            self.strategy.retreat()
            raise StepError(
                f"step {batch.global_step}: all weights are 0, so the mean loss over the global batch is undefined; are all "
                "labels -100?"
            )
        self.strategy.resolve(len({report.touched_key for report in reports}) == 1)
        finite = self.strategy.finish(outcome.nominal / (units * self.precision.scale))
        if finite and (squares := self.around.squares) is not None and squares.on:
            tally.norms = squares.norms(
                [report.units for report in reports],
                [report.square or 0.0 for report in reports],
                batch.num_samples,
                outcome.nominal / self.precision.scale,
            )
        self._units[tally.calls] = units
        loss = _total(report.loss_sum for report in reports) / units
        tally.loss = loss
        for name in reports[0].metrics:
            tally.metrics[name] = _total(report.metrics[name] for report in reports) / units
        self.precision.update(finite)
        if finite and math.isfinite(loss):
            self._skipped[tally.calls] = 0
        else:
            self._skip(batch, tally, reports)
        return torch.tensor(loss, dtype=outcome.dtype)

    def _skip(self, batch: GlobalBatch, tally: Tally, reports: Sequence[Report]) -> None:
        """None of its gradients is left, so a plain optimizer.step() changes nothing, on all ranks alike."""
        self.strategy.clear()
        tally.skipped = True
        culprits = [not math.isfinite(report.loss_sum) for report in reports]
        what = f"the loss of rank {_where(culprits)}" if any(culprits) else "the gradient"
        if not self.precision.scaled or self.precision.exhausted:
            self._skipped[tally.calls] = self._skipped.get(tally.calls, 0) + 1
        in_a_row = self._skipped.get(tally.calls, 0)
        scale = f"; the loss scale is now {self.precision.scale:g}" if self.precision.scaled else ""
        self.journal.event(
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
        # With several models (a GAN) the gradients of one may wait for its own zero_grad; they are added as in one process.
        names = self.strategy.leftovers() if len(self.models) == 1 else []
        if names:
            raise StepError(
                f"gradients are already present before the step's first backward (of {len(names)} parameters, the first is "
                f"{names[0]}): they would be added to this step's. Call optimizer.zero_grad() after optimizer.step(), at "
                "the end of the loop body"
            )


def _total(values: Iterable[float]) -> float:
    """The exact sum; where it has none (inf - inf, or beyond the largest float) what floats give."""
    terms = list(values)
    try:
        return math.fsum(terms)
    except (ValueError, OverflowError):
        return sum(terms)


def _where(flags: Sequence[bool]) -> str:
    return ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)
