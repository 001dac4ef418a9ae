"""Changes of running jobs: a policy holds them or gives them other numbers or kinds of devices, or faster ones are idle.

A resize by a stop and a start may move the job to any devices; one without a stop (`JobSpec.resize_s`) adds devices of its host
to its own, and its forced ones don't count as preemptions. A job shrinks within its own devices; it grows once all of its new
devices are its own or free, and devices that are coming free are reserved for it until then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from evenload.scheduler.core.backfill import BackfillWindow
from evenload.scheduler.core.eligibility import Eligibility, PoolChoices, is_young
from evenload.scheduler.core.estimates import left_s, restart_s
from evenload.scheduler.core.events import Command, ResizeRequested, StopRequested
from evenload.scheduler.core.limits import LimitUse
from evenload.scheduler.core.placement import FreeDevices
from evenload.scheduler.core.policy import PolicyDecision
from evenload.scheduler.core.preemption import PreemptionCandidates
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.values import Job

_LEAST_SAVED = 2.0
"""A move to faster devices must save so many restarts."""


@dataclass
class JobChanges:
    """The changes of running jobs that a policy wants, turned into commands as far as there are devices."""

    _snapshot: QueueSnapshot
    _now_s: float
    _eligibility: Eligibility
    _free: FreeDevices
    _choices: PoolChoices
    _limits: LimitUse
    _decision: PolicyDecision
    commands: list[Command] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    """Jobs that this takes devices from, or gives some to."""

    def __post_init__(self) -> None:
        layout = self._snapshot.layout
        self._speeds = [layout.pools[pool].speed for pool in layout.pool_of]
        self._zone_speeds = dict(zip(self._choices.pool_of, self._speeds, strict=True))

    def stop_held(self, keeping: Collection[str]) -> None:
        """Stop the jobs that the policy holds."""
        for job in self._eligibility.running:
            if (reason := self._decision.held.get(job.id)) is not None and job.id not in keeping:
                self._leave(job, StopRequested(self._now_s, job.id, reason=reason))

    def shrink(self) -> None:
        """Take devices from jobs that should have fewer, before anything is given out; the policy knows what they may lose."""
        for job in self._eligibility.running:
            size = self._decision.sizes.get(job.id, len(job.devices))
            if size >= len(job.devices):
                continue
            if size == 0:
                self._leave(job, StopRequested(self._now_s, job.id, reason="its devices help other jobs more"))
                continue
            kept = self._kept(job, max(size, job.spec.needs.min_devices))
            if kept is not None and len(kept) < len(job.devices):
                self._resize(job, kept, is_forced=job.spec.resize_s is None)
                self._free.give([s for s in self._eligibility.usable(job) if s not in kept], soon=True)

    def is_elsewhere(self, job: Job) -> bool:
        """Return whether a running job that can stop is on a kind that the policy doesn't want for it."""
        pools, slots = self._choices.of(job).pools, self._eligibility.slots[job.id]
        return job.spec.preemptible and any(self._choices.pool_of[slot] not in pools for slot in slots)

    def change_kind(self, job: Job, candidates: PreemptionCandidates) -> None:
        """Let a running job change to a kind that the policy wants, once enough devices of that are free."""
        choice, num = self._choices.of(job), len(job.devices)
        slots = self._free.place(choice, num)
        if slots is not None:
            reason = f"moves to {self._snapshot.layout.devices[slots[0]].kind} for its deadline, at the least price"
            self._leave(job, ResizeRequested(self._now_s, job.id, self._names(slots), reason))
        elif job.id in self._decision.leading:
            candidates.preempt_for(job, choice, num, self._free)

    def grow(self, job: Job) -> None:
        """Give devices to a running job that should have more, in its turn."""
        num = len(job.devices)
        wanted = self._limits.most(job.spec.user, self._decision.sizes.get(job.id, 0) - num)
        if wanted <= 0 or job.id in self.changed or not job.spec.preemptible:
            return
        choice, free, own = self._choices.of(job), self._free, self._eligibility.usable(job)
        free.give(own)
        size = free.compact(choice, num + wanted, soon=True)
        is_now = free.compact(choice, size) == size
        slots = free.find(choice, size, soon=not is_now) if size > num else None
        free.take(own)
        if slots is None:
            return
        self._limits.grow(job.spec.user, size - num)
        if is_now:
            slots = self._beside_own(job, own, slots)
            self._exchange(own, slots)
            self._resize(job, slots, is_forced=False)
        else:  # what is coming is kept for it; until then it goes on as it is
            free.take([slot for slot in slots if slot not in own])

    def move_to_faster(self, job: Job, window: BackfillWindow | None) -> None:
        """Move a job to as many free devices that no job before it gets, where that saves more than two restarts cost."""
        spec, own, free = job.spec, self._eligibility.slots[job.id], self._free
        if spec.share_device or not spec.preemptible or job.id in self.changed:
            return
        slowest = min([self._speeds[slot] for slot in own])
        if not any(map(free.has, [zone for zone, speed in self._zone_speeds.items() if speed > slowest])):
            return
        if is_young(job, self._snapshot.settings, self._now_s) or len(self._eligibility.usable(job)) < len(own):
            return
        seconds = left_s(job, self._now_s)
        if seconds is None:
            num = spec.needs.min_devices
            seconds = self._snapshot.past.left_s(num, job.service_until(self._now_s) / num)
        free.give(own)
        slots = free.find(self._choices.of(job), len(own))
        free.take(own)
        if slots is None or (window is not None and window.num_inside(slots) > window.num_inside(own)):
            return
        saved_s = seconds * (1.0 - 1.0 / self._gain(own, slots))
        if saved_s > _LEAST_SAVED * restart_s(job, self._snapshot.settings):
            self._exchange(own, slots)
            self.commands.append(ResizeRequested(self._now_s, job.id, self._names(slots), "moves to faster devices"))

    def _gain(self, own: Sequence[int], slots: Sequence[int]) -> float:
        """Return how many times as fast it is there: by the sum of the devices' speeds or by the slowest, whichever is less."""
        before, after = [self._speeds[slot] for slot in own], [self._speeds[slot] for slot in slots]
        return min(sum(after) / sum(before), min(after) / min(before))

    def _beside_own(self, job: Job, usable: list[int], slots: tuple[int, ...]) -> tuple[int, ...]:
        """Return the devices to grow onto: beside its own, where the job then needs no stop."""
        host_of, pool_of = self._snapshot.layout.host_of, self._choices.pool_of
        places = {(host_of[slot], pool_of[slot]) for slot in (*usable, *slots)}
        if job.spec.resize_s is None or len(usable) < len(job.devices) or len(places) > 1:
            return slots
        others = [slot for slot in slots if slot not in usable]
        return (*usable, *others[: len(slots) - len(usable)])

    def _kept(self, job: Job, size: int) -> tuple[int, ...] | None:
        """Return the part of its own devices that packs best."""
        pool_of, packing = self._choices.pool_of, self._snapshot.settings.packing
        own = FreeDevices(self._snapshot.layout, self._eligibility.usable(job), pool_of, packing)
        return own.find(self._choices.of(job), size)

    def _exchange(self, own: Sequence[int], slots: Sequence[int]) -> None:
        """Take a job's new devices; those that it leaves are coming free."""
        self._free.take([slot for slot in slots if slot not in own])
        self._free.give([slot for slot in own if slot not in slots], soon=True)

    def _resize(self, job: Job, slots: tuple[int, ...], is_forced: bool) -> None:
        reason = f"{len(job.devices)} → {len(slots)} devices"
        self.commands.append(ResizeRequested(self._now_s, job.id, self._names(slots), reason, is_forced))
        self.changed.add(job.id)

    def _leave(self, job: Job, command: Command) -> None:
        """Let a job leave all its devices."""
        self.commands.append(command)
        self.changed.add(job.id)
        self._free.give(self._eligibility.usable(job), soon=True)

    def _names(self, slots: Sequence[int]) -> tuple[str, ...]:
        return tuple([self._snapshot.layout.devices[slot].id for slot in slots])
