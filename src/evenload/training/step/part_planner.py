"""`PartPlanner`: the steps of strategy ``async``. On the server a step for each arriving gradient, on a worker one for each part.

A plan gives the whole global batch to one worker. While a loop runs, every rank is a world of one; when it ends, all meet:
the server sends its parameters, the ranks that are gone leave the groups, and all take the server's position in the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from evenload.balance.decision import Decision
from evenload.balance.split import num_micro, slice_sizes
from evenload.balance.values import StepPlan
from evenload.errors import PeerLostError, StepError
from evenload.training.comm.clock import StepClock
from evenload.training.comm.control import Control, Operation
from evenload.training.comm.groups import Groups
from evenload.training.data.loader import GlobalLoader
from evenload.training.parallel.asynchronous.messages import Handout
from evenload.training.parallel.asynchronous.strategy import AsyncStrategy
from evenload.training.step.assignment import Shares
from evenload.training.step.left_by_error import left_by_error
from evenload.training.step.plan_source import StepCounter
from evenload.training.step.planner import Planner

Value = TypeVar("Value")

_SPEED_UNIT = 1e-3
"""Samples per second of the integers that tell all ranks the speeds."""


class PartPlanner(Planner):
    """Plans of one loader under strategy ``async``."""

    in_order = False

    def __init__(
        self,
        control: Control,
        strategy: AsyncStrategy,
        groups: Groups,
        clock: StepClock,
        *,
        batch_size: int,
        micro_batch: int | str,
        announce: Callable[[Decision, int], None],
        is_guess: bool,
        reads_ahead: bool,
        is_dry: bool,
    ) -> None:
        """`reads_ahead`: loader workers read the next part. `is_dry`: no step is executed."""
        super().__init__(
            control,
            rank=groups.rank,
            world_size=groups.world_size,
            batch_size=batch_size,
            balance="even",
            micro_batch=micro_batch,
            announce=announce,
            is_guess=is_guess,
        )
        self._strategy = strategy
        self._groups = groups
        self._clock = clock
        self._reads_ahead = reads_ahead
        self._is_dry = is_dry
        self._ids = list(strategy.ids)
        self._todo: Sequence[int] = ()
        self._next_part: int | None = None
        self._end: Handout | None = None
        self._computing = 1
        """The rank that computes, or has computed, the part of the step."""
        self._counted_micro = 0
        self._committed: int | None = None
        self._done: int | None = None
        self._samples_of = [0.0] * groups.world_size
        self._seconds_of = [0.0] * groups.world_size

    @property
    def shares(self) -> Shares:
        """The samples of a part on each rank; the server has none."""
        return (0, *[self._batch_size] * (self.world_size - 1))

    def plan(self, epoch: int, epoch_step: int, global_step: int, start: int, num_samples: int) -> StepPlan:
        rank = self.rank or self._computing
        share = tuple(num_samples if other == rank else 0 for other in range(self.world_size))
        count = self._counted_micro if self.rank == 0 else 0
        count = count or min(num_micro(share, self.assignments[-1].caps), max(num_samples, 1))
        micro = tuple(
            tuple(size if other == rank else 0 for other in range(self.world_size))
            for size in slice_sizes(num_samples, count)
        )
        out = tuple(other for other in range(self.world_size) if other != rank)
        return StepPlan(self.generation, epoch, epoch_step, 0, start, micro, out)

    def steps(self, todo: Sequence[int]) -> Iterator[int]:
        self._follow_ranks()
        self._todo, self._committed, self._done, self._end = todo, None, None, None
        if self._is_dry:
            yield from todo
            return
        strategy = self._strategy
        self._control.exchange(Operation.AGREE)  # otherwise a rank whose script has ended would be waited for
        strategy.enter()
        self._control.apart = True
        if strategy.server is not None:
            strategy.server.begin(todo)
            while (arrival := self._wait(strategy.server.next_arrival)) is not None:
                strategy.arrival = arrival
                self._computing = self._ids.index(arrival.job.worker)
                self._counted_micro = arrival.gradient.num_micro
                yield arrival.job.part
            return
        while (handout := self._take()).job is not None:
            strategy.load_state(handout.indices, handout.state)
            strategy.job, self._next_part = handout.job, handout.next_part
            self._revision += 1
            yield handout.job.part
            if strategy.job is not None:
                raise StepError(
                    f"the loop body of part {strategy.job.part} ended without a gradient (no step.backward, or its error was "
                    "caught): under strategy='async' each part's gradient goes to the server; call step.backward in each body"
                )
        self._end = handout

    def following(self, step: int, todo: Sequence[int]) -> Iterator[int]:
        if self._next_part is not None:
            yield self._next_part

    def global_step(self, step: int, committed: int) -> int:
        if self._committed is None:  # at the beginning of the loop
            in_epoch = self._todo[-1] + 1 - len(self._todo) if self._todo else 0
            self._committed = committed - in_epoch
        return self._committed + step

    def step_index(self, step: int, done: int) -> int:
        if self.rank == 0:
            return done
        if self._done is None:
            self._done = done
        return self._done + self._todo.index(step)

    def leave_loop(self, loader: GlobalLoader, loop: StepCounter) -> None:
        # After an error this rank is about to end, and its part is another's: it does not end the epoch for all.
        if left_by_error() and not loop.stop_requested:
            self._control.meets_later = partial(self.end_loop, loader, loop)
        else:
            self.end_loop(loader, loop)

    def end_loop(self, loader: GlobalLoader, loop: StepCounter) -> None:
        if not self._strategy.in_loop:  # a dry run, or the run has ended
            return
        strategy, groups = self._strategy, self._groups
        if strategy.server is not None:
            alive: Sequence[int] = [0, *self._wait(strategy.server.finish)]
        else:
            if self._end is None:
                if strategy.worker is not None:
                    strategy.worker.leave("it left its loop")
                strategy.job = None
                self._end = self._take()
            strategy.load_state(self._end.indices, self._end.state)
            alive = [0, *self._end.alive]
        strategy.leave()
        self._control.apart = False
        self._leave_out(alive)
        strategy.send_averages()
        speeds = [int(speed / _SPEED_UNIT) for speed in self.speeds()]
        values = self.agree([loop.steps_done, *speeds, *loader.follow_values()] if groups.rank == 0 else None)
        self._samples_of = [value * _SPEED_UNIT for value in values[1 : 1 + self.world_size]]
        self._seconds_of = [float(value > 0) for value in self._samples_of]
        loader.follow(values[1 + self.world_size :])
        loop.steps_done = values[0]

    def speeds(self) -> tuple[float, ...]:
        """Return samples per second; 0 for the server, which computes nothing."""
        measured = [n / s if s else 0.0 for n, s in zip(self._samples_of, self._seconds_of, strict=True)]
        usual = sum(measured) / max(1, sum(speed > 0 for speed in measured)) or 1.0
        return (0.0, *[speed or usual for speed in measured[1:]])

    def observe(
        self,
        step: int,
        plan: StepPlan,
        seconds: Sequence[float],
        left_out: bool,
        step_s: float | None = None,
        delay_s: float = 0.0,
    ) -> None:
        if len(seconds) == self.world_size and not left_out:
            self._samples_of[self._computing] += plan.num_samples
            self._seconds_of[self._computing] += seconds[self._computing]
        if self._is_guess:
            self._settle(plan.num_samples)

    def _take(self) -> Handout:
        worker = self._strategy.worker
        if worker is None:
            raise RuntimeError("the server takes no parts")
        return self._wait(lambda: worker.take(reads_ahead=self._reads_ahead))

    def _wait(self, call: Callable[[], Value]) -> Value:
        with self._clock.segment("wait"):
            return call()

    def _leave_out(self, alive: Sequence[int]) -> None:
        """Make the groups anew without the ranks that are gone."""
        strategy, groups = self._strategy, self._groups
        if list(alive) == strategy.ids:
            return
        if groups.adopted:
            gone = ", ".join(str(rank) for rank, number in enumerate(strategy.ids) if number not in alive)
            raise PeerLostError(
                f"rank {gone} is gone, and the script's own process group can't be made anew without it"
            )
        before = groups.membership
        kept = [rank for rank, number in enumerate(strategy.ids) if number in alive]
        workers = tuple(before.workers[rank] for rank in kept)
        groups.rebuild(replace(before, number=before.number + 1, workers=workers), kept.index(groups.rank))
        strategy.ids = list(alive)
        self._follow_ranks()

    def _follow_ranks(self) -> None:
        """Count the ranks as the groups do now."""
        if self._ids == self._strategy.ids:
            return
        kept = [self._ids.index(number) for number in self._strategy.ids]
        self._samples_of = [self._samples_of[rank] for rank in kept]
        self._seconds_of = [self._seconds_of[rank] for rank in kept]
        self._ids, self.rank, self.world_size = list(self._strategy.ids), self._groups.rank, len(kept)
        caps = self.assignments[-1].caps
        self._assignments = [replace(self.assignments[-1], shares=self.shares, caps=tuple(caps[rank] for rank in kept))]
        self.may_leave = [False] * self.world_size
