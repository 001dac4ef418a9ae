"""`PartLedger`: which part of an epoch goes to which worker, and which gradient is applied next. Pure, without I/O.

A part is one global batch. A worker receives it together with the parameters after V updates; its gradient is applied as
update number U + 1, and its staleness is U - V. No gradient is applied with a staleness above the bound s (stale synchronous
parallel: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS).

Note [The bound holds by deadlines]
  A gradient of parameters V must be applied while U <= V + s: that is its deadline. With all parts that are computed or wait
  sorted by deadline, d_1 <= d_2 <= ..., all of them can be applied in time, one after the other, if U + i - 1 <= d_i for each i.
  A part is handed out, and a gradient applied, only if this still holds afterwards. So a stalled worker stops the updates only
  when its own deadline has come. The others then still compute s more parts each ahead, whose gradients wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass


def ends_sooner_without(own_s: float, others_s: Collection[float], num_left: int) -> bool:
    """Return whether the others compute all parts that are left before a much slower worker would have computed one.

    `own_s` and `others_s` are the seconds that each needs for a part; the others are half done with one each. At the end of an
    epoch everybody waits for the part that ends last. The fastest worker never waits for others.
    """
    rate = sum(1 / seconds for seconds in others_s)
    return rate > 0 and own_s > 1.5 * min(others_s) and (num_left + len(others_s) / 2) / rate < own_s


@dataclass(frozen=True)
class PartJob:
    """A part that a worker has received."""

    number: int
    """Unique; a gradient with another number than the ledger knows is of a worker that was given up."""
    worker: int
    part: int
    version: int
    """Number of updates in the parameters that the worker received with it."""


class PartLedger:
    """Each part is applied once: one that is lost goes to the next worker that asks."""

    def __init__(self, parts: Iterable[int], staleness: int) -> None:
        self.updates = 0
        """Number of updates so far."""
        self._staleness = staleness
        self._todo = deque(parts)
        self._jobs: dict[int, PartJob] = {}
        """Handed out and not yet applied, by number."""
        self._arrived: list[int] = []
        """Numbers of jobs whose gradients wait, in the order of their arrival."""
        self._reserved: dict[int, int] = {}
        """By worker, the part that it receives next, where it reads ahead."""
        self._num_jobs = 0

    @property
    def is_done(self) -> bool:
        return not (self._todo or self._reserved or self._jobs)

    @property
    def num_left(self) -> int:
        """Parts that nobody has received yet."""
        return len(self._todo) + len(self._reserved)

    def hand_out(self, worker: int, *, reserve: bool = False) -> PartJob | None:
        """Return the next part for a worker; None if it must wait, or none is left.

        `reserve`: keep the part after it for this worker, which reads it ahead, unless another is free at the end of the epoch.
        """
        if not (self._todo or self._reserved):
            return None
        if not self._fits(self.updates, [*self._deadlines(), self.updates + self._staleness]):
            return None
        part = self._reserved.pop(worker, None)
        if part is None:
            part = self._todo.popleft() if self._todo else self._reserved.pop(max(self._reserved))
        if reserve and self._todo:
            self._reserved[worker] = self._todo.popleft()
        self._num_jobs += 1
        job = PartJob(self._num_jobs, worker, part, self.updates)
        self._jobs[job.number] = job
        return job

    def give_back(self, worker: int) -> None:
        """Let others take the part that is kept for a worker."""
        if (part := self._reserved.pop(worker, None)) is not None:
            self._todo.appendleft(part)

    def reserved_for(self, worker: int) -> int | None:
        return self._reserved.get(worker)

    def arrive(self, number: int) -> bool:
        """Note that the gradient of a job has arrived; False if the job was given up."""
        if number not in self._jobs or number in self._arrived:
            return False
        self._arrived.append(number)
        return True

    def next_update(self) -> PartJob | None:
        """Return the first gradient in the order of arrival that may be applied now, and count its update."""
        for number in self._arrived:
            others = [job.version + self._staleness for job in self._jobs.values() if job.number != number]
            if self._fits(self.updates + 1, others):
                self._arrived.remove(number)
                self.updates += 1
                return self._jobs.pop(number)
        return None

    def lose(self, worker: int) -> list[int]:
        """Give up what a worker computes, and return these parts, which others take; what has arrived stays."""
        lost = [job for job in self._jobs.values() if job.worker == worker and job.number not in self._arrived]
        for job in lost:
            del self._jobs[job.number]
        parts = sorted(job.part for job in lost)
        kept = self._reserved.pop(worker, None)
        self._todo = deque(sorted([*self._todo, *parts, *(() if kept is None else (kept,))]))
        return parts

    def stop(self) -> None:
        """Hand out nothing more."""
        self._todo.clear()
        self._reserved.clear()

    def job(self, number: int) -> PartJob:
        """Return a job that is not applied yet."""
        return self._jobs[number]

    def computing(self) -> list[PartJob]:
        """Return the jobs whose gradients have not arrived."""
        return [job for job in self._jobs.values() if job.number not in self._arrived]

    def _deadlines(self) -> list[int]:
        return [job.version + self._staleness for job in self._jobs.values()]

    def _fits(self, updates: int, deadlines: Iterable[int]) -> bool:
        return all(updates + index <= deadline for index, deadline in enumerate(sorted(deadlines)))
