"""`PlanSource`: parts of a loader's plans from outside its planner."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Protocol

from evenload.balance.split import scale_shares
from evenload.training.data.loader import GlobalLoader
from evenload.training.step.assignment import Shares


class PlanSource:
    """Supplies parts of a loader's plans from outside the planner; see `Planner.use`. All ranks must supply the same."""

    sets_shares = False
    """True if `shares` replaces the planner's own assignments, which then learn nothing from the steps."""

    def shares(self, global_step: int, num_samples: int) -> Shares:
        """Return the shares of a step, where `sets_shares`."""
        raise NotImplementedError

    def next_batch_size(self, step: int | None) -> int | None:
        """Return the global batch from now on; None keeps it.

        All ranks call it in front of each step inside an epoch, also where they join, and between two epochs (`step` is None).
        """
        return None


class FixedProportions(PlanSource):
    sets_shares = True

    def __init__(self, proportions: Sequence[int]) -> None:
        self._proportions = tuple(proportions)

    def shares(self, global_step: int, num_samples: int) -> Shares:
        return scale_shares(self._proportions, num_samples)


class StepCounter(Protocol):
    """Counts of `StepLoop` over all loaders."""

    steps_done: int
    stop_requested: bool


class StepsInOrder:
    """The part of a planner that names the steps: all ranks compute each of them together, one after the other."""

    in_order = True

    def steps(self, todo: Sequence[int]) -> Iterator[int]:
        return iter(todo)

    def following(self, step: int, todo: Sequence[int]) -> Iterator[int]:
        return iter(todo[bisect.bisect_right(todo, step) :])

    def global_step(self, step: int, committed: int) -> int:
        return committed

    def repeats_plans(self, global_step: int) -> bool:
        """Return whether whole batches are divided alike from this step on, until `revision` grows, and keep their size."""
        return False

    def step_index(self, step: int, done: int) -> int:
        """Return the index over all loaders of a step of the epoch, after `done` steps."""
        return done

    def end_loop(self, loader: GlobalLoader, loop: StepCounter) -> None:
        """End a loop over this loader on all ranks."""

    def leave_loop(self, loader: GlobalLoader, loop: StepCounter) -> None:
        """End a loop that the script has left early."""
        self.end_loop(loader, loop)
