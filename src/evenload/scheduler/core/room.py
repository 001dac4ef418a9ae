"""Who must leave so that a more deserving job can start: the least deserving, no more of them than needed.

A pending job may displace a running one that stands behind it in the policy's order, can be preempted, was not preempted
too often within the hour, and either has had its minimum run time or is of a lower class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Movers:
    """The running jobs that stand behind the place in the order at which the plan has arrived."""

    def __init__(self, in_order: list[Mover], pool_of: Sequence[int], host_of: Sequence[int]) -> None:
        """Takes them the most deserving first."""
        self._tail = in_order
        self._pool_of, self._host_of = pool_of, host_of
        self._num_passed = 0
        self._gone: set[str] = set()
        self._open: dict[int, int] = {}
        self._young: dict[int, dict[int, int]] = {}
        self._failed: dict[tuple[Choice, int], int] = {}
        self._num_left = 0
        for mover in in_order:
            self._count(mover, 1)

    def _count(self, mover: Mover, sign: int) -> None:
        job, slots, is_young = mover
        counts = self._young.setdefault(job.spec.priority, {}) if is_young else self._open
        pool_of = self._pool_of
        for slot in slots:
            pool = pool_of[slot]
            counts[pool] = counts.get(pool, 0) + sign
        self._num_left += sign * len(slots)

    @property
    def is_empty(self) -> bool:
        """Whether nobody is left who could leave."""
        return self._num_left == 0

    def is_gone(self, job: Job) -> bool:
        """Whether it was displaced."""
        return job.id in self._gone

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

    def is_hopeless(self, job: Job, choice: Choice, num: int) -> bool:
        """Whether it was tried in vain to make room for such a gang, or for a smaller one."""
        return self._num_left == 0 or self._failed.get((choice, job.spec.priority), num + 1) <= num

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
        while len(self._tail) > self._num_passed and self._tail[-1].job.id in self._gone:
            self._tail.pop()
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
        pools = frozenset(choice.pools)
        pool_of = self._pool_of
        counts: dict[object, int] = {}
        if by_key is None:
            counts[_ANYWHERE] = stock.soon.total(choice.pools)
        else:
            for slot in stock.soon.free():
                if pool_of[slot] in pools:
                    counts[by_key(slot)] = counts.get(by_key(slot), 0) + 1
        key_of = by_key or _anywhere
        found: list[Mover] = []
        place: object = None
        for index in range(len(self._tail) - 1, self._num_passed - 1, -1):
            mover = self._tail[index]
            if mover.job.id in self._gone or (mover.is_young and mover.job.spec.priority >= job.spec.priority):
                continue
            useful = [slot for slot in mover.slots if pool_of[slot] in pools]
            if not useful:
                continue
            found.append(mover)
            for slot in useful:
                counts[key_of(slot)] = counts.get(key_of(slot), 0) + 1
            place = next((k for k in dict.fromkeys(map(key_of, useful)) if counts[k] >= num), None)
            if place is not None:
                break
        else:
            return None
        return self._needed(found, counts[place] - num, place, pools, key_of)

    def _needed(
        self, found: list[Mover], spare: int, place: object, pools: frozenset[int], key_of: Callable[[int], object]
    ) -> list[Mover]:
        """Without those that others make unnecessary; the more deserving are spared first."""
        needed = []
        for mover in reversed(found):
            num = sum(self._pool_of[slot] in pools and key_of(slot) == place for slot in mover.slots)
            if num <= spare:
                spare -= num
            else:
                needed.append(mover)
        return needed


_ANYWHERE = 0


def _anywhere(slot: int) -> object:
    """The key of a gang that may stand anywhere: all devices count together."""
    return _ANYWHERE
