"""`Attempt`: what a `step.backward` in progress holds."""

from __future__ import annotations

from dataclasses import dataclass

from evenload.training.compute.micro_steps import LossFn
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.step.planner import Planner
from evenload.training.step.report import NO_REPORTS, Reports
from evenload.training.step.stats import StepStats


@dataclass
class Attempt:
    """A `step.backward` in progress."""

    batch: GlobalBatch
    planner: Planner
    stats: StepStats
    loss_fn: LossFn
    stepped: bool = False
    """True if an optimizer stepped since the last backward."""
    accumulates: bool = False
    """True if no weight changed since the last backward of this step."""
    may_expect: bool = True
    reads_late: bool = False
    reports: Reports = NO_REPORTS
    """Of all ranks, once they are exchanged."""
    error: Exception | None = None
    """Failure of this rank."""
    failure: Exception | None = None
    """Exception of a straight step (straight.py), with which the first attempt ends in its place."""
    failed_together: bool = False
    """True while an exception would be raised on all ranks alike."""
    gave_up: bool = False
    """True if the script of another rank raised an exception, and all give the step up."""

    def begin(self) -> None:
        self.reports, self.error = NO_REPORTS, None

    def raise_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
