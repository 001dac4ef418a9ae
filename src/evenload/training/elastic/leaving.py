"""Ranks that leave the groups of gradients and statistics while they would only slow the others, and return.

The planner decides (a share of 0); this listener acts on it between two steps, on all ranks at the same step. A rank that has
left takes part in the exchanges alone: it reads and computes nothing, its `.grad` stays None, so its optimizer changes
nothing. Before it computes again, and when a loop over a loader ends, it receives the registered state from rank 0.

Note [Ranks that stay]
  A rank stays, with one sample of weight 0 in each micro-batch, where leaving would change the result or hang:
  - an optimizer or scheduler that steps, or a prepared model, was not passed to `run.resume`: its state could not be restored
  - loss_fn runs collectives of the user's own, which wait for all ranks
  - an optimizer calls `step.backward` itself (LBFGS): without gradients it would call it another number of times
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from evenload.training.checkpoint.registry import OWN_STATE
from evenload.training.compute.micro_steps import LossFn
from evenload.training.launch.environment import devices_without_effect
from evenload.training.parallel.model_split.transfers import split_of
from evenload.training.step.context import TrainingContext, device_names
from evenload.training.step.step import Step, StepListener

_STEPS_TO_LEAVE = 4
"""A rank with a share of 0 has left after so many steps, unless it must stay."""


class ComputingRanks(StepListener):
    """Follows the plans: which ranks compute the next step."""

    def __init__(
        self, context: TrainingContext, models: Sequence[nn.Module], unregistered: Callable[[], Sequence[str]]
    ) -> None:
        """`unregistered` returns the types of schedulers and averages that were not passed to `run.resume`."""
        self._context = context
        self._models = models
        self._unregistered = unregistered
        self.optimizer: Optimizer | None = None
        """The one that steps now."""
        self._has_begun = False
        self._reported = False
        self._num_idle = 0
        """Steps in a row in which a rank without samples computed: at the end of an epoch there may be one."""

    @property
    def rests(self) -> bool:
        return True  # until a plan in which other ranks compute, which ends a straight line

    def on_begin(self, step: Step) -> None:
        self._context.control.leave_loops()
        if self._context.step_groups.world_size == 1:
            return
        if not self._has_begun:
            self._has_begun = True
            if not self._context.spec.joining:  # it was admitted because nothing is missing
                self._check_registered()
        began_s = time.perf_counter()
        if self.set_out(() if step.arm else step.batch.plan.out, step.index):
            step.planner.set_return_price(time.perf_counter() - began_s)
        if 0 in step.batch.plan.shares:
            self._report_staying(step)
        else:
            self._num_idle = 0

    def on_backward(self, step: Step, loss_fn: LossFn) -> None:
        self._context.control.leave_loops()
        if self.optimizer is not None:
            self._stay(f"{type(self.optimizer).__name__} calls step.backward itself")

    def on_loop_end(self) -> None:
        """Send the state to the ranks that have left, which may use their models now; rank 0 goes on meanwhile."""
        generation = self._context.step_groups.generation
        self._send_state([rank for rank in generation.ranks if rank not in generation.computing])

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Let the rank stay if the state of an optimizer that is about to step could not be restored."""
        if not self._context.engine.stays_because and self._context.loop.step is not None:
            held = self._context.registry.values()
            if not any(value is optimizer for value in held):
                self._stay(f"{type(optimizer).__name__} steps, but was not passed to run.resume")

    def set_out(self, out: Sequence[int], step_index: int | None = None) -> bool:
        """Let all ranks but `out` compute from now on; return whether one returned. All ranks call it between two steps."""
        groups = self._context.step_groups
        before = groups.generation.computing
        computing = tuple(rank for rank in groups.ranks if rank not in out) if out else tuple(groups.ranks)
        if computing == before or groups.world_size == 1:
            return False
        self._context.loop.settle()  # the state that is sent holds what it reads
        returning = [rank for rank in computing if rank not in before]
        self._send_state(returning)
        self._context.registry.wait_until_sent()  # a return's price contains it
        groups.set_computing(computing)
        names = device_names(self._context)
        for rank in returning:
            self._context.recorder.event(
                "returned", f"rank {rank} ({names[rank]}) computes again, with the state of rank 0", step=step_index
            )
        for rank in before:
            if rank not in computing:
                self._context.recorder.event(
                    "left",
                    f"rank {rank} ({names[rank]}) computes nothing from this step on: its share is 0",
                    step=step_index,
                )
        return bool(returning)

    def _send_state(self, to: Sequence[int]) -> None:
        """Send everything that training needs from rank 0; all ranks call it."""
        if not to:
            return
        context = self._context
        with context.clock.segment("other"):
            if context.step_groups.rank == 0:
                engine = context.engine
                extra = {"engine": engine.state_dict(), "precision": engine.precision.state_dict()}
                context.registry.send(context.step_groups, to, extra, without=(OWN_STATE,))
            elif context.step_groups.rank in to:
                received = context.registry.receive(context.step_groups, 0, without=(OWN_STATE,))
                context.engine.load_state_dict(received["engine"])
                context.engine.precision.load_state_dict(received["precision"])

    def _check_registered(self) -> None:
        if reason := why_not_restored(self._context, self._models, self._unregistered):
            self._stay(reason)

    def _stay(self, reason: str) -> None:
        if not self._context.engine.stays_because:
            self._context.engine.stays_because = reason

    def _report_staying(self, step: Step) -> None:
        """Report once that a rank without samples computes all the same, and its cost."""
        plan, planner = step.batch.plan, step.planner
        if self._reported or step.arm or planner.world_size != plan.world_size:
            return
        idle = [rank for rank, share in enumerate(plan.shares) if not share and not (rank and planner.may_leave[rank])]
        self._num_idle = self._num_idle + 1 if idle else 0
        if self._num_idle <= _STEPS_TO_LEAVE:
            return
        self._reported = True
        reason = "rank 0 never leaves the steps" if idle == [0] else self._context.engine.stays_because
        reason = reason or "another rank can't be left out"
        self._context.recorder.event(
            "stays",
            f"rank {', '.join(map(str, idle))} has no samples but computes one of weight 0 in each micro-batch, for which the "
            f"others may wait: {reason}",
            step=step.index,
        )


def why_not_restored(
    context: TrainingContext, models: Sequence[nn.Module], unregistered: Callable[[], Sequence[str]]
) -> str:
    """Return why the state of another rank would not make this rank equal to it; empty if it would."""
    if len(context.spec.devices) > 1 and not any(split_of(model) for model in models):
        return devices_without_effect(context.spec)
    held = context.registry.values()
    parts = [module for value in held if isinstance(value, nn.Module) for module in value.modules()]
    missing = [type(m).__name__ for m in models if not any(m is part for part in parts) and _trains(m)]
    if not held:
        return "run.resume was not called, so the state of a rank that returns could not be restored"
    missing += unregistered()
    return f"{', '.join(missing)} was not passed to run.resume" if missing else ""


def _trains(model: nn.Module) -> bool:
    return any(p.requires_grad for p in model.parameters())
