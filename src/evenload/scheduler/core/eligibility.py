"""Classify jobs (running, eligible to start, to be ended) and devices (free, coming free) before planning.

`PoolChoices` finds the pools of devices that a job may use, reservations included.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from evenload.scheduler.core.events import Cancelled, Command, StopRequested
from evenload.scheduler.core.placement import PoolChoice, pool_choice
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.states import PENDING, RUNNING, JobState
from evenload.scheduler.core.values import Job, Needs, Reservation, Settings
from evenload.scheduler.time_text import span

_HOUR_S = 3600.0
_MOST_KNOWN = 10_000


class Eligibility:
    """The jobs and devices of a snapshot by what can happen to them."""

    def __init__(self, snapshot: QueueSnapshot, now_s: float) -> None:
        self._now_s, index = now_s, snapshot.layout.index
        self.running: list[Job] = []
        """RUNNING, and not about to be ended."""
        self.pending: list[Job] = []
        """PENDING, and nothing but devices and limits keeps them from starting."""
        self.holders: list[Job] = []
        self.slots: dict[str, list[int]] = {}
        """Job → indices of its devices, of those in `holders`."""
        self.commands: list[Command] = []
        """Commands that are due whatever the policy decides."""
        self.coming: list[int] = []
        """Devices of jobs that are saving, and will not keep them."""
        self.waits: dict[str, str] = {}
        """Job → reason why it can't start, of those that are not in `pending`."""
        self.closed = frozenset([index[device] for device in snapshot.closed if device in index])
        """Devices on which nothing new may start."""
        taken = set(self.closed)
        for job in snapshot.jobs:
            spec = job.spec
            if job.state is not PENDING:
                self.holders.append(job)
                self.slots[job.id] = slots = [index[device] for device in job.devices]
                target = [index[device] for device in job.target]
                taken.update(slots, target)
                self._sort_holder(job, target)
            elif job.doomed:
                self.commands.append(Cancelled(now_s, job.id, job.doomed))
            elif job.is_held:
                self.waits[job.id] = "its owner holds it back"
            elif job.unmet:
                self.waits[job.id] = f"waits for job {', '.join(job.unmet)} to end"
            elif spec.not_before_s is not None and spec.not_before_s > now_s:
                self.waits[job.id] = f"is not to start for another {span(spec.not_before_s - now_s)}"
            else:
                self.pending.append(job)
        self.free = [slot for slot in range(len(snapshot.layout.devices)) if slot not in taken]
        if snapshot.reservations:
            self._clear_reserved(snapshot)

    def usable(self, job: Job) -> list[int]:
        """Return a holder's devices that others could use once it leaves them."""
        slots = self.slots[job.id]
        return [slot for slot in slots if slot not in self.closed] if self.closed else slots

    def _sort_holder(self, job: Job, target: Sequence[int]) -> None:
        limit_s = job.spec.hard_limit_s
        if job.state is JobState.PREEMPTING:
            self.coming += self.usable(job)
        elif limit_s is not None and job.held_until(self._now_s) >= limit_s:
            self._stop(job, JobState.FAILED, f"its time limit of {span(limit_s)} is over")
        elif job.state is RUNNING:
            self.running.append(job)
        elif job.state is JobState.RESIZING:
            self.coming += [slot for slot in self.usable(job) if slot not in target]

    def _stop(self, job: Job, then: JobState, reason: str) -> None:
        self.commands.append(StopRequested(self._now_s, job.id, then, reason))
        self.coming += self.usable(job)

    def _clear_reserved(self, snapshot: QueueSnapshot) -> None:
        """Preempt jobs on devices that are reserved for other users from now on."""
        active = [r for r in snapshot.reservations if r.start_s <= self._now_s < r.end_s]
        staying = []
        for job in self.running:
            others = (r for r in active if job.spec.user not in r.users and not r.devices.isdisjoint(job.devices))
            if (reservation := next(others, None)) is not None and job.spec.preemptible:
                self._stop(job, PENDING, f"reservation {reservation.id} has begun")
            else:
                staying.append(job)
        self.running = staying


def is_bound(job: Job, settings: Settings, now_s: float) -> bool:
    """Return whether no job may preempt this one now: it isn't preemptible, or was preempted too often within the last hour."""
    if not job.spec.preemptible:
        return True
    most = settings.max_preemptions_per_hour
    if job.spec.priority < 0 or len(job.preempted_s) < most:
        return False
    return sum(time_s > now_s - _HOUR_S for time_s in job.preempted_s) >= most


def is_young(job: Job, settings: Settings, now_s: float) -> bool:
    """Return whether its minimum run time protects it from jobs of its class; not over its soft limit."""
    return now_s - job.attempt_began_s < settings.min_run_s and not is_overdue(job, now_s)


def is_overdue(job: Job, now_s: float) -> bool:
    return job.spec.soft_limit_s is not None and job.held_until(now_s) >= job.spec.soft_limit_s


class PoolChoices:
    """The pools each job may use, computed once for all jobs with equal needs."""

    def __init__(self, snapshot: QueueSnapshot, now_s: float) -> None:
        self._snapshot, self._now_s = snapshot, now_s
        self._reservations = [r for r in snapshot.reservations if r.end_s > now_s]
        is_shared = not self._reservations and len(snapshot.layout.choices) < _MOST_KNOWN
        self._known: dict[Hashable, tuple[Needs, PoolChoice]] = snapshot.layout.choices if is_shared else {}
        self._only: Mapping[str, tuple[str, ...]] = {}
        self.pool_of, self._zones = _zones(snapshot, self._reservations)

    def of(self, job: Job) -> PoolChoice:
        """Return the pools, as groups of one kind each, the best first."""
        spec = job.spec
        key: Hashable = id(spec.needs)  # it is kept beside the choice, and most are one object
        if self._reservations or job.id in self._only:
            key = (key, self._only.get(job.id), spec.user, spec.preemptible, spec.hard_limit_s)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = spec.needs, self._work_out(job)
        return known[1]

    def restrict(self, kinds: Mapping[str, tuple[str, ...]]) -> None:
        """Let some jobs use only one kind of these at a time, the first that has place."""
        self._only = kinds

    def _work_out(self, job: Job) -> PoolChoice:
        layout, needs = self._snapshot.layout, job.spec.needs
        if (only := self._only.get(job.id)) is not None:
            needs = replace(needs, kinds=only, one_kind=True)
        ranked: list[tuple[float, float, int]] = []
        for zone, (pool_index, held) in enumerate(self._zones):
            pool = layout.pools[pool_index]
            if pool.suits(needs) and all(self._may_use(job, r) for r in held):
                mine = any(job.spec.user in r.users and r.start_s <= self._now_s for r in held)
                ranked.append((-math.inf if mine else -pool.speed, pool.memory_bytes, zone))
        groups: dict[str, list[int]] = {kind: [] for kind in only or ()}
        for _, _, zone in sorted(ranked):
            groups.setdefault(layout.pools[self._zones[zone][0]].kind, []).append(zone)
        return pool_choice(tuple([tuple(zones) for zones in groups.values() if zones]), needs.one_host, needs.one_kind)

    def _may_use(self, job: Job, reservation: Reservation) -> bool:
        """Return whether a reservation is for the job's user, or the job has ended or can be preempted before it begins."""
        if job.spec.user in reservation.users:
            return True
        if reservation.start_s <= self._now_s:
            return False
        if job.spec.preemptible:
            return self._now_s + self._snapshot.settings.min_run_s <= reservation.start_s
        return job.spec.hard_limit_s is not None and self._now_s + job.spec.hard_limit_s <= reservation.start_s


def _zones(
    snapshot: QueueSnapshot, reservations: list[Reservation]
) -> tuple[Sequence[int], list[tuple[int, tuple[Reservation, ...]]]]:
    """Return device → zone, and each zone's pool and reservations; a zone is a pool where nothing is reserved."""
    layout = snapshot.layout
    zones: list[tuple[int, tuple[Reservation, ...]]] = [(pool, ()) for pool in range(len(layout.pools))]
    if not reservations:
        return layout.pool_of, zones
    held: defaultdict[int, tuple[Reservation, ...]] = defaultdict(tuple)
    for reservation in reservations:
        for device in sorted(reservation.devices & layout.index.keys()):  # a set has another order in each process
            held[layout.index[device]] += (reservation,)
    pool_of = list(layout.pool_of)
    numbers: dict[tuple[int, tuple[str, ...]], int] = {}
    for slot, of_slot in held.items():
        key = (layout.pool_of[slot], tuple(r.id for r in of_slot))
        if key not in numbers:
            numbers[key] = len(zones)
            zones.append((layout.pool_of[slot], of_slot))
        pool_of[slot] = numbers[key]
    return pool_of, zones
