"""Run `step.backward`: attempts until one succeeds on all ranks.

    strategy.run -> inside it all ranks exchange reports -> accepted: `.grad` is final; else rolled back, and run again or raised

All ranks repeat an attempt when memory ran out somewhere (with smaller micro-batches) or a gradient came after its bucket
had left. Buffers, randomness and gradients are restored first. An exception of the user's code takes the same path: all
ranks give the attempt up together, so a script that catches it can continue with the next step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from evenload.errors import DesyncError, EvenloadError, PeerLostError, StepError
from evenload.training.comm.clock import StepClock
from evenload.training.comm.control import Control, Operation
from evenload.training.comm.generation import CollectiveAbortedError
from evenload.training.comm.groups import Groups
from evenload.training.comm.pending import limited
from evenload.training.comm.user_collectives import user_collectives
from evenload.training.compute import batchnorm, randomness
from evenload.training.compute.batch_loss import CoupledLoss
from evenload.training.compute.buffers import BufferGuard
from evenload.training.compute.device_sums import LEFTOVERS
from evenload.training.compute.grad_norms import MEASURE_EVERY, GradNorms
from evenload.training.compute.model_parameters import ModelParameters
from evenload.training.compute.out_of_memory import is_fragmented, is_out_of_memory
from evenload.training.compute.precision import Precision
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.launch.throttle import ComputeThrottle
from evenload.training.parallel.strategy import (
    FRAGMENTED,
    INTERRUPTED,
    LATE_GRADIENT,
    OUT_OF_MEMORY,
    RAISED,
    AttemptFailedError,
    BackwardCall,
    GlobalTotals,
    LocalResult,
    StepResult,
    Strategy,
)
from evenload.training.step.attempt import Attempt
from evenload.training.step.consistency import Consistency
from evenload.training.step.exchange import ReportExchange, check_trained, totals_of, where
from evenload.training.step.planner import Planner
from evenload.training.step.recovery import Recovery
from evenload.training.step.report import NO_REPORTS, OwnReport, Reports, exact_sum
from evenload.training.step.stats import StepStats
from evenload.training.step.step_recorder import StepRecorder
from evenload.training.step.totals_reader import TotalsReader

MAX_ATTEMPTS = 40
_OUT = (OUT_OF_MEMORY, FRAGMENTED)
_RAISED_WAIT_S = 10.0
"""A rank whose attempt failed waits for the others so long, and three times as long as its longest backward took."""
_FIRST_WAIT_S = 60.0
"""The same before any backward has succeeded: others may compile."""
_INTERRUPTING = (*_OUT, RAISED, INTERRUPTED)
"""Statuses of ranks that left collectives of the forward."""


class Engine:
    """Runs the backwards of one job on this rank; knows nothing of loops and epochs."""

    def __init__(
        self,
        *,
        device: torch.device,
        groups: Groups,
        control: Control,
        strategy: Strategy,
        precision: Precision,
        clock: StepClock,
        recorder: StepRecorder,
        throttle: ComputeThrottle,
        check_every: int = 0,
        grad_norms: GradNorms | None = None,
    ) -> None:
        self.device = device
        self.control = control
        self.strategy = strategy
        self.precision = precision
        self.clock = clock
        self.recorder = recorder
        self.throttle = throttle
        self.models: list[nn.Module] = []
        self.elapsed_s = 0.0
        """Seconds since the start of the run on rank 0's clock, as of the last exchange: equal on all ranks."""
        self.groups = groups
        self._grad_norms = grad_norms
        self._consistency = Consistency(check_every, control, recorder.event)
        self.exchange = ReportExchange(control, clock, self._consistency, device)
        self.buffers = BufferGuard()
        self._other_gpus: tuple[torch.device, ...] = ()
        self.has_statistics = False
        self.parameters = ModelParameters(())
        self._num_trained = 0
        self.stays_because = ""
        """The reason why this rank must compute in every step, even without samples; empty if it may leave (elastic/)."""
        self._reported_late = False
        self._longest_s = 0.0
        self._recovery: Recovery | None = None
        self.num_backwards = 0
        """Backwards of this session whose gradients this rank received."""
        self.totals = TotalsReader(precision, recorder)

    def continue_with(self, recovery: Recovery) -> None:
        """Go on when a rank is lost; without `recovery` that is an error."""
        self._recovery = self.exchange.recovery = recovery

    def continue_clock(self, elapsed_s: float) -> None:
        """Count the seconds of the run from here on as the rank does that sent `elapsed_s`."""
        self.elapsed_s = elapsed_s
        self.exchange.set_elapsed(elapsed_s)

    def forget_times(self) -> None:
        """Report no times of the steps so far: others follow, with plans of a measurement. All ranks call it."""
        self.exchange.late_times.clear()

    def attach(self, models: Sequence[nn.Module]) -> None:
        """Take the models of the job, which the strategy has attached."""
        self.models = list(models)
        self._other_gpus = randomness.other_gpus(models, self.device)
        self.has_statistics = any(batchnorm.has_global_statistics(model) for model in models)
        self._num_trained = sum(any(p.requires_grad for p in model.parameters()) for model in models)
        self.parameters = ModelParameters(models)
        self.buffers = BufferGuard(models)
        self._consistency.attach(self.strategy.fingerprint)

    def undo(self) -> None:
        self.buffers.restore()

    def covers(self, param: torch.Tensor) -> bool:
        """Return whether this parameter's gradient becomes that of the global batch."""
        return any(param is own for model in self.models for own in model.parameters())

    def leftovers(self) -> list[str]:
        """Return the names of parameters that hold a nonzero gradient; those of a step that is skipped are removed first."""
        self.totals.read()
        if self.parameters.has_changed:
            self.parameters.read()
        return self.parameters.nonzero_gradients()

    def state_dict(self) -> tuple[Mapping[int, float], Mapping[Any, Any]]:
        """Return what earlier steps left for the next, equal on all ranks: N of each call, and the strategy's state."""
        return dict(self.totals.units), self.strategy.state_dict()

    def load_state_dict(self, state: tuple[Mapping[int, float], Mapping[Any, Any]]) -> None:
        """Restore what `state_dict` returned, after steps of each rank alone."""
        self.totals.units, self.totals.is_torn = dict(state[0]), False
        self.strategy.load_state_dict(state[1])

    def backward(self, attempt: Attempt) -> torch.Tensor:
        """Run one backward of a step; see `Step.backward`."""
        if not self.models:
            raise StepError(
                "step.backward was called before run.prepare(model, ...): there is no model whose gradients it could sum"
            )
        batch, stats = attempt.batch, attempt.stats
        self.buffers.drop()
        if stats.calls == 0:
            self._check_leftovers()
        self.clock.switch("compute")
        generation = self.groups.generation
        self._consistency.begin(
            batch.global_step, first_call=stats.calls == 0, ranks=generation.computing, takes_part=generation.computes
        )
        began_s = time.perf_counter()
        generators = randomness.save(self.device, self._other_gpus)
        guard = self.control.take_guard()
        try:
            try:
                loss = self._until_no_rank_is_lost(attempt)
            finally:
                self.control.guard = guard
                randomness.put_back(generators)
        except BaseException:
            self.strategy.rollback(together=attempt.failed_together)
            self.buffers.restore()  # the script may catch it, and try again
            raise
        finally:
            self.clock.switch("optimizer")
        stats.body_since_s = time.perf_counter()
        self._longest_s = max(self._longest_s, stats.body_since_s - began_s)
        return loss

    def _until_no_rank_is_lost(self, attempt: Attempt) -> torch.Tensor:
        batch, planner, stats = attempt.batch, attempt.planner, attempt.stats
        while True:
            if batch.plan.generation != planner.generation:
                batch.replan(planner.plan_again(batch.plan, batch.global_step), planner.rank)
            try:
                loss = self._attempts(attempt)
                stats.calls += 1
                self.num_backwards += 1
                return loss
            except PeerLostError as error:
                if self._recovery is None or attempt.gave_up:
                    raise
                self.strategy.rollback(together=False)
                self.buffers.restore()
                missed_loss = self._recovery.recover(error)
            stats.redone = True
            if missed_loss is not None:
                self.buffers.forget()
                for param in self.parameters.named.values():
                    param.grad = None
                stats.miss(missed_loss, planner.world_size)
                return torch.full((), missed_loss, device=self.device)
            attempt.may_expect = True

    def _attempts(self, attempt: Attempt) -> torch.Tensor:
        stats, grad_norms = attempt.stats, self._grad_norms
        for _ in range(MAX_ATTEMPTS):
            attempt.begin()
            self.buffers.save()
            self.exchange.begin()
            attempt.reads_late = self.totals.may_be_late(stats.calls, self.groups.generation, attempt.accumulates)
            if grad_norms is not None:
                # Only the first of several backwards is measured.
                grad_norms.begin(stats.calls == 0 and attempt.batch.global_step % MEASURE_EVERY == 0)
            outcome = self._run(attempt)
            if isinstance(outcome, StepResult):
                self.buffers.forget()
                return self.finish(attempt.batch, stats, attempt.reports, outcome)
            self._redo(attempt, outcome.statuses)
        raise StepError(f"step {attempt.batch.global_step} still failed after {MAX_ATTEMPTS} attempts")

    def _run(self, attempt: Attempt) -> StepResult | AttemptFailedError:
        """Run the strategy; a failure on one rank is returned on all of them."""
        if self.groups.world_size > 1 and (self.has_statistics or isinstance(attempt.loss_fn, CoupledLoss)):
            # A rank that does something else would leave the others inside a collective of the forward.
            with self.clock.segment("wait"):
                self.control.exchange(Operation.BEGIN)
        if not self.groups.generation.computes:
            return self._stand_by(attempt)

        stats, planner = attempt.stats, attempt.planner
        looks = self.groups.world_size > 1 and not self.stays_because  # a rank that stays anyway need not look
        num_collectives = user_collectives(self.groups.own_groups) if looks else 0
        call = BackwardCall(
            index=stats.calls,
            last_units=self.totals.units.get(stats.calls),
            exchange=partial(self._agree, attempt),
            may_expect=attempt.may_expect,
            begins_update=stats.calls == 0 or attempt.stepped,
            refuses_leftovers=stats.calls == 0 and self._num_trained == 1,
            reads_late=attempt.reads_late,
            in_turns=planner.takes_turns,
            add_replica_times=planner.add_replica_times,
        )
        try:
            if attempt.failure is not None:
                attempt.raise_failure()
            result = self.strategy.run(attempt.batch.plan, attempt.batch, attempt.loss_fn, call)
            if looks and user_collectives(self.groups.own_groups) != num_collectives:
                self.stays_because = "loss_fn runs collectives of its own"
            return result
        except AttemptFailedError as failed:
            return failed
        except Exception as error:
            is_interrupted = isinstance(error, CollectiveAbortedError)
            if attempt.reports or (isinstance(error, DesyncError | PeerLostError) and not is_interrupted):
                raise
            # The other ranks may wait in a collective of the forward.
            self.groups.abort_statistics()
            status = INTERRUPTED if is_interrupted else RAISED
            if is_out_of_memory(error):
                status = FRAGMENTED if is_fragmented(self.device) else OUT_OF_MEMORY
            else:
                attempt.error = error
            try:
                limit_s = _FIRST_WAIT_S if self._longest_s == 0 else _RAISED_WAIT_S + 3 * self._longest_s
                reason = (
                    f"rank {self.groups.rank} raised an exception, and the others did not come within {limit_s:.0f} s"
                )
                with limited(limit_s, self.groups.abort, reason):  # they may wait for this one, in a deadlock
                    self._agree(attempt, [LocalResult(status=status)])
            except AttemptFailedError as failed:
                # It would keep the frames of `error`, and with them the activations, while memory is freed for the next attempt.
                failed.__context__ = None
                return failed
            except PeerLostError as lost:
                # Without the lost rank the step is computed again, and fails again if it must. Its news may come after its end.
                is_lost = attempt.error is None and reason not in str(lost)
                raise (lost if (recovery := self._recovery) and (is_lost or recovery.knows_loss) else error) from None
            raise

    def _stand_by(self, attempt: Attempt) -> StepResult | AttemptFailedError:
        """Take part in the exchange of a step that only other ranks compute."""
        try:
            totals = self._agree(attempt, [self.exchange.idle_result(attempt.stats.calls)])
        except AttemptFailedError as failed:
            return failed
        return StepResult(totals.units, torch.tensor(totals.loss), finite=True)

    def _agree(self, attempt: Attempt, results: Sequence[LocalResult]) -> GlobalTotals:
        attempt.reports = self.exchange.run(
            results, attempt.batch, attempt.planner, attempt.stats, may_leave=not self.stays_because
        )
        return self.conclude(attempt, len(results[0].touched))

    def conclude(self, attempt: Attempt, num_touched_words: int = 0) -> GlobalTotals:
        """Do what all ranks do with the reports of an attempt, and add them up; AttemptFailedError where a rank failed."""
        batch, planner, stats, reports = attempt.batch, attempt.planner, attempt.stats, attempt.reports
        if (has_others := not isinstance(reports, OwnReport)) and not reports.is_same("touched_key"):
            check_trained(reports, batch.global_step)
        attempt.failed_together = True  # from here on all ranks do the same
        late, agreed = self.exchange.late_times, reports.agreed
        stats.add(reports, late.take_sent(reports) if late.sent is not None else None)
        self.elapsed_s = agreed.elapsed_s
        if agreed.has_decision:
            planner.sync_decision(batch.global_step)
        if agreed.failed:
            raise AttemptFailedError([int(status) for status in reports.column("status")])
        if has_others:
            computing, num_reports = self.groups.generation.computing, len(reports)
            if num_reports == planner.world_size:
                planner.may_leave = reports.flags("may_leave")
            if num_reports > len(computing) > 1 or self.groups.world_size > len(computing):
                reports = self.exchange.own if computing == (self.groups.rank,) else reports.of(computing)
            if reports.all("state_key"):
                self._consistency.check(batch.global_step, reports.column("state_key"))
        totals = totals_of(reports, batch.global_step, num_touched_words)
        attempt.failed_together = False
        return totals

    def _redo(self, attempt: Attempt, statuses: Sequence[int]) -> None:
        """Restore what was before the attempt, on all ranks; raise if it can't be run again."""
        batch, planner, stats = attempt.batch, attempt.planner, attempt.stats
        attempt.failed_together = False
        if self.groups.generation.computes:
            self.strategy.rollback(together=True)
        self.buffers.restore()
        stats.redone = True
        if any(status in _INTERRUPTING for status in statuses):
            self.groups.rebuild_statistics()
        if raised := [rank for rank, status in enumerate(statuses) if status == RAISED]:
            if attempt.error is not None and not isinstance(attempt.error, CollectiveAbortedError):
                raise attempt.error
            attempt.gave_up = True
            raise PeerLostError(
                f"rank {', '.join(map(str, raised))} raised an exception in step.backward at step {batch.global_step}; this "
                "rank gave the step up with it"
            )
        if LATE_GRADIENT in statuses:
            attempt.may_expect = False
            if not self._reported_late:
                self._reported_late = True
                self.recorder.event(
                    "late_gradient",
                    f"step {batch.global_step} is computed twice: parameters were added, or gradients came that no earlier step "
                    "had (of parameters used for the first time, or more often in one backward), or an autograd.Function gave "
                    "None for a parameter. Later steps expect what came; one in which a Function gives None again is repeated",
                    step=batch.global_step,
                )
        if any(status in _OUT for status in statuses):
            self._make_room(batch, planner, statuses)
        self.clock.switch("compute")

    def _make_room(self, batch: GlobalBatch, planner: Planner, statuses: Sequence[int]) -> None:
        """Repeat the step in smaller micro-batches, or once as it is where free blocks can be returned to the GPU."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        out = [status in _OUT for status in statuses]
        if len(out) < planner.world_size:  # this rank runs alone, in a measurement
            out = [out[0] and rank == self.groups.rank for rank in range(planner.world_size)]
        before, single = batch.plan.num_micro, " with one sample in a micro-batch"
        failed = f"rank {where(out)} ran out of memory in step {batch.global_step}"
        if OUT_OF_MEMORY not in statuses and planner.may_retry(batch.global_step):
            text = f"{failed} with much of it in free blocks: they are returned, and the step is repeated"
        else:
            batch.replan(planner.lower_caps(batch.plan, out, batch.global_step))
            change = f": micro-batches {before} → {batch.plan.num_micro}"
            text = f"{failed}{change if batch.plan.num_micro != before else single}; the step is repeated"
        self.recorder.event("memory", text, step=batch.global_step, num_micro=batch.plan.num_micro)

    def finish(self, batch: GlobalBatch, stats: StepStats, reports: Reports, result: StepResult) -> torch.Tensor:
        travelled = result.totals is None and result.unread is None
        if result.norms is not None:
            stats.unread_norms = result.norms
        if travelled and result.finite and (grad_norms := self._grad_norms) is not None and grad_norms.on:
            stats.norms = grad_norms.norms(
                reports.column("units"),
                reports.column("squared_norm"),
                batch.num_samples,
                result.nominal / self.precision.scale,
            )
        names = reports.names if travelled else ()
        metrics = {name: exact_sum(reports.metric(name)) / result.units for name in names} if names else {}
        try:
            self.totals.take(stats, batch.global_step, result, metrics, reports if travelled else NO_REPORTS)
        except EvenloadError:
            result.discard()  # the totals of the backward before were wrong
            raise
        if result.loss.device.type == self.device.type:
            return result.loss
        # A fill does not wait for the device, as a copy would.
        return torch.full((), stats.loss, dtype=result.loss.dtype, device=self.device)

    def _check_leftovers(self) -> None:
        # With several models (a GAN) the gradients of one may wait for its own zero_grad; they add up as in one process.
        if self._num_trained != 1 or not self.parameters.have_gradients:
            return
        if not getattr(self.strategy, "finds_leftovers", False) and (names := self.parameters.nonzero_gradients()):
            raise StepError(
                f"gradients are already present before the step's first backward (of {len(names)} parameters, the first is "
                f"{names[0]}). {LEFTOVERS}"
            )
