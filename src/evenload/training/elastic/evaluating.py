"""`LiveEvaluationMembers`: who evaluates, where ranks may be lost inside a loop over `run.batches`."""

from __future__ import annotations

from evenload.training.comm.control import Operation
from evenload.training.data.evaluate import EvaluationMembers
from evenload.training.step.context import TrainingContext


class LiveEvaluationMembers(EvaluationMembers):
    def __init__(self, context: TrainingContext) -> None:
        super().__init__(context.groups.membership.workers)
        self._context = context

    def end_round(self) -> tuple[str, ...]:
        return self._context.control.guarded(self._meet)

    def _meet(self) -> tuple[str, ...]:
        rows = self._context.control.exchange(Operation.END_ROUND, [1.0])
        # Here, not after it: the members may be others by then, on some ranks only.
        return self._context.groups.membership.workers if all(row[0] for row in rows) else ()
