"""`StepPlanner`: what a loader asks of the planner, which decides the parts of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from evenload.balance.values import StepPlan


class StepPlanner(Protocol):
    world_size: int
    rank: int
    in_order: bool
    """True if all ranks execute all steps, in order; `global_step` is called only where it is False."""

    def plan(self, epoch: int, epoch_step: int, global_step: int, start: int, num_samples: int) -> StepPlan:
        """Return the plan of a step under the decisions known now; equal on all ranks when the step is executed."""

    def revision(self) -> int:
        """Return a number that grows when a decision changes plans of steps not yet executed."""

    def repeats_plans(self, global_step: int) -> bool:
        """Return whether whole batches are divided alike from this step on, until `revision` grows, and keep their size."""

    def next_batch_size(self, step: int | None) -> int | None:
        """Return the global batch from now on; None keeps it.

        All ranks call it in front of each step inside an epoch, also where they join, and between two epochs (`step` is None).
        """

    def agree(self, values: Sequence[int] | None) -> list[int]:
        """Broadcast rank 0's integers to all ranks."""

    def steps(self, todo: Sequence[int]) -> Iterator[int]:
        """Yield the steps of an epoch that this rank executes, of those left; all of them, in order, except under ``async``."""

    def following(self, step: int, todo: Sequence[int]) -> Iterator[int]:
        """Yield the steps that this rank will execute after `step`, as far as it is known."""

    def global_step(self, step: int, committed: int) -> int:
        """Return the global index of a step of the epoch; `committed` steps of all epochs are committed."""
