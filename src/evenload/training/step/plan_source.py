"""`PlanSource`: parts of a loader's plans from outside its planner."""

from __future__ import annotations

from collections.abc import Sequence

from evenload.balance.split import scale_shares
from evenload.training.step.assignment import Shares


class PlanSource:
    """Supplies parts of a loader's plans from outside the planner; see `Planner.use`. All ranks must supply the same."""

    sets_shares = False
    """True if `shares` replaces the planner's own assignments, which then learn nothing from the steps."""

    def shares(self, global_step: int, num_samples: int) -> Shares:
        """Return the shares of a step, where `sets_shares`."""
        raise NotImplementedError

    def next_batch_size(self) -> int | None:
        """Return the global batch of the next epoch; None keeps it. All ranks call it between two epochs."""
        return None


class FixedProportions(PlanSource):
    sets_shares = True

    def __init__(self, proportions: Sequence[int]) -> None:
        self._proportions = tuple(proportions)

    def shares(self, global_step: int, num_samples: int) -> Shares:
        return scale_shares(self._proportions, num_samples)
