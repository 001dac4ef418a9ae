"""`LateTimes`: the times of steps on GPUs, which the host reads two steps later.

Note [Two steps]
  A GPU takes a time when it gets there, and the host would wait for it. In the exchange of step s it has long passed the
  backwards of step s - 2, whose totals the host has read (totals_reader.py). So the rows of step s carry the times of step
  s - 2 and its number, and the first two steps have none. What is learned from them is learned of step s - 2, with the plan
  that it had. Where the rows name different steps (a rank failed in one, or has just begun), nobody uses them; two steps later
  they agree again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from evenload.training.comm.clock import SEGMENTS, Segment, UnreadTimes
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.step.planner import Planner
from evenload.training.step.report import NO_TIMES, TIMES_OF_FIRST, Reports
from evenload.training.step.stats import StepStats

_LAG_STEPS = 2


@dataclass
class _Untimed:
    """A step whose times have not been reported."""

    step: int
    stats: StepStats
    times: UnreadTimes
    compiled: bool


class LateTimes:
    def __init__(self) -> None:
        self.waiting: deque[_Untimed] = deque()
        """Steps whose times have not been reported."""
        self.sent: _Untimed | None = None
        """The step whose times this rank's row of the running exchange carries."""
        self._planner: Planner | None = None
        self._generation = 0

    def clear(self) -> None:
        """Forget the steps whose times have not been reported; all ranks do it at the same point."""
        self.waiting.clear()
        self.sent = None

    def add(
        self, batch: GlobalBatch, planner: Planner, stats: StepStats, times: UnreadTimes, *, compiled: bool
    ) -> tuple[dict[Segment, float], float]:
        """Take the times up to an exchange; return the seconds to send in it and the number of their step."""
        if planner is not self._planner or batch.plan.generation != self._generation:
            self.clear()
            self._planner, self._generation = planner, batch.plan.generation
        newest = self.waiting[-1] if self.waiting else None
        if newest is not None and newest.stats is stats:  # a further backward of the step, or a further attempt
            newest.times.add(times)
            newest.compiled = newest.compiled or compiled
        else:
            self.waiting.append(_Untimed(batch.global_step, stats, times, compiled))
            if len(self.waiting) > _LAG_STEPS:
                self.sent = sent = self.waiting.popleft()
                seconds = sent.times.read()
                return as_compiling(seconds) if sent.compiled else seconds, TIMES_OF_FIRST + sent.step
        return dict.fromkeys(SEGMENTS, 0.0), NO_TIMES

    def take_sent(self, reports: Reports) -> StepStats | None:
        """Return the step whose times the rows of this exchange carry; None if they are not all of one step."""
        sent, self.sent = self.sent, None
        return sent.stats if sent is not None and reports.is_same("times_of") else None


def as_compiling(seconds: dict[Segment, float]) -> dict[Segment, float]:
    """Return the times of a step in which something was compiled: they are no measurement of its computation."""
    return {**seconds, "compile": seconds["compile"] + seconds["compute"], "compute": 0.0}
