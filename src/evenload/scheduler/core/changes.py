"""Changes of running jobs: a policy holds them or gives them other numbers or kinds of devices, or faster ones are idle.

A resize by a stop and a start may move the job to any devices; one without a stop (`JobSpec.resize_s`) adds devices of its host
to its own, and its forced ones don't count as preemptions. A job shrinks within its own devices; it grows once all of its new
devices are its own or free, and devices that are coming free are reserved for it until then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from evenload.scheduler.core.availability import Availability
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
    _availability: Availability
    _choices: PoolChoices
    _limits: LimitUse
    _decision: PolicyDecision
    changed: set[str] = field(default_factory=set)
    """Jobs that this takes devices from, or gives some to."""

    def __post_init__(self) -> None:
        layout = self._snapshot.layout
        self._speeds = [layout.pools[pool].speed for pool in layout.pool_of]
        self._zone_speeds = dict(zip(self._choices.pool_of, self._speeds, strict=True))
        self._kind_changes: list[Command] = []
        self._resizes: list[Command] = []
        self._moves: list[Command] = []

    @property
    def commands(self) -> list[Command]:
        return [*self._kind_changes, *self._resizes, *self._moves]

    def stop_held(self, keeping: Collection[str]) -> None:
        """Stop the jobs that the policy holds."""
        for job in self._eligibility.running:
            if (reason := self._decision.held.get(job.id)) is not None and job.id not in keeping:
                self._leave(job, StopRequested(self._now_s, job.id, reason=reason), self._kind_changes)

    def shrink(self, keeping: Collection[str]) -> None:
        """Take devices from jobs that should have fewer, before anything is given out."""
        sizes = self._decision.sizes or {}
        for job in self._eligibility.running:
            size = sizes.get(job.id, len(job.devices))
            if size >= len(job.devices) or (job.id in keeping and job.spec.resize_s is None):
                continue
            if size == 0:
                reason = "its devices help other jobs more"
                self._leave(job, StopRequested(self._now_s, job.id, reason=reason), self._resizes)
                continue
            kept = self._kept(job, max(size, job.spec.needs.min_devices))
            if kept is not None and len(kept) < len(job.devices):
                self._resize(job, kept, is_forced=job.spec.resize_s is None)
                self._availability.comes_free([s for s in self._eligibility.usable(job) if s not in kept])

    def is_elsewhere(self, job: Job) -> bool:
        """Return whether a running job that can stop is on a kind that the policy doesn't want for it."""
        pools, slots = self._choices.of(job).pools, self._eligibility.slots[job.id]
        return job.spec.preemptible and any(self._choices.pool_of[slot] not in pools for slot in slots)

    def change_kind(self, job: Job, candidates: PreemptionCandidates) -> None:
        """Let a running job change to a kind that the policy wants, once enough devices of that are free."""
        choice, num = self._choices.of(job), len(job.devices)
        slots = self._availability.take_now(choice, num)
        if slots is not None:
            reason = f"moves to {self._snapshot.layout.devices[slots[0]].kind} for its deadline, at the least price"
            self._leave(job, ResizeRequested(self._now_s, job.id, self._names(slots), reason), self._kind_changes)
        elif job.id in self._decision.leading and candidates.preempt_for(job, choice, num, self._availability):
            self._availability.claim(choice, num)

    def grow(self, job: Job) -> None:
        """Give devices to a running job that should have more, in its turn."""
        sizes, num = self._decision.sizes or {}, len(job.devices)
        wanted = sizes.get(job.id, 0) - num
        wanted = self._limits.most(job.spec.user, wanted) if wanted > 0 else 0
        if wanted <= 0 or job.id in self.changed or not job.spec.preemptible:
            return
        choice, availability, usable = self._choices.of(job), self._availability, self._eligibility.usable(job)
        availability.give_back(usable)
        size = availability.soon.compact(choice, num + wanted)
        slots = availability.take_now(choice, size) if availability.now.compact(choice, size) == size else None
        if slots is None:
            if availability.is_anything_coming and size > num and availability.claim(choice, size) is not None:
                availability.take_back(usable)  # what is coming is kept for it; until then it goes on as it is
                return
            most = availability.now.compact(choice, size)
            slots = availability.take_now(choice, most) if most >= num + (wanted + 1) // 2 else None
        elif len(slots) <= num:
            availability.give_back(slots)
            slots = None
        availability.take_back([slot for slot in usable if slots is None or slot not in slots])
        if slots is not None:
            slots = self._beside_own(job, usable, slots)
            if freed := [slot for slot in usable if slot not in slots]:
                availability.comes_free(freed)
            self._resize(job, slots, is_forced=False)

    def move_to_faster(self, job: Job, window: BackfillWindow | None) -> None:
        """Move a job to as many free devices that no job before it gets, where that saves more than two restarts cost."""
        spec, own, availability = job.spec, self._eligibility.slots[job.id], self._availability
        if not availability.now.num_free or spec.share_device or not spec.preemptible or job.id in self.changed:
            return
        fastest = max([self._zone_speeds[zone] for zone in availability.now.free_pools()])
        if fastest <= min([self._speeds[slot] for slot in own]):
            return
        choice = self._choices.of(job)
        is_first_delayed = window is not None and not window.pools.issuperset(choice.pools)
        is_fixed = is_young(job, self._snapshot.settings, self._now_s) or len(self._eligibility.usable(job)) < len(own)
        if is_first_delayed or is_fixed:
            return
        seconds = left_s(job, self._now_s)
        if seconds is None:
            num = spec.needs.min_devices
            seconds = self._snapshot.past.left_s(num, job.service_until(self._now_s) / num)
        availability.give_back(own)
        slots = availability.take_now(choice, len(own))
        if slots is not None:
            saved_s = seconds * (1.0 - 1.0 / self._gain(own, slots))
            if saved_s <= _LEAST_SAVED * restart_s(job, self._snapshot.settings):
                availability.give_back(slots)
                slots = None
        left = [slot for slot in own if slots is None or slot not in slots]
        availability.take_back(left)
        if slots is not None:
            availability.comes_free(left)
            self._moves.append(ResizeRequested(self._now_s, job.id, self._names(slots), "moves to faster devices"))

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
        num_more = len(slots) - len(usable)
        self._availability.give_back(others[num_more:])
        return (*usable, *others[:num_more])

    def _kept(self, job: Job, size: int) -> tuple[int, ...] | None:
        """Return the part of its own devices that packs best."""
        pool_of, packing = self._choices.pool_of, self._snapshot.settings.packing
        own = FreeDevices(self._snapshot.layout, self._eligibility.usable(job), pool_of, packing)
        return own.place(self._choices.of(job), size)

    def _resize(self, job: Job, slots: tuple[int, ...], is_forced: bool) -> None:
        reason = f"{len(job.devices)} → {len(slots)} devices"
        self._resizes.append(ResizeRequested(self._now_s, job.id, self._names(slots), reason, is_forced))
        self.changed.add(job.id)

    def _leave(self, job: Job, command: Command, commands: list[Command]) -> None:
        """Let a job leave all its devices."""
        commands.append(command)
        self.changed.add(job.id)
        self._availability.comes_free(self._eligibility.usable(job))

    def _names(self, slots: Sequence[int]) -> tuple[str, ...]:
        devices = self._snapshot.layout.devices
        return tuple([devices[slot].id for slot in slots])
