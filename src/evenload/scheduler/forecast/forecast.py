"""Forecast of each job: why it is in its state, when it will start, and when it will end.

The present is the result of `decide`: its commands, its order, and its reasons for waiting jobs. The future is that order
played through once: each job in turn takes the devices that come free first, for its expected duration; a running job
further back may lose its devices once it may be preempted, and is then in line again. Later submissions, ageing and
backfilling are ignored, and times that depend on a job of unknown length are unknown. Costs about one `decide`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from evenload.scheduler.core.decide import Plan, plan
from evenload.scheduler.core.eligibility import PoolChoices, is_bound, is_young
from evenload.scheduler.core.estimates import left_s, restart_s
from evenload.scheduler.core.events import Command, Placed, ResizeRequested, StopRequested
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job
from evenload.scheduler.forecast.timeline import Timeline
from evenload.scheduler.tariff import tariff_of


@dataclass(frozen=True, slots=True)
class Forecast:
    reason: str
    """Reason for its state, for people; empty for a job that simply runs."""
    start_s: float | None = None
    """When it will get devices, of a job that has none; None if it has some, or unknown."""
    end_s: float | None = None
    position: int | None = None
    """Place in line, from 1, of a job that could start; None for any other."""
    deadline_note: str = ""
    """Reason why its deadline can't be met, or planned for."""


def forecast(snapshot: QueueSnapshot, now_s: float, most: int | None = None) -> Mapping[str, Forecast]:
    """Return each job's forecast, in the order of submission; with times for the first `most` in line, or for all."""
    return _Future(snapshot, now_s, plan(snapshot, now_s, explain=True)).run(most)


class _Gate:
    """At most so much at once, of one user's devices or jobs, or of one array's."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: list[tuple[float, int]] = []

    def add(self, end_s: float, num: int) -> None:
        self._held.append((end_s, num))

    def opens_s(self, num: int, from_s: float) -> float:
        """Return when `num` more fit."""
        held = sorted((end_s, count) for end_s, count in self._held if end_s > from_s)
        excess = sum(count for _, count in held) + num - self._most
        for end_s, count in held:
            if excess <= 0:
                break
            from_s, excess = end_s, excess - count
        return from_s if excess <= 0 else math.inf


class _Future:
    def __init__(self, snapshot: QueueSnapshot, now_s: float, planned: Plan) -> None:
        self.snapshot, self.now_s, self.planned = snapshot, now_s, planned
        self.settings = snapshot.settings
        self.choices = PoolChoices(snapshot, now_s)
        decision = planned.decision
        self.choices.restrict(decision.kinds)
        _, cheap_s = tariff_of(self.settings.cheap_hours, snapshot.midnight_s).next_change_s(now_s)
        self._not_before = dict.fromkeys(decision.held, cheap_s)
        self.timeline = Timeline(snapshot.layout, self.choices.pool_of, snapshot.closed, now_s)
        self.starts: dict[str, float] = {}
        self.ends: dict[str, float] = {}
        self.notes: dict[str, str] = {}
        self._granted: dict[str, tuple[str, ...]] = {}
        """Job → the devices that it gets now."""
        self._shared = _shared_devices(snapshot.jobs, planned.commands)
        self._positions: dict[str, int] = {}
        self._free: dict[int, int] = {}
        """Pool → number of devices that are free now and not given to a job."""
        self._held = {device for job in snapshot.jobs for device in (*job.devices, *job.target)}
        self._next_ends: list[tuple[float, str, set[int]]] = []
        """When each job that holds devices ends, soonest first, and the pools of its devices."""
        self._soft: dict[str, float] = {}
        """Running job → from when on others may displace it."""
        self._gates: dict[tuple[str, str], _Gate] = {}
        for name, user in snapshot.users.items():
            for what, limit in (("devices", user.limits.max_devices), ("jobs", user.limits.max_running)):
                if limit is not None:
                    self._gates[what, name] = _Gate(limit)
        for job in snapshot.jobs:
            if job.spec.array_limit is not None:
                self._gates.setdefault(("array", job.spec.array), _Gate(job.spec.array_limit))

    def run(self, most: int | None) -> dict[str, Forecast]:
        self._take_present()
        self._note_line()
        for num, job in enumerate(self.planned.order):
            if most is not None and num >= most:
                break
            self._take_turn(job)
        known = {job.id for job in self.planned.order}
        later = [j for j in self.snapshot.jobs if j.id not in known and j.state is JobState.PENDING]
        for job in later[:most]:
            self._take_later(job)
        return {job.id: self._forecast(job) for job in self.snapshot.jobs}

    def _take_present(self) -> None:
        stopping: dict[str, str] = {}
        resized: dict[str, tuple[str, ...]] = {}
        for command in self.planned.commands:
            if isinstance(command, StopRequested):
                stopping[command.job] = command.reason
            elif isinstance(command, ResizeRequested):
                resized[command.job] = command.devices
            elif isinstance(command, Placed):
                self._granted[command.job] = command.devices
                self.starts[command.job] = self.now_s
                self.notes[command.job] = "gets its devices now"
        running = {job.id for job in self.planned.order if job.state is JobState.RUNNING}
        behind = running if self.planned.decision.preempts else set()
        for job in self.snapshot.jobs:
            if not job.devices:
                continue
            if job.id in stopping:
                self.notes[job.id] = stopping[job.id]
                continue
            if job.state is JobState.PREEMPTING:
                continue
            is_movable = job.id in behind and not (self._shared and self._shared.intersection(job.devices))
            self._take_holder(job, resized.get(job.id, job.target or job.devices), is_movable)

    def _take_holder(self, job: Job, devices: tuple[str, ...], is_movable: bool) -> None:
        """Let a job keep its devices, at least until its turn in the order."""
        slots = [self.snapshot.layout.index[device] for device in devices]
        end_s = self._end_s(job, self.now_s, is_fresh=job.state is not JobState.RUNNING)
        self.ends[job.id] = until_s = end_s
        if is_movable and job.id not in self.starts and not is_bound(job, self.settings, self.now_s):
            young_until_s = job.attempt_began_s + self.settings.min_run_s
            soft_s = young_until_s if is_young(job, self.settings, self.now_s) else self.now_s
            until_s = self._soft[job.id] = min(end_s, soft_s)
        else:
            self._pass_gates(job, end_s, len(slots))
        self._occupy(slots, until_s)

    def _occupy(self, slots: Sequence[int], until_s: float) -> None:
        """Mark devices as used; a shared one until the last of its jobs has ended."""
        if self._shared and any(self.snapshot.layout.devices[slot].id in self._shared for slot in slots):
            until_s = max(until_s, *(self.timeline.free_s(slot) for slot in slots))
        self.timeline.occupy(slots, until_s)

    def _take_turn(self, job: Job) -> None:
        if job.state is JobState.RUNNING:
            soft_s = self._soft.get(job.id)
            if soft_s is None and job.id not in self.notes:
                return
            slots = [self.snapshot.layout.index[device] for device in job.devices]
            if soft_s is not None and all(self.timeline.free_s(slot) in (soft_s, math.inf) for slot in slots):
                self.timeline.occupy(slots, self.ends[job.id])
                self._pass_gates(job, self.ends[job.id], len(slots))
                return
            self.ends.pop(job.id, None)
        if (devices := self._granted.get(job.id)) is not None:
            self._place(job, self.now_s, [self.snapshot.layout.index[device] for device in devices])
        else:
            self._find(job, self._not_before.get(job.id, self.now_s))

    def _take_later(self, job: Job) -> None:
        """Place a job that is not in line yet: it waits for others, or for a time."""
        if job.is_held or job.doomed:
            return
        from_s = max(self.now_s, job.spec.not_before_s or 0.0)
        for name in job.unmet:
            from_s = max(from_s, self.ends.get(name, math.inf))
        if from_s < math.inf:
            self._find(job, from_s)

    def _find(self, job: Job, from_s: float) -> None:
        least, choice = job.spec.needs.min_devices, self.choices.of(job)
        for key, num in self._counts(job, least):
            if (gate := self._gates.get(key)) is not None:
                from_s = gate.opens_s(num, from_s)
        found = self.timeline.earliest(choice, least, from_s) if from_s < math.inf else None
        if found is not None:
            self._place(job, found[0], found[1])

    def _place(self, job: Job, start_s: float, slots: tuple[int, ...] | list[int]) -> None:
        if job.state is JobState.PENDING:
            self.starts[job.id] = start_s
        end_s = self.ends[job.id] = self._end_s(job, start_s, is_fresh=True)
        self._occupy(slots, end_s)
        self._pass_gates(job, end_s, len(slots))

    def _counts(self, job: Job, num: int) -> tuple[tuple[tuple[str, str], int], ...]:
        return (("devices", job.spec.user), num), (("jobs", job.spec.user), 1), (("array", job.spec.array), 1)

    def _pass_gates(self, job: Job, end_s: float, num_devices: int) -> None:
        for key, num in self._counts(job, num_devices):
            if (gate := self._gates.get(key)) is not None:
                gate.add(end_s, num)

    def _end_s(self, job: Job, start_s: float, is_fresh: bool) -> float:
        expected_s = left_s(job, self.now_s)
        if expected_s is None:
            return math.inf
        is_first = job.attempt == 0 or (job.attempt == 1 and job.state is JobState.STARTING)
        if is_fresh and not is_first:
            expected_s += restart_s(job, self.settings)
        limit_s = job.spec.hard_limit_s
        if limit_s is not None:
            expected_s = min(expected_s, max(0.0, limit_s - job.held_until(self.now_s)))
        return start_s + expected_s

    def _forecast(self, job: Job) -> Forecast:
        end_s = self.ends.get(job.id, math.inf)
        start_s = self.starts.get(job.id) if job.state is JobState.PENDING else None
        position = self._positions.get(job.id)
        reason, note = self._reason(job), self.planned.decision.deadline_notes.get(job.id, "")
        reason = "; ".join(part for part in (note, reason) if part)
        return Forecast(reason, start_s, end_s if end_s < math.inf else None, position, note)

    def _note_line(self) -> None:
        """Note who waits in which place, what is free now, and whose devices come free first."""
        waiting = [job.id for job in self.planned.order if job.state is JobState.PENDING]
        self._positions = {name: place for place, name in enumerate(waiting, 1)}
        granted = {device for devices in self._granted.values() for device in devices}
        for slot, device in enumerate(self.snapshot.layout.devices):
            if self.timeline.free_s(slot) <= self.now_s and device.id not in granted and device.id not in self._held:
                pool = self.choices.pool_of[slot]
                self._free[pool] = self._free.get(pool, 0) + 1
        index, pool_of = self.snapshot.layout.index, self.choices.pool_of
        for job in self.snapshot.jobs:
            if job.devices and (end_s := self.ends.get(job.id, math.inf)) < math.inf:
                self._next_ends.append((end_s, job.id, {pool_of[index[device]] for device in job.devices}))
        self._next_ends.sort(key=lambda end: end[:2])

    def _details(self, job: Job) -> str:
        """Say what a waiting job needs, what of it is free, and what comes next: no two jobs wait for quite the same."""
        least = job.spec.needs.min_devices
        pools, start_s = self.choices.of(job).pools, self.starts.get(job.id, math.inf)
        free = sum(self._free.get(pool, 0) for pool in pools)
        parts = [
            f"it needs {least} device{'s' if least > 1 else ''}, {free} that it can use {'is' if free == 1 else 'are'} free"
        ]
        if (place := self._positions.get(job.id, 1)) > 1:
            parts.append(f"{place - 1} job{'s go' if place > 2 else ' goes'} first")
        end_s, name, _ = next((end for end in self._next_ends if end[2].intersection(pools)), (math.inf, "", None))
        if end_s < math.inf and end_s <= start_s:  # it may start earlier: a job may make room for it
            parts.append(f"job {name} ends next, in about {max(1, round((end_s - self.now_s) / 60))} min")
        return "; ".join(parts)

    def _reason(self, job: Job) -> str:
        known = self.planned.waits.get(job.id) or self.notes.get(job.id)
        if job.id in self._positions and job.id not in self._granted:
            return f"{known or 'waits for those before it in line'}: {self._details(job)}"
        if known:
            return known
        if job.state is JobState.PENDING:
            return job.doomed or "waits for those before it in line"
        if job.state is JobState.STARTING:
            return "its program is being started"
        return "" if job.state is JobState.RUNNING else job.reason


def _shared_devices(jobs: Iterable[Job], commands: Iterable[Command] = ()) -> frozenset[str]:
    once: set[str] = set()
    several: set[str] = set()
    given = [command.devices for command in commands if isinstance(command, Placed)]
    for devices in (*(job.devices for job in jobs if job.devices), *given):
        several.update(once.intersection(devices))
        once.update(devices)
    return frozenset(several)
