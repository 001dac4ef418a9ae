"""Moves of running jobs to faster devices that no other job gets, where that saves more than two restarts cost."""

from __future__ import annotations

from collections.abc import Sequence

from evenload.scheduler.core.availability import Availability
from evenload.scheduler.core.estimates import left_s, restart_s
from evenload.scheduler.core.events import ResizeRequested
from evenload.scheduler.core.placement import PoolChoice
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.values import Job

_LEAST_SAVED = 2.0
"""A move must save so many restarts."""


class Moving:
    def __init__(self, snapshot: QueueSnapshot, availability: Availability, now_s: float) -> None:
        self._snapshot, self._availability, self._now_s = snapshot, availability, now_s
        layout = snapshot.layout
        self._speeds = [layout.pools[pool].speed for pool in layout.pool_of] if layout.has_speeds else []
        self.commands: list[ResizeRequested] = []

    def move(self, job: Job, own: Sequence[int], choice: PoolChoice) -> None:
        """Move a job from its `own` devices to as many free ones, or leave it there."""
        snapshot, availability, now_s = self._snapshot, self._availability, self._now_s
        devices, speeds = snapshot.layout.devices, self._speeds
        if not speeds or not job.spec.preemptible or any(devices[slot].id in snapshot.closed for slot in own):
            return
        slowest = min(speeds[slot] for slot in own)
        if all(speeds[slot] <= slowest for slot in availability.now.free()):
            return
        seconds = left_s(job, now_s)
        if seconds is None:
            num = job.spec.needs.min_devices
            seconds = snapshot.past.left_s(num, job.service_until(now_s) / num)
        availability.give_back(own)
        slots = availability.take_now(choice, len(own))
        if slots is not None:
            saved_s = seconds * (1.0 - 1.0 / self._gain(own, slots))
            if saved_s <= _LEAST_SAVED * restart_s(job, snapshot.settings):
                availability.give_back(slots)
                slots = None
        left = [slot for slot in own if slots is None or slot not in slots]
        availability.take_back(left)
        if slots is not None:
            availability.comes_free(left)
            names = tuple([devices[slot].id for slot in slots])
            self.commands.append(ResizeRequested(now_s, job.id, names, "moves to faster devices"))

    def _gain(self, own: Sequence[int], slots: Sequence[int]) -> float:
        """Return how many times as fast it is there: by the sum of the devices' speeds or by the slowest, whichever is less."""
        before, after = [self._speeds[slot] for slot in own], [self._speeds[slot] for slot in slots]
        return min(sum(after) / sum(before), min(after) / min(before))
