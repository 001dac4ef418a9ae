"""Resizing of elastic jobs: take back what a policy takes from a running job, and add what it grants.

A resize by a stop and a start may move the job to any devices; one without a stop (`JobSpec.resize_s`) adds devices of its host
to its own, and its forced ones don't count as preemptions. A job shrinks within its own devices; it grows once all of its new
devices are its own or free, and devices that are coming free are reserved for it until then.
"""

from __future__ import annotations

from collections.abc import Callable

from evenload.scheduler.core.availability import Availability
from evenload.scheduler.core.eligibility import Eligibility, PoolChoices
from evenload.scheduler.core.events import Command, ResizeRequested, StopRequested
from evenload.scheduler.core.placement import FreeDevices
from evenload.scheduler.core.policy import PolicyDecision
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.values import Job


class Resizing:
    """The sizes that a policy decided, turned into commands."""

    def __init__(
        self,
        snapshot: QueueSnapshot,
        eligibility: Eligibility,
        availability: Availability,
        choices: PoolChoices,
        decision: PolicyDecision,
        keeping: frozenset[str],
        within_limits: Callable[[str, int], int],
        now_s: float,
    ) -> None:
        """Take the plan's parts; ``within_limits(user, num)`` returns how many of `num` more devices a user may have."""
        self._snapshot, self._eligibility, self._availability, self._choices = (
            snapshot,
            eligibility,
            availability,
            choices,
        )
        self._sizes = dict(decision.sizes or {})
        self._keeping, self._within_limits, self._now_s = keeping, within_limits, now_s
        self.commands: list[Command] = []
        self.changed: set[str] = set()
        """Jobs that this takes devices from, or gives some to."""

    def shrink(self) -> None:
        """Take devices from jobs that should have fewer, before anything is given out."""
        for job in self._eligibility.running:
            size = self._sizes.get(job.id, len(job.devices))
            if size >= len(job.devices) or (job.id in self._keeping and job.spec.resize_s is None):
                continue
            slots = self._eligibility.slots[job.id]
            if size == 0:
                self.commands.append(StopRequested(self._now_s, job.id, reason="its devices help other jobs more"))
                self._availability.comes_free(self._usable(slots))
            else:
                kept = self._kept(job, slots, max(size, job.spec.needs.min_devices))
                if kept is None or len(kept) == len(slots):
                    continue
                self._resize(job, kept, is_forced=job.spec.resize_s is None)
                self._availability.comes_free(self._usable([slot for slot in slots if slot not in set(kept)]))
            self.changed.add(job.id)

    def grow(self, job: Job) -> None:
        """Give devices to a running job that should have more, in its turn."""
        own = self._eligibility.slots[job.id]
        wanted = self._sizes.get(job.id, 0) - len(own)
        wanted = self._within_limits(job.spec.user, wanted) if wanted > 0 else 0
        if wanted <= 0 or job.id in self.changed or not job.spec.preemptible:
            return
        choice, availability, usable = self._choices.of(job), self._availability, self._usable(own)
        size = len(own) + wanted
        availability.give_back(usable)
        size = availability.soon.compact(choice, size)
        slots = availability.take_now(choice, size) if availability.now.compact(choice, size) == size else None
        if (
            slots is None
            and availability.is_anything_coming
            and size > len(own)
            and availability.claim(choice, size) is not None
        ):
            availability.take_back(usable)  # what is coming is kept for it; until then it goes on as it is
            return
        if slots is None:
            most = availability.now.compact(choice, size)
            slots = availability.take_now(choice, most) if most >= len(own) + (wanted + 1) // 2 else None
        elif len(slots) <= len(own):
            availability.give_back(slots)
            slots = None
        availability.take_back([slot for slot in usable if slots is None or slot not in slots])
        if slots is None:
            return
        slots = self._beside_own(job, usable, slots)
        if freed := [slot for slot in usable if slot not in slots]:
            availability.comes_free(freed)
        self._resize(job, slots, is_forced=False)
        self.changed.add(job.id)

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

    def _resize(self, job: Job, slots: tuple[int, ...], is_forced: bool) -> None:
        devices = self._snapshot.layout.devices
        reason = f"{len(job.devices)} → {len(slots)} devices"
        self.commands.append(
            ResizeRequested(self._now_s, job.id, tuple([devices[slot].id for slot in slots]), reason, is_forced)
        )

    def _kept(self, job: Job, slots: list[int], size: int) -> tuple[int, ...] | None:
        """Return the part of its own devices that packs best."""
        layout = self._snapshot.layout
        own = FreeDevices(layout, self._usable(slots), self._choices.pool_of, self._snapshot.settings.packing)
        return own.place(self._choices.of(job), size)

    def _usable(self, slots: list[int]) -> list[int]:
        closed, devices = self._snapshot.closed, self._snapshot.layout.devices
        return [slot for slot in slots if devices[slot].id not in closed] if closed else list(slots)
