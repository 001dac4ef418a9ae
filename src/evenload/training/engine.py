"""Runs `step.backward`: attempts until one is good on all ranks.

    begin -> for each micro-batch: loss_fn, backward -> one exchange of reports -> finish the reduction

An attempt is done again, on all ranks alike, when memory ran out somewhere (with smaller micro-batches) or a gradient came
after its bucket had left. Buffers, randomness and gradients are put back before that.
"""

from __future__ import annotations

import math
import resource
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from evenload.errors import DesyncError, NonFiniteError, StepError
from evenload.training import batchnorm, randomness
from evenload.training.buffers import BufferGuard
from evenload.training.data.loader import GlobalBatch
from evenload.training.journal import Journal, Tally
from evenload.training.launch.clock import StepClock
from evenload.training.launch.control import Control, Operation
from evenload.training.launch.throttle import Burner
from evenload.training.microsteps import LossFn, Sums, Surroundings, run_micro_steps
from evenload.training.parallel.strategy import Strategy
from evenload.training.planning import Planner
from evenload.training.precision import Precision
from evenload.training.report import LATE_GRADIENT, OK, OUT_OF_MEMORY, Report, read_rows
from evenload.training.weighting import ignores_labels

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
        self.around = Surroundings(rank, device, seed, strategy, statistics, precision, self._check_unweighted)
        self._started = time.monotonic()
        self._has_statistics = False
        self._buffers = BufferGuard()
        self._units: dict[int, float] = {}
        self._skipped: dict[int, int] = {}
        self._label_checks = 3

    def attach(self, models: Sequence[nn.Module]) -> None:
        """Takes the models whose gradients are the job's."""
        self.models = list(models)
        self._has_statistics = any(batchnorm.has_global_statistics(model) for model in models)
        self.statistics.in_use = self._has_statistics and self.statistics.world_size > 1
        self._buffers = BufferGuard(models)

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
        try:
            with randomness.set_aside(self.device), batchnorm.active(self.statistics):
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
        if not self.burner.active:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what was only queued so far has not cost its time yet
        self.burner.pay(time.perf_counter() - since_s)

    def _attempts(self, batch: GlobalBatch, planner: Planner, tally: Tally, loss_fn: LossFn) -> torch.Tensor:
        expect = True
        for _ in range(MAX_ATTEMPTS):
            if self._has_statistics and self.statistics.world_size > 1:
                # A rank that does something else would leave the others inside a collective of the forward.
                with self.clock.segment("wait"):
                    self.control.exchange(Operation.BEGIN)
            self._buffers.save()
            self.strategy.begin(tally.calls, expect=expect)
            sums = Sums()
            status = self._compute(batch, tally, loss_fn, sums)
            reports = self._exchange(batch, planner, tally, sums, status)
            if all(report.status == OK for report in reports):
                self._buffers.forget()
                return self._finish(batch, tally, sums, reports)
            self._retreat(batch, planner, tally, reports)
            expect = expect and not any(report.status == LATE_GRADIENT for report in reports)
        raise StepError(f"step {batch.global_step} was not done after {MAX_ATTEMPTS} attempts")

    def _compute(self, batch: GlobalBatch, tally: Tally, loss_fn: LossFn, sums: Sums) -> int:
        """Runs the micro-batches; what a device can fail with becomes a status that all ranks will hear."""
        graphs = _compiled_graphs()
        started_s = time.perf_counter()
        try:
            run_micro_steps(self.around, batch, loss_fn, tally.calls, self._units.get(tally.calls), sums)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            if self._has_statistics and self.statistics.world_size > 1:
                raise StepError(
                    f"rank {self.around.rank} ran out of memory in a model whose BatchNorm takes its statistics over all "
                    "ranks, where a step can't be done again by one rank alone; set --micro-batch (or "
                    "init(micro_batch=...)) lower"
                ) from error
            return OUT_OF_MEMORY
        self.pay(started_s)
        if _compiled_graphs() != graphs:
            tally.compiled = True
        return LATE_GRADIENT if self.strategy.report()[1] else OK

    def _exchange(self, batch: GlobalBatch, planner: Planner, tally: Tally, sums: Sums, status: int) -> list[Report]:
        seconds = dict(self.clock.take())
        if tally.compiled:
            seconds["compile"], seconds["compute"] = seconds["compile"] + seconds["compute"], 0.0
        own = Report(
            status=status,
            weighted=sums.weighted,
            units=sums.units,
            loss_sum=float(sums.loss_sum),
            touched_key=self.strategy.report()[0],
            has_news=planner.has_news,
            elapsed_s=time.monotonic() - self._started,
            memory_bytes=float(_memory_bytes(self.device)),
            seconds=seconds,
            metrics={name: float(value) for name, value in sums.metrics.items()} if status == OK else {},
        )
        self.clock.switch("wait")
        rows = self.control.exchange(Operation.BACKWARD, own.row())
        reports = read_rows(rows, sorted(own.metrics))
        tally.add(reports)
        self.elapsed_s = reports[0].elapsed_s
        if reports[0].has_news:
            planner.hear(batch.global_step)
        return reports

    def _retreat(self, batch: GlobalBatch, planner: Planner, tally: Tally, reports: Sequence[Report]) -> None:
        """All ranks alike: everything as it was before the attempt, and a plan that fits."""
        self.strategy.retreat()
        self._buffers.restore()
        tally.redone = True
        failed = [report.status == OUT_OF_MEMORY for report in reports]
        if len(failed) < planner.world_size:  # this rank runs alone, in a window
            failed = [failed[0] and rank == self.around.rank for rank in range(planner.world_size)]
        if any(failed):
            if self.device.type == "cuda":
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

    def _finish(self, batch: GlobalBatch, tally: Tally, sums: Sums, reports: Sequence[Report]) -> torch.Tensor:
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
        finite = self.strategy.finish(sums.nominal / (units * self.precision.scale))
        self._units[tally.calls] = units
        loss = _total(report.loss_sum for report in reports) / units
        tally.loss = loss
        for name in sums.metrics:
            tally.metrics[name] = _total(report.metrics[name] for report in reports) / units
        self.precision.update(finite)
        if finite and math.isfinite(loss):
            self._skipped[tally.calls] = 0
        else:
            self._skip(batch, tally, reports)
        return torch.tensor(loss, dtype=sums.dtype)

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

    def _check_unweighted(self, data: Any) -> None:
        """Warns once where labels are ignored but no weight says so; looks at the first micro-batches only."""
        if self._label_checks and ignores_labels(data):
            self._label_checks = 0
            warnings.warn(
                "the batch's labels hold -100, but loss_fn returned no weight: its mean over tokens is then not the global "
                "batch's. Return (loss, evenload.count_tokens(batch['labels'])) instead",
                stacklevel=2,
            )
        self._label_checks = max(0, self._label_checks - 1)


def _total(values: Iterable[float]) -> float:
    """The exact sum; where it has none (inf - inf, or beyond the largest float) what floats give."""
    terms = list(values)
    try:
        return math.fsum(terms)
    except (ValueError, OverflowError):
        return sum(terms)


def _where(flags: Sequence[bool]) -> str:
    return ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _compiled_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
