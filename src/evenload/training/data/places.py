"""Places of a loader in an epoch where one process computes several batches for several steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from evenload.balance.values import StepPlan


@dataclass(frozen=True)
class BatchPlace:
    """One of the batches that an island computes for several steps."""

    step: int
    """The first of `num_steps`."""
    first_number: int
    index: int
    """Counts this island's batches of these steps."""
    num_batches: int
    num_steps: int
    first: int
    """This island's first batch among those of all islands in these steps."""

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.num_batches

    @property
    def number(self) -> int:
        """Grows from batch to batch over all epochs."""
        return self.first_number + self.index


class RoundPlanner:
    """A planner of islands; the loader asks it for places instead of steps where they take steps `by_speed`."""

    by_speed = False

    def place(self, step: int, global_step: int, num_steps: int) -> BatchPlace:
        """Return the place that begins with a step of an epoch of `num_steps`; `global_step` counts it over all epochs."""
        raise NotImplementedError

    def plan_at(self, place: BatchPlace, epoch: int, bounds: Sequence[int]) -> StepPlan:
        """Return the plan of a place; `bounds` are the positions of all steps of the epoch."""
        raise NotImplementedError

    def places(self, step: int, global_step: int, num_steps: int) -> Iterator[BatchPlace]:
        """Yield the places from a step to the end of its epoch; each is decided when it is asked for."""
        if step < num_steps:
            yield from self.places_from(self.place(step, global_step, num_steps), global_step - step, num_steps)

    def places_from(self, place: BatchPlace, steps_before: int, num_steps: int) -> Iterator[BatchPlace]:
        """Yield a place, and those after it; `steps_before` is the number of steps before the epoch."""
        while True:
            yield place
            if not place.is_last:
                place = replace(place, index=place.index + 1)
            elif (step := place.step + place.num_steps) < num_steps:
                place = self.place(step, steps_before + step, num_steps)
            else:
                return
