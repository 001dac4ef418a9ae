"""Who must leave so that a more deserving job can start: the least deserving, no more of them than needed.

A pending job may displace a running one that stands behind it in the policy's order, can be preempted, was not preempted
too often within the hour, and either has had its minimum run time or is of a lower class.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evenload.scheduler.core.fleet import Choice
from evenload.scheduler.core.stock import Stock
from evenload.scheduler.core.values import Job


class Mover(NamedTuple):
    """A running job that may have to leave."""

    job: Job
    slots: Sequence[int]
    """Indices of its devices that others could use."""
    is_young: bool
    """Only a job of a higher class may displace it."""


@dataclass
class _Line:
    """Movers as gangs of one choice and class have looked at them, from the least deserving up."""

    spared: list[int]
    """Places of those who could leave and had not to; falling."""
    end: int
    """From here on all were looked at."""


class Movers:
    """The running jobs that stand behind the place in the order at which the plan has arrived."""

    def __init__(self, in_order: list[Mover], pool_of: Sequence[int], host_of: Sequence[int]) -> None:
        """Takes them the most deserving first."""
        self._tail = in_order
        self._pool_of, self._host_of = pool_of, host_of
        self._num_passed = 0
        self._gone: set[str] = set()
        self._open: defaultdict[int, int] = defaultdict(int)
        self._young: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._failed: dict[tuple[Choice, int], int] = {}
        self._lines: dict[tuple[Choice, int], _Line] = {}
        self._num_left = 0
        for mover in in_order:
            self._count(mover, 1)

    def _count(self, mover: Mover, sign: int) -> None:
        job, slots, is_young = mover
        counts = self._young[job.spec.priority] if is_young else self._open
        pool_of = self._pool_of
        for slot in slots:
            counts[pool_of[slot]] += sign
        self._num_left += sign * len(slots)

    @property
    def is_empty(self) -> bool:
        """Whether nobody is left who could leave."""
        return self._num_left == 0

    def displaced(self) -> set[str]:
        """All that were displaced."""
        return self._gone

    def behind(self) -> set[str]:
        """Those that stay so far, but may still have to leave."""
        return {m.job.id for m in self._tail[self._num_passed :]} - self._gone

    def pass_by(self, job: Job) -> None:
        """The plan has come to this running job, which is not gone: it stays, and only those behind it may still leave."""
        while (mover := self._tail[self._num_passed]).job.id != job.id:  # those displaced before are passed too
            self._num_passed += 1
        self._num_passed += 1
        self._count(mover, -1)

    def keep(self, name: str) -> None:
        """This job stays, wherever it stands: somebody has come to its device (`core.sharing`)."""
        for index in range(self._num_passed, len(self._tail)):
            if (mover := self._tail[index]).job.id == name:
                self._count(mover, -1)
                self._tail[index] = mover._replace(slots=())
                return

    def make_room(self, job: Job, choice: Choice, num: int, stock: Stock) -> bool:
        """Displaces whom it must for `num` devices of `choice`; False, and nobody displaced, where that can't be."""
        priority, is_single = (
            job.spec.priority,
            not choice.one_host and (not choice.one_kind or len(choice.groups) == 1),
        )
        if self._failed.get((choice, priority), num + 1) <= num:
            return False
        if is_single:
            pools = choice.pools
            most = stock.soon.total(pools) + sum(self._open.get(p, 0) for p in pools)
            most += sum(c.get(p, 0) for other, c in self._young.items() if other < priority for p in pools)
            found = self._collect(job, choice, num, stock, None) if most >= num else None
        else:
            found = self._collect(job, choice, num, stock, self._key_of(choice))
        if found is None:
            self._failed[choice, priority] = num
            return False
        for mover in found:
            self._gone.add(mover.job.id)
            self._count(mover, -1)
            stock.comes_free(mover.slots)
        return True

    def _key_of(self, choice: Choice) -> Callable[[int], object]:
        kind_of = {pool: number for number, group in enumerate(choice.groups) for pool in group}

        def key(slot: int) -> object:
            host = self._host_of[slot] if choice.one_host else -1
            return host, kind_of.get(self._pool_of[slot], -1) if choice.one_kind else -1

        return key

    def _collect(
        self, job: Job, choice: Choice, num: int, stock: Stock, by_key: Callable[[int], object] | None
    ) -> list[Mover] | None:
        """The least deserving that together with what is free make a place; devices count together by their key."""
        pools, pool_of = frozenset(choice.pools), self._pool_of
        counts: defaultdict[object, int] = defaultdict(int)
        if by_key is None:
            counts[_ANYWHERE] = stock.soon.total(choice.pools)
        else:
            for slot in stock.soon.free():
                if pool_of[slot] in pools:
                    counts[by_key(slot)] += 1
        found: list[tuple[Mover, dict[object, int]]] = []
        with contextlib.closing(self._candidates(choice, job.spec.priority, pools)) as candidates:
            for mover in candidates:
                useful = [slot for slot in mover.slots if pool_of[slot] in pools]
                adds: dict[object, int] = {}
                if by_key is None:
                    adds[_ANYWHERE] = len(useful)
                else:
                    for key in map(by_key, useful):
                        adds[key] = adds.get(key, 0) + 1
                found.append((mover, adds))
                for key, added in adds.items():
                    counts[key] += added
                for key in adds:
                    if counts[key] >= num:
                        return _needed(found, counts[key] - num, key)
        return None

    def _candidates(self, choice: Choice, priority: int, pools: frozenset[int]) -> Generator[Mover, None, None]:
        """Those who may have to leave for a gang of such a choice and class, the least deserving first.

        Who was looked at for another such gang is not looked at again, unless he was spared.
        """
        line = self._lines.setdefault((choice, priority), _Line([], len(self._tail)))
        kept: list[int] = []
        num_seen = 0
        try:
            for index in line.spared:
                if index < self._num_passed:
                    del line.spared[num_seen:]
                    return
                num_seen += 1
                if (mover := self._tail[index]).job.id not in self._gone:
                    kept.append(index)
                    yield mover
            while line.end > self._num_passed:
                line.end -= 1
                mover = self._tail[line.end]
                if mover.job.id in self._gone or (mover.is_young and mover.job.spec.priority >= priority):
                    continue
                if any(self._pool_of[slot] in pools for slot in mover.slots):
                    kept.append(line.end)
                    yield mover
        finally:
            line.spared[:num_seen] = kept


def _needed(found: list[tuple[Mover, dict[object, int]]], spare: int, place: object) -> list[Mover]:
    """Without those that others make unnecessary; the more deserving are spared first."""
    needed = []
    for mover, adds in reversed(found):
        num = adds.get(place, 0)
        if num <= spare:
            spare -= num
        else:
            needed.append(mover)
    return needed


_ANYWHERE = 0
"""The key of a gang that may stand anywhere: all devices count together."""
