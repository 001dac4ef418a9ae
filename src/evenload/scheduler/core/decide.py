"""``decide(snapshot, now_s)``: the commands to give now. Pure: the same snapshot and time give the same commands.

The policy orders the jobs, and each gets devices in that order, as far as limits, reservations and protections allow. It
starts at once on free devices; else it waits for devices that are coming free, or preempts less deserving jobs and waits
for theirs; else, if it is the first that can't start, later jobs may not delay it (`core.backfill`). No state is kept
between calls. Cost: one pass over the jobs, one sort, and a few operations for each device given out.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from evenload.scheduler.core.availability import Availability
from evenload.scheduler.core.backfill import BackfillWindow, Release, backfill_window
from evenload.scheduler.core.changes import JobChanges
from evenload.scheduler.core.eligibility import (
    Eligibility,
    PoolChoices,
    is_bound,
    is_overdue,
    is_young,
)
from evenload.scheduler.core.estimates import end_s, oldest_work
from evenload.scheduler.core.events import Command, Placed, StopRequested
from evenload.scheduler.core.limits import LimitUse
from evenload.scheduler.core.placement import PoolChoice, place_counter
from evenload.scheduler.core.policy import PolicyDecision, PolicyInput
from evenload.scheduler.core.preemption import PreemptionCandidates
from evenload.scheduler.core.sharing import Sharing
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.tariff import tariff_of
from evenload.scheduler.core.values import Job
from evenload.scheduler.policies import policy_named
from evenload.scheduler.policies.starvation import is_starving


@dataclass(frozen=True)
class Plan:
    """Commands, and the reason why each waiting job waits."""

    commands: tuple[Command, ...]
    waits: dict[str, str] = field(default_factory=dict)
    """Job → why it has no devices; complete after ``plan(..., explain=True)`` alone."""
    order: tuple[Job, ...] = ()
    """Those that run or could, the most deserving first."""
    decision: PolicyDecision | None = None
    """Of the policy; None where there was nothing for it to decide."""


def decide(snapshot: QueueSnapshot, now_s: float) -> tuple[Command, ...]:
    """Return what to do now: start, resize, preempt, end; empty if nothing needs to change."""
    with _no_collecting():
        return plan(snapshot, now_s).commands


@contextmanager
def _no_collecting() -> Iterator[None]:
    """Pause the garbage collector: a plan holds no cycles, and searching all jobs for some takes up to a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def plan(snapshot: QueueSnapshot, now_s: float, explain: bool = False) -> Plan:
    """Decide, with reasons for waiting jobs if `explain`: these cost a pass over all jobs."""
    return _Planning(snapshot, now_s, explain).run()


class _Planning:
    def __init__(self, snapshot: QueueSnapshot, now_s: float, explain: bool) -> None:
        self.snapshot, self.settings, self.now_s, self.explain = snapshot, snapshot.settings, now_s, explain
        self.eligibility = eligibility = Eligibility(snapshot, now_s)
        self.choices = PoolChoices(snapshot, now_s)
        pool_of, packing = self.choices.pool_of, self.settings.packing
        self.sharing = Sharing(snapshot, eligibility, now_s, pool_of)
        self.availability = Availability(snapshot.layout, pool_of, packing, eligibility.free, eligibility.coming)
        self.limits = LimitUse(snapshot.users, (*eligibility.holders, *self.sharing.followers))
        self.decision: PolicyDecision
        self.changes: JobChanges
        self.candidates: PreemptionCandidates
        self.window: BackfillWindow | None = None
        self._most: dict[PoolChoice, int] = {}
        self.starts: dict[str, tuple[Job, tuple[int, ...]]] = {}
        self.is_anyone_waiting = False

    def run(self) -> Plan:
        eligibility, settings, now_s = self.eligibility, self.settings, self.now_s
        if self._is_settled():
            return Plan(tuple(eligibility.commands), eligibility.waits)
        bound = {job.id for job in eligibility.running if is_bound(job, settings, now_s)}
        young = {job.id for job in eligibility.running if is_young(job, settings, now_s)}
        keeping = frozenset(bound | young)
        self.decision = policy_named(settings.policy)(self._inputs(keeping))
        self.choices.restrict(self.decision.kinds)
        order = self._ordered()
        self.changes = JobChanges(
            self.snapshot, now_s, eligibility, self.availability, self.choices, self.limits, self.decision
        )
        self.changes.stop_held(keeping)
        self.changes.shrink(keeping)
        fixed = bound | self.changes.changed
        movable = [j for j in order if j.state is JobState.RUNNING and j.id not in fixed and self.decision.preempts]
        candidates = [(job, eligibility.usable(job), job.id in young) for job in movable]
        self.candidates = PreemptionCandidates(candidates, self.choices.pool_of, self.snapshot.layout.host_of)
        self._give_out(order)
        if self.decision.sizes is None:
            self._widen()
        return Plan(tuple(self._commands()), eligibility.waits, tuple(order), self.decision)

    def _is_settled(self) -> bool:
        """Return whether there is nothing for a policy to decide."""
        running, layout = self.eligibility.running, self.snapshot.layout
        is_elastic = any(job.spec.needs.min_devices < job.spec.needs.max_devices for job in running)
        may_move = bool(running) and bool(self.eligibility.free) and layout.has_speeds
        may_change = bool(self.eligibility.holders) and self.settings.policy == "cost"
        return not (self.eligibility.pending or is_elastic or may_move or may_change)

    def _inputs(self, keeping: frozenset[str]) -> PolicyInput:
        eligibility, layout = self.eligibility, self.snapshot.layout
        num_held = sum([len(job.devices) for job in eligibility.running])
        jobs = [*eligibility.running, *eligibility.pending]
        settled = [job for job in eligibility.holders if job.state in (JobState.STARTING, JobState.RESIZING)]
        return PolicyInput(
            now_s=self.now_s,
            jobs=jobs,
            users=self.snapshot.users,
            settings=self.settings,
            num_devices=num_held + len(eligibility.free) + len(eligibility.coming),
            settled=settled,
            keeping=keeping,
            past=self.snapshot.past,
            oldest=oldest_work([*jobs, *settled], self.now_s),
            layout=layout,
            tariff=tariff_of(self.settings.cheap_hours, self.snapshot.midnight_s),
        )

    def _ordered(self) -> list[Job]:
        """Put the starving before all others, and those over their soft limit behind."""
        if not self.decision.preempts:
            return list(self.decision.order)

        oldest_s, order = self.now_s - self.settings.starve_after_s, self.decision.order
        late = {job.id for job in order if job.spec.soft_limit_s is not None and is_overdue(job, self.now_s)}
        starving = [j for j in order if j.submitted_s < oldest_s and j.id not in late and self._is_starving(j)]
        if not late and not starving:
            return list(order)
        moved = late.union([job.id for job in starving])
        first = sorted(starving, key=lambda job: job.submitted_s)
        return [*first, *(j for j in order if j.id not in moved), *(j for j in order if j.id in late)]

    def _is_starving(self, job: Job) -> bool:
        """Return whether the guard puts a job first; a policy that plans for a job's deadline, or holds it, knows better."""
        if job.id in self.decision.kinds or job.id in self.decision.held:
            return False
        return is_starving(job, self.now_s, self.settings)

    def _give_out(self, order: list[Job]) -> None:
        candidates, changes, sizes = self.candidates, self.changes, self.decision.sizes
        has_speeds, shares = self.snapshot.layout.has_speeds, self.eligibility.shares
        for job in order:
            if reason := self.decision.held.get(job.id):
                if job.state is not JobState.RUNNING:
                    self._wait(job, reason)
                continue
            if job.state is JobState.RUNNING:
                if candidates.pass_by(job):
                    if job.id in self.decision.kinds and changes.is_elsewhere(job):
                        changes.change_kind(job, candidates)
                    elif sizes is not None and self.window is None:
                        changes.grow(job)
                    if has_speeds and job.id not in self.decision.kinds:
                        changes.move_to_faster(job, self.window)
                continue
            if job.spec.share_device and self._join(job):
                continue
            is_all_gone = self.availability.is_empty and candidates.is_empty
            # With shared devices a reservation is needed first: joining jobs may not delay the first in line.
            if is_all_gone and (not shares or self.window is not None):
                self.is_anyone_waiting = True
                if not self.explain and not shares:
                    break
                self._wait(job, "all devices are taken by jobs that go first")
                continue
            num = job.spec.needs.min_devices
            if sizes is not None and (size := sizes.get(job.id)) is not None:
                if size == 0 and not self._is_starving(job):
                    self._wait(job, "the devices help other jobs more")
                    continue
                num = max(num, self.limits.most(job.spec.user, size))
            if not self._within_limits(job):
                continue
            if not self._start(job, num) and not self._may_pass(job):
                break

    def _join(self, job: Job) -> bool:
        """Start a small job on a device that others share (`core.sharing`); False if there is none."""
        if not self._within_limits(job):
            return False
        pools, until_s = self.choices.of(job).pools, self._gone_s(job)
        if not self.sharing.join(job, pools, until_s, self.window, self.candidates, self.changes.changed):
            return False
        self.limits.add(job, 1)
        return True

    def _start(self, job: Job, num: int) -> bool:
        """Start the job, or let it wait for devices that are coming; False if there is no place for it."""
        choice, availability, window = self.choices.of(job), self.availability, self.window
        least = job.spec.needs.min_devices
        ends_s = 0.0
        if window is not None:
            ends_s = self._gone_s(job)
            if ends_s > window.start_s and num == least and availability.now.is_hopeless(choice, num):
                return False  # it may have nothing but what is free, and that is not enough: most waiting jobs
            if window.is_hopeless(choice, least, ends_s):
                self._wait(job, f"would delay job {window.job.id}, which is first in line")
                return True
        slots = None
        if num > least:  # an elastic job rather takes fewer devices than some of a further host
            num = max(least, availability.soon.compact(choice, num))
        if num == least or availability.now.compact(choice, num) == num:
            slots = availability.take_now(choice, num)
        if slots is not None:
            if window is not None and not window.admit(slots, ends_s):
                availability.give_back(slots)
                self._wait(job, f"would delay job {window.job.id}, which is first in line")
                return True
            self.limits.add(job, num)
            self.starts[job.id] = (job, slots)
            if job.spec.share_device:
                self.sharing.give(job, slots[0])
            return True
        if window is not None and ends_s > window.start_s:
            return False
        if availability.is_anything_coming and availability.claim(choice, num) is not None:
            self._wait(job, "waits for devices of jobs that are stopping")
            return True
        if not self.candidates.is_empty and self.candidates.preempt_for(job, choice, least, availability):
            availability.claim(choice, least)
            self._wait(job, "waits for devices of jobs that are to stop for it")
            return True
        return False

    def _may_pass(self, job: Job) -> bool:
        """Reserve devices for a job that can't start; False if no later job may pass it."""
        self.is_anyone_waiting = True
        if not self.decision.reserves or self.window is not None:
            self._wait(job, "no devices that it can use are free")
            return True
        choice = self.choices.of(job)
        if not self._could_ever(job, choice):
            self._wait(job, "asks for devices that are not here, or closed, or reserved")
            return True
        self._wait(job, "is first in line for the next devices")
        if not self.settings.backfill:
            return False
        num, releases = job.spec.needs.min_devices, self._releases()
        self.window = backfill_window(job, choice, num, releases, self.choices.pool_of, self.snapshot.layout.host_of)
        return True

    def _releases(self) -> list[Release]:
        """Return when devices come back for the first in line: free ones, those of running jobs, and of those that start now."""
        now_s, min_run_s = self.now_s, self.settings.min_run_s
        behind = self.candidates.behind
        longer_s = self.sharing.longer_s(behind)
        releases: list[Release] = [(now_s, self.availability.soon.free())]
        for job in self.eligibility.holders:
            time_s = end_s(job, now_s)
            if job.id in behind:
                time_s = min(time_s, max(now_s, job.attempt_began_s + min_run_s))
            releases.append((max(time_s, longer_s.get(job.id, 0.0)), self.eligibility.slots[job.id]))
        for job, slots in self.starts.values():
            releases.append((max(self._gone_s(job), longer_s.get(job.id, 0.0)), slots))
        return releases

    def _gone_s(self, job: Job) -> float:
        """Return when a job that starts now has ended or can be preempted by the first in line."""
        spec, now_s, window = job.spec, self.now_s, self.window
        gone_s = end_s(job, now_s)
        if self.decision.preempts and not is_bound(job, self.settings, now_s):
            until_s = now_s if window and spec.priority < window.job.spec.priority else now_s + self.settings.min_run_s
            return gone_s if gone_s < until_s else until_s
        if window is not None and window.start_s == math.inf:
            return math.inf  # the first in line may get its devices at any moment
        return gone_s

    def _could_ever(self, job: Job, choice: PoolChoice) -> bool:
        """Return whether enough of the devices that are not closed could serve it together."""
        layout, num = self.snapshot.layout, job.spec.needs.min_devices
        if not self.eligibility.closed and not self.snapshot.reservations:
            return layout.most_together(job.spec.needs) >= num
        if choice not in self._most:
            usable = set(range(len(layout.devices))) - self.eligibility.closed
            counts = place_counter(choice, self.choices.pool_of, layout.host_of)(usable)
            self._most[choice] = max(counts.values(), default=0)
        return self._most[choice] >= num

    def _within_limits(self, job: Job) -> bool:
        reason = self.limits.reached(job)
        if reason:
            self._wait(job, reason)
        return not reason

    def _widen(self) -> None:
        """Give jobs that start now and can use more what no other job wants."""
        if self.is_anyone_waiting or self.window is not None:
            return
        for job, slots in list(self.starts.values()):
            more = min(job.spec.needs.max_devices - len(slots), self.availability.now.num_free)
            more = self.limits.most(job.spec.user, more)
            if more <= 0:
                continue
            choice = self.choices.of(job)
            self.availability.give_back(slots)
            size = min(len(slots) + more, self.availability.now.largest(choice))
            wider = self.availability.take_now(choice, size) if size > len(slots) else None
            if wider is None:
                self.availability.take_back(slots)
                continue
            self.limits.add_devices(job.spec.user, len(wider) - len(slots))
            self.starts[job.id] = (job, wider)

    def _commands(self) -> list[Command]:
        devices, now_s = self.snapshot.layout.devices, self.now_s
        commands, gone = list(self.eligibility.commands), self.candidates.displaced
        reason = "a job that goes first needs its devices"
        commands += [StopRequested(now_s, j.id, reason=reason) for j in self.eligibility.running if j.id in gone]
        commands += self.changes.commands
        for job, slots in self.starts.values():
            commands.append(Placed(now_s, job.id, tuple([devices[slot].id for slot in slots]), job.attempt + 1))
        return [*commands, *self.sharing.commands(commands)]

    def _wait(self, job: Job, reason: str) -> None:
        if self.explain:
            self.eligibility.waits[job.id] = reason
