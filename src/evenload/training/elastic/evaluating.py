"""`LiveEvaluationMembers`: who evaluates, where ranks may be lost inside a loop over `run.batches`."""

from __future__ import annotations

from evenload.training.comm.control import Operation
from evenload.training.data.evaluate import EvaluationMembers
from evenload.training.step.context import TrainingContext


class LiveEvaluationMembers(EvaluationMembers):
    def __init__(self, context: TrainingContext) -> None:
        super().__init__(context.groups.world_size, context.groups.rank)
        self._context = context

    def now(self) -> tuple[str, ...]:
        return self._context.groups.membership.workers

    def index(self) -> int:
        return self._context.groups.rank

    def end_round(self) -> None:
        self._context.control.exchange(Operation.EVALUATE)
