"""A step in one straight line: of a rank that computes alone on a CPU, while nothing changes (docs/decisions/straight-steps.md).

    usual step -> everything rests? -> straight steps, for at most 0.2 s -> usual step -> ...

A usual step asks every part of the job whether there is something to do, in more than 200 calls of Python. Each runs once a step,
when nothing of it is in the processor's caches, so on a CPU a short step spends half a millisecond there. A straight step
computes with the same pieces, and asks only what may have changed:

- before the first one: every part, by `begin_line`. `StepLoop.leave_line` ends a line whose answers hold no more.
- in each one, by `StraightLine.takes`: what the script changes without a call of ours, such as a parameter, its hook or `.grad`.
- every 0.2 s, by a usual step: what other threads and processes want, such as a rank that joins. Steps that take longer than
  that have nothing to gain, and all go the usual way.

Where a look finds a change, nothing was done yet, and the step goes the usual way (engine.py), which alone knows what to do.

Other ranks may stand by (elastic/leaving.py). They receive this rank's report in each step as in a usual one, and take no part
in the line: only this rank knows of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch

from evenload.balance.rank_costs import MANY_RANKS
from evenload.balance.values import StepPlan
from evenload.training.compute.batch_loss import CoupledLoss
from evenload.training.compute.micro_steps import LossFn, LossSums, compute_loss, seed
from evenload.training.compute.out_of_memory import is_out_of_memory
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.data.randomness import copy_global_state, put_back
from evenload.training.parallel.ddp import ReplicaStrategy
from evenload.training.parallel.lone_call import LoneCall
from evenload.training.step.attempt import Attempt
from evenload.training.step.engine import Engine
from evenload.training.step.exchange import mean, totals_of
from evenload.training.step.planner import Planner
from evenload.training.step.stats import StepStats

_LASTS_S = 0.2
_TRAINABLE = operator.attrgetter("requires_grad")
_set_grad_enabled = torch._C._set_grad_enabled


class StraightLine:
    """Computes backwards of a rank that computes alone, each the only one of its step, with one micro-batch."""

    def __init__(self, engine: Engine, planner: Planner, call: LoneCall, plan: StepPlan) -> None:
        self._engine = engine
        self._planner = planner
        self._call = call
        self._out = plan.out
        self._generation = engine.groups.generation
        self.has_others = engine.groups.world_size > 1
        """True if other ranks stand by."""
        self.unlearned: list[StepStats] = []
        """Steps whose times the planner has not learned yet, where other ranks stand by."""
        self.failure: Exception | None = None
        """Exception of the last backward, with everything as before, where the usual way must tell the other ranks."""
        self._touched = call.touched
        self._memory_bytes = int(engine.exchange.own.most("memory_bytes"))
        self._ends_s = engine.clock.since_s + _LASTS_S

    @property
    def holds(self) -> bool:
        """False if the ranks have changed."""
        return self._engine.groups.generation is self._generation

    def has_ended(self, plan: StepPlan) -> bool:
        """Return whether the step that begins now goes the usual way."""
        is_over = self._engine.clock.since_s >= self._ends_s
        return is_over or (self.has_others and (plan.out != self._out or self._planner.has_decision or not self.holds))

    def takes(self, batch: GlobalBatch, stats: StepStats, loss_fn: LossFn) -> bool:
        """Return whether a backward may go this way: nothing has changed since the last one."""
        plan = batch.plan
        return (
            not stats.calls
            and len(plan.micro) == 1
            and plan.generation == self._planner.generation
            and type(loss_fn) is not CoupledLoss
            and not self._call.parameters.has_changed
            and not any(map(_TRAINABLE, self._call.frozen))
            and self._call.reducer.is_as_before()
            and not (self.has_others and (self._engine.totals.in_optimizer or not self.holds))
        )

    def backward(self, batch: GlobalBatch, stats: StepStats, loss_fn: LossFn) -> torch.Tensor | None:
        """Do what `Engine.backward` does; None where the usual way must do it, with everything as before: see `_compute`."""
        engine, reducer = self._engine, self._call.reducer
        engine.clock.switch("compute")
        attempt = Attempt(batch, self._planner, stats, loss_fn)
        guard = engine.control.take_guard() if self.has_others else None
        generators = copy_global_state()
        if has_buffers := engine.buffers.are_present:
            engine.buffers.save()
        try:
            engine.exchange.begin()
            reducer.begin_again()
            if (sums := self._compute(batch, stats, loss_fn)) is None:
                return None
            is_usual = reducer.end_again()
            key = reducer.touched_key() if self.has_others else None
            reports = attempt.reports = engine.exchange.repeat(sums, batch, self._planner, stats, key)
            if self.has_others and not reports.repeats:
                engine.conclude(attempt)
            else:
                stats.add(reports)
                engine.elapsed_s = reports.agreed.elapsed_s
            if not is_usual:
                self._touched = self._call.agree(totals_of(engine.exchange.own, batch.global_step))
            units = float(sums.units)
            result = self._call.finish(self._touched, sums, units, mean(float(sums.loss_sum), units, batch.global_step))
            if has_buffers:
                engine.buffers.forget()
            loss = engine.finish(batch, stats, reports, result)
        except BaseException as error:
            self._undo()  # the script may catch it, and try again
            if attempt.reports or not (self.has_others and isinstance(error, Exception)):
                raise
            self.failure = error
            return None
        finally:
            put_back(generators)
            if self.has_others:
                engine.control.guard = guard
            engine.clock.switch("optimizer")
        stats.calls += 1
        engine.num_backwards += 1
        return loss

    def _compute(self, batch: GlobalBatch, stats: StepStats, loss_fn: LossFn) -> LossSums | None:
        """Run forward and backward; None, with everything as before, where memory ran out."""
        context, sums, had_grad = self._call.context, LossSums(), torch.is_grad_enabled()
        try:
            micro = batch.micro(0, 0, context.device)
            seed(context, batch, 0, 0, 0)
            _set_grad_enabled(True)
            num_samples, last_units = batch.plan.num_samples, self._engine.totals.units.get(0)
            root, _ = compute_loss(context, micro, loss_fn, sums, num_samples, last_units, is_first=True)
            self._call.reducer.open_again()
            root.backward()  # type: ignore[no-untyped-call]
            return sums
        except Exception as error:
            stats.redone = True
            if not is_out_of_memory(error):
                raise
        finally:
            _set_grad_enabled(had_grad)
        self._undo()
        return None

    def _undo(self) -> None:
        self._call.reducer.abort()
        self._engine.buffers.restore()

    def learn(self) -> None:
        """Let the planner learn from all steps at once: its code is in the caches then. Of one micro-batch, nothing is decided
        that other ranks would do at the end of each step (`Planner.follow_step`).
        """
        for stats in self.unlearned:
            if stats.plan is not None:
                self._planner.observe(stats.global_step, stats.plan, *stats.costs())

    def end(self, index: int, batch: GlobalBatch, stats: StepStats, *, at_once: bool) -> None:
        """Record a step that this line has computed."""
        clock = self._engine.clock
        clock.switch("other")
        times, memory_bytes = self._engine.exchange.own.own_seconds, self._memory_bytes
        self._engine.recorder.own_step(index, batch.plan, stats, times, memory_bytes, clock.since_s, at_once=at_once)


def begin_line(
    engine: Engine, batch: GlobalBatch, planner: Planner, stats: StepStats, rests: Iterable[bool]
) -> StraightLine | None:
    """Return what computes the next steps, after a usual one; None where something more belongs to a step.

    `rests`: of each listener (`StepListener.rests`).
    """
    strategy, now = engine.strategy, engine.groups.generation
    has_others = now.world_size > 1
    if (
        now.computing != (0,)
        or (has_others and (engine.has_statistics or now.world_size > MANY_RANKS))
        or not isinstance(strategy, ReplicaStrategy)
        or engine.device.type != "cpu"
        or engine.precision.scaled
        or engine.control.is_barred
        or (planner.learns and not has_others)
        or planner.has_decision
        or batch.plan.num_micro > 1
        or batch.plan.of is not None
        or not engine.recorder.writes
        or stats.calls != 1
        or stats.redone
        or engine.clock.since_s - stats.begun_s > _LASTS_S
        or not all(rests)
    ):
        return None
    call = strategy.lone_call()
    return None if call is None else StraightLine(engine, planner, call, batch.plan)
