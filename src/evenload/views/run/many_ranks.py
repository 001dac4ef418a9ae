"""Records of more than 128 ranks: each holds all ranks summed up, and every tenth the times of each."""

from __future__ import annotations

from dataclasses import replace

from evenload.balance.split import even_shares
from evenload.records.values import RankColumns, RankSpread, RankTimes, StepRecord
from evenload.views.run.step_batch import SECONDS_OF


def busiest_rank(step: StepRecord) -> tuple[int, RankTimes]:
    """Return the rank with the most busy seconds in a step, and its times."""
    if step.spread is not None:
        return step.spread.busiest
    rank = max(range(len(step.ranks)), key=lambda index: step.ranks[index].busy_s)
    return rank, step.ranks[rank]


def has_compiled(step: StepRecord) -> bool:
    return step.spread.most.compile_s > 0 if step.spread is not None else any(one.compile_s for one in step.ranks)


class RankEstimate:
    """Times of each rank in the steps whose record has none: the sums are those of the step, the proportions older."""

    def __init__(self) -> None:
        self._whole: StepRecord | None = None

    def fill(self, step: StepRecord) -> StepRecord:
        """Return a step with the times and shares of each rank."""
        spread = step.spread
        if spread is None or step.ranks:
            self._whole = step
            return step
        before = self._whole
        if before is None or before.spread is None or before.num_ranks != spread.num_ranks:  # its record was lost
            shares = even_shares(step.num_samples, spread.num_ranks)
            return replace(step, ranks=(spread.mean,) * spread.num_ranks, shares=shares)
        return replace(step, ranks=_scaled(before, before.spread, spread), shares=before.shares)


def _scaled(before: StepRecord, old: RankSpread, new: RankSpread) -> RankColumns:
    means = zip(SECONDS_OF(old.mean), SECONDS_OF(new.mean), strict=True)
    factors = [now / then if then else 0.0 for then, now in means]
    rows = zip(*map(SECONDS_OF, before.ranks), strict=True)
    columns_us = [
        [round(1e6 * factor * time_s) for time_s in column] for factor, column in zip(factors, rows, strict=True)
    ]
    return RankColumns(columns_us, [one.memory_bytes for one in before.ranks])
