"""``decide(snapshot, now_s)``: the commands to give now. Pure: the same snapshot and time give the same commands.

The policy orders the jobs, and each gets devices in that order, as far as limits, reservations and protections allow. It
starts at once on free devices; else it waits for devices that are coming free, or preempts less deserving jobs and waits
for theirs; else, if it is the first that can't start, later jobs may not delay it (`core.backfill`). No state is kept
between calls. Cost: one pass over the jobs, one sort, and a few operations for each device given out.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass

from evenload.scheduler.core.backfill import BackfillWindow, backfill_window
from evenload.scheduler.core.changes import JobChanges
from evenload.scheduler.core.eligibility import Eligibility, PoolChoices, is_bound, is_overdue, is_young
from evenload.scheduler.core.estimates import end_s
from evenload.scheduler.core.events import Command, Placed, StopRequested
from evenload.scheduler.core.limits import LimitUse
from evenload.scheduler.core.placement import FreeDevices, PoolChoice
from evenload.scheduler.core.policy import PolicyDecision, PolicyInput
from evenload.scheduler.core.preemption import PreemptionCandidates
from evenload.scheduler.core.sharing import Sharing
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.states import RUNNING, JobState
from evenload.scheduler.core.values import Job
from evenload.scheduler.policies import policy_named
from evenload.scheduler.policies.guesses import oldest_work
from evenload.scheduler.policies.starvation import is_starving
from evenload.scheduler.tariff import tariff_of


@dataclass(frozen=True)
class Plan:
    """Commands, and the reason why each waiting job waits."""

    commands: tuple[Command, ...]
    waits: dict[str, str]
    """Job → why it has no devices; complete after ``plan(..., explain=True)`` alone."""
    order: tuple[Job, ...]
    """Those that run or could, the most deserving first."""
    decision: PolicyDecision


def decide(snapshot: QueueSnapshot, now_s: float) -> tuple[Command, ...]:
    """Return what to do now: start, resize, preempt, end; empty if nothing needs to change."""
    was_enabled = gc.isenabled()
    gc.disable()  # a plan holds no cycles, and searching all jobs for some takes up to a third of the time
    try:
        return plan(snapshot, now_s).commands
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
        self.free = FreeDevices(snapshot.layout, eligibility.free, pool_of, packing, eligibility.coming)
        self.limits = LimitUse(snapshot.users, (*eligibility.holders, *self.sharing.followers))
        self.decision: PolicyDecision
        self.changes: JobChanges
        self.candidates: PreemptionCandidates
        self.window: BackfillWindow | None = None
        self.starts: list[tuple[Job, tuple[int, ...]]] = []
        self._impossible: set[tuple[PoolChoice, int]] = set()
        """Choices and numbers of devices for which all devices together are too few."""

    def run(self) -> Plan:
        eligibility, settings, now_s = self.eligibility, self.settings, self.now_s
        bound = {job.id for job in eligibility.running if is_bound(job, settings, now_s)}
        young = {job.id for job in eligibility.running if is_young(job, settings, now_s)}
        keeping = frozenset(bound | young)
        self.decision = policy_named(settings.policy)(self._inputs(keeping))
        self.choices.restrict(self.decision.kinds)
        order = self._ordered()
        self.changes = JobChanges(
            self.snapshot, now_s, eligibility, self.free, self.choices, self.limits, self.decision
        )
        self.changes.stop_held(keeping)
        self.changes.shrink()
        changed, preempts = self.changes.changed, self.decision.preempts
        movable = [j for j in order if j.state is RUNNING and j.id not in changed and preempts]
        candidates = [(j, () if j.id in bound else eligibility.usable(j), j.id in young) for j in movable]
        self.candidates = PreemptionCandidates(candidates, self.choices.pool_of, self.snapshot.layout.host_of)
        self._give_out(order)
        return Plan(tuple(self._commands()), eligibility.waits, tuple(order), self.decision)

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
            free=[*eligibility.free, *eligibility.coming],
            settled=settled,
            holders=[*eligibility.holders, *self.sharing.followers],
            keeping=keeping,
            past=self.snapshot.past,
            oldest=oldest_work([*jobs, *settled], self.now_s),
            layout=layout,
            choices=self.choices,
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
        is_planned = job.id in self.decision.kinds or job.id in self.decision.held
        return not is_planned and is_starving(job, self.now_s, self.settings)

    def _give_out(self, order: list[Job]) -> None:
        candidates, free, sizes, held = self.candidates, self.free, self.decision.sizes, self.decision.held
        shares = any(j.spec.share_device for j in self.snapshot.jobs)
        for job in order:
            if job.state is RUNNING:
                if not held.get(job.id) and candidates.pass_by(job):
                    self._improve(job)
                continue
            if reason := held.get(job.id) or self.limits.reached(job):
                self._wait(job, reason)
                continue
            if job.spec.share_device and self._join(job):
                continue
            is_all_gone = not free.num_free and not free.num_coming and candidates.is_empty
            # With shared devices a reservation is needed first: joining jobs may not delay the first in line.
            if is_all_gone and (not shares or self.window is not None):
                if not self.explain and not shares:
                    break
                self._wait(job, "all devices are taken by jobs that go first")
                continue
            num = job.spec.needs.min_devices
            if (size := sizes.get(job.id)) is not None:
                if size == 0 and not self._is_starving(job):
                    self._wait(job, "the devices help other jobs more")
                    continue
                num = max(num, self.limits.most(job.spec.user, size))
            if not self._start(job, num) and not self._may_pass(job):
                break

    def _improve(self, job: Job) -> None:
        """Give a job that goes on running devices of another kind, more of them, or faster ones."""
        if (has_kind := job.id in self.decision.kinds) and self.changes.is_elsewhere(job):
            self.changes.change_kind(job, self.candidates)
        elif self.window is None and self.decision.sizes.get(job.id, 0) > len(job.devices):
            self.changes.grow(job)
        if self.snapshot.layout.has_speeds and self.free.num_free and not has_kind:
            self.changes.move_to_faster(job, self.window)

    def _join(self, job: Job) -> bool:
        """Start a small job on a device that others share (`core.sharing`); False if there is none."""
        pools, until_s = self.choices.of(job).pools, self._gone_s(job)
        slot = self.sharing.join(job, pools, until_s, self.window, self.candidates, self.changes.changed)
        if slot is not None:
            self._begin(job, (slot,))
        return slot is not None

    def _begin(self, job: Job, slots: tuple[int, ...]) -> None:
        self.limits.add(job, len(slots))
        self.starts.append((job, slots))

    def _start(self, job: Job, num: int) -> bool:
        """Start the job, or let it wait for devices that are coming; False if there is no place for it."""
        choice, free, window = self.choices.of(job), self.free, self.window
        least = job.spec.needs.min_devices
        ends_s = 0.0
        if window is not None:
            ends_s = self._gone_s(job)
            if ends_s > window.start_s and num == least and free.largest(choice) < num:
                return False  # it may have nothing but what is free, and that is not enough: most waiting jobs
        if num > least:  # an elastic job rather takes fewer devices than some of a further host
            num = max(least, free.compact(choice, num, soon=True))
        slots = free.find(choice, num) if num == least or free.compact(choice, num) == num else None
        if slots is not None:
            if window is not None and not window.admit(slots, ends_s):
                self._wait(job, f"would delay job {window.job.id}, which is first in line")
                return True
            free.take(slots)
            self._begin(job, slots)
            if job.spec.share_device:
                self.sharing.give(job, slots[0])
            return True
        if window is not None and ends_s > window.start_s:
            return False
        comes = free.num_coming > 0 and free.place(choice, num, soon=True) is not None
        if not comes and not self.candidates.preempt_for(job, choice, least, free):
            return False
        self.limits.add(job, num if comes else least)
        self._wait(job, f"waits for devices of jobs that are {'stopping' if comes else 'to stop for it'}")
        return True

    def _may_pass(self, job: Job) -> bool:
        """Reserve devices for a job that can't start; False if no later job may pass it."""
        if not self.decision.reserves or self.window is not None:
            self._wait(job, "no devices that it can use are free")
            return True
        choice = self.choices.of(job)
        request = (choice, job.spec.needs.min_devices)
        if request not in self._impossible:
            host_of = self.snapshot.layout.host_of
            self.window = backfill_window(job, choice, self._until(), self.choices.pool_of, host_of)
            if self.window is not None:
                self._wait(job, "is first in line for the next devices")
                return self.settings.backfill
            self._impossible.add(request)
        self._wait(job, "asks for devices that are not here, or closed, or reserved")
        return True

    def _until(self) -> dict[int, float]:
        """Return when each device that isn't closed comes free for the first in line; infinite if unknown."""
        now_s, min_run_s, eligibility = self.now_s, self.settings.min_run_s, self.eligibility
        lead_of, index = self.sharing.lead_of(), self.snapshot.layout.index
        held: list[tuple[float, Sequence[int]]] = [(self._gone_s(job), slots) for job, slots in self.starts]
        for job in (*eligibility.holders, *self.sharing.followers):
            time_s, slots = end_s(job, now_s), eligibility.usable(job)
            if self.candidates.may_stop(lead_of.get(job.id, job.id)):
                time_s = min(time_s, max(now_s, job.attempt_began_s + min_run_s))
            if job.target:
                slots = [*slots, *{index[device] for device in job.target} - eligibility.closed]
            held.append((time_s, slots))
        until: dict[int, float] = {}
        for time_s, given in held:
            for slot in given:
                until[slot] = max(time_s, until.get(slot, 0.0))
        return until | dict.fromkeys(self.free.free(soon=True), now_s)

    def _gone_s(self, job: Job) -> float:
        """Return when a job that starts now has ended or can be preempted by the first in line, which may be at any moment."""
        spec, now_s, window = job.spec, self.now_s, self.window
        gone_s = end_s(job, now_s)
        if self.decision.preempts and not is_bound(job, self.settings, now_s):
            until_s = now_s if window and spec.priority < window.job.spec.priority else now_s + self.settings.min_run_s
            return gone_s if gone_s < until_s else until_s
        return math.inf if window is not None and window.start_s == math.inf else gone_s

    def _commands(self) -> list[Command]:
        devices, now_s = self.snapshot.layout.devices, self.now_s
        commands, gone = list(self.eligibility.commands), self.candidates.displaced
        reason = "a job that goes first needs its devices"
        commands += [StopRequested(now_s, j.id, reason=reason) for j in self.eligibility.running if j.id in gone]
        commands += self.changes.commands
        for job, slots in self.starts:
            commands.append(Placed(now_s, job.id, tuple([devices[slot].id for slot in slots]), job.attempt + 1))
        return [*commands, *self.sharing.commands(commands)]

    def _wait(self, job: Job, reason: str) -> None:
        if self.explain:
            self.eligibility.waits[job.id] = reason
