"""Small jobs that share one device: which may join, and which must stop if memory runs out. Pure.

A plan assigns whole devices, so one job represents each shared device: the lead, which is the hardest to preempt. The
other jobs, its followers, are hidden from the policy and are preempted together with the lead. The device becomes free
when all its jobs have stopped.

A job may join a device if all jobs there share it, none is stopping, and the sum of their peak memory and its own, times
`Settings.share_margin`, fits into the device. A job with an unknown peak shares with no other. Joining must respect the
reservation of the first in line (`core.backfill`), unless other jobs hold the device for longer anyway.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from evenload.scheduler.core.backfill import BackfillWindow
from evenload.scheduler.core.eligibility import Eligibility, is_bound, is_young
from evenload.scheduler.core.estimates import end_s
from evenload.scheduler.core.events import Command, StopRequested
from evenload.scheduler.core.preemption import PreemptionCandidates
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.states import RUNNING, JobState
from evenload.scheduler.core.values import Job, Settings


def expected_bytes(job: Job) -> int | None:
    """Return the expected peak of a job's device memory; None if unknown.

    What was measured of it, or of others like it, whichever is more; else the need stated by its owner.
    """
    return max(job.peak_bytes, job.spec.peak_bytes) or job.spec.needs.memory_bytes or None


def free_bytes(jobs: Collection[Job], memory_bytes: int, settings: Settings) -> int | None:
    """Return the largest peak that fits beside these jobs on a device; None if no job may join them."""
    if len(jobs) >= settings.max_sharers or not all(job.may_be_joined for job in jobs):
        return None
    left = math.floor(memory_bytes / settings.share_margin)
    for job in jobs:
        peak_bytes = expected_bytes(job)
        if peak_bytes is None:
            return None
        left -= peak_bytes
    return left if left > 0 else None


def excess_bytes(jobs: Iterable[Job], memory_bytes: int) -> int:
    """Return by how much the peaks of these jobs exceed their device's memory; 0 if they fit."""
    return max(0, sum(expected_bytes(job) or 0 for job in jobs) - memory_bytes) if memory_bytes else 0


@dataclass
class _SharedDevice:
    slot: int
    jobs: list[Job]
    """All that hold it, the first of them first."""
    lead: Job
    followers: list[Job] = field(default_factory=list)
    """Those beside the lead that are not leaving; they do what it does."""
    free_bytes: int = 0
    """The largest peak of a job that may join; 0 if none may."""


class Sharing:
    def __init__(self, snapshot: QueueSnapshot, eligibility: Eligibility, now_s: float, pool_of: Sequence[int]) -> None:
        """Remove followers from the eligible jobs, and stop jobs for which there is not enough memory."""
        self._snapshot, self._settings, self._now_s, self._pool_of = snapshot, snapshot.settings, now_s, pool_of
        self.followers: list[Job] = []
        """Jobs that hold devices and are not in the eligibility."""
        self._places: dict[int, _SharedDevice] = {}
        by_slot: dict[int, list[Job]] = {}
        for job in eligibility.holders:
            if job.spec.share_device:
                by_slot.setdefault(eligibility.slots[job.id][0], []).append(job)
        leaving = {command.job for command in eligibility.commands}
        for slot, jobs in by_slot.items():
            staying = [job for job in jobs if job.id not in leaving and job.state is not JobState.PREEMPTING]
            self._stop_excess(slot, staying, eligibility)
            lead = max(staying, key=self._lead_key) if staying else jobs[0]
            place = self._places[slot] = _SharedDevice(slot, jobs, lead, [job for job in staying if job is not lead])
            self.followers += [job for job in jobs if job is not lead]
            if len(staying) == len(jobs) and slot not in eligibility.closed:
                self._open(place)
            if len(jobs) > 1 and slot in eligibility.coming:
                eligibility.coming = [other for other in eligibility.coming if other != slot] + [slot] * (not staying)
        if self.followers:
            out = {job.id for job in self.followers}
            eligibility.running = [job for job in eligibility.running if job.id not in out]
            eligibility.holders = [job for job in eligibility.holders if job.id not in out]

    def _lead_key(self, job: Job) -> tuple[bool, bool, int, bool, float, float]:
        settings, now_s = self._settings, self._now_s
        return (
            job.state is not RUNNING,
            is_bound(job, settings, now_s),
            job.spec.priority,
            is_young(job, settings, now_s),
            -end_s(job, now_s),
            -job.submitted_s,
        )

    def _stop_excess(self, slot: int, staying: list[Job], eligibility: Eligibility) -> None:
        """Stop the youngest job whose end is enough, if the jobs need more memory than there is."""
        memory_bytes = self._snapshot.layout.devices[slot].memory_bytes
        while len(staying) > 1 and (more_bytes := excess_bytes(staying, memory_bytes)):
            able = [j for j in staying if j.state is RUNNING and not is_bound(j, self._settings, self._now_s)]
            if not able:
                return
            able.reverse()  # of those that came at once, the one that was submitted last
            able.sort(key=lambda job: -job.attempt_began_s)
            one = next((job for job in able if (expected_bytes(job) or 0) >= more_bytes), able[0])
            need = (memory_bytes + more_bytes) / 2**30
            reason = f"those that share its device may need {need:.1f} GiB of its {memory_bytes / 2**30:.1f} GiB"
            eligibility.commands.append(StopRequested(self._now_s, one.id, reason=reason))
            eligibility.running = [job for job in eligibility.running if job is not one]
            staying.remove(one)

    def _open(self, place: _SharedDevice) -> None:
        memory_bytes = self._snapshot.layout.devices[place.slot].memory_bytes
        place.free_bytes = free_bytes(place.jobs, memory_bytes, self._settings) or 0

    def give(self, job: Job, slot: int) -> None:
        """Record that the plan starts a job alone on a device; others may join it."""
        place = self._places[slot] = _SharedDevice(slot, [replace(job, state=JobState.STARTING)], job)
        self._open(place)

    def join(
        self,
        job: Job,
        pools: Collection[int],
        until_s: float,
        window: BackfillWindow | None,
        candidates: PreemptionCandidates,
        changed: Collection[str],
    ) -> int | None:
        """Return the device on which a job starts with others; None if there is none that it may join.

        Args:
            job: the job to start.
            pools: which devices it can use.
            until_s: from then on it has ended, or can be preempted by the first in line.
            window: the reservation of the first in line.
            candidates: jobs that could be displaced; the lead of the joined device is removed.
            changed: jobs from which this plan has taken their devices.
        """
        need = expected_bytes(job)
        fitting = [
            place
            for place in self._places.values()
            if need is not None and place.free_bytes >= need and self._pool_of[place.slot] in pools
        ]
        # Those with the fewest jobs first, then those that it fills best.
        for place in sorted(fitting, key=lambda place: (len(place.jobs), place.free_bytes, place.slot)):
            lead = place.lead.id
            if lead in candidates.displaced or lead in changed:
                continue
            if window is not None and not window.admit((place.slot,), until_s):
                is_held_longer = max(end_s(job, self._now_s) for job in place.jobs) > window.start_s
                if candidates.may_stop(lead) or not is_held_longer:
                    continue
            candidates.keep(lead)
            place.jobs = [*place.jobs, replace(job, state=JobState.STARTING)]
            self._open(place)
            return place.slot
        return None

    def lead_of(self) -> dict[str, str]:
        """Return follower → lead."""
        return {job.id: place.lead.id for place in self._places.values() for job in place.followers}

    def commands(self, given: Iterable[Command]) -> list[Command]:
        """Return the commands for followers that follow from the plan's."""
        stopped = {c.job: c.reason for c in given if isinstance(c, StopRequested) and c.is_preemption}
        return [
            StopRequested(self._now_s, name, reason=stopped[lead])
            for name, lead in self.lead_of().items()
            if lead in stopped and name not in stopped
        ]
