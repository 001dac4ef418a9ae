"""Running jobs that a policy holds, or wants on other kinds of devices: stopped, or moved once there is place."""

from __future__ import annotations

from evenload.scheduler.core.availability import Availability
from evenload.scheduler.core.eligibility import Eligibility, PoolChoices
from evenload.scheduler.core.events import Command, ResizeRequested, StopRequested
from evenload.scheduler.core.policy import PolicyDecision
from evenload.scheduler.core.preemption import PreemptionCandidates
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.values import Job


class KindChanges:
    """Jobs that a policy holds, and its choices of kinds, turned into commands."""

    def __init__(
        self,
        snapshot: QueueSnapshot,
        eligibility: Eligibility,
        availability: Availability,
        choices: PoolChoices,
        decision: PolicyDecision,
        now_s: float,
    ) -> None:
        self._snapshot, self._eligibility, self._availability = snapshot, eligibility, availability
        self._choices, self._decision, self._now_s = choices, decision, now_s
        self.commands: list[Command] = []
        self.changed: set[str] = set()

    def stop_held(self, keeping: frozenset[str]) -> None:
        held = self._decision.held
        for job in self._eligibility.running if held else ():
            if job.id in held and job.id not in keeping:
                self._leave(job, StopRequested(self._now_s, job.id, reason=held[job.id]))

    def is_elsewhere(self, job: Job) -> bool:
        """Return whether a running job that can stop is on a kind that the policy doesn't want for it."""
        pools, slots = self._choices.of(job).pools, self._eligibility.slots[job.id]
        return job.spec.preemptible and any(self._choices.pool_of[slot] not in pools for slot in slots)

    def move(self, job: Job, candidates: PreemptionCandidates) -> None:
        """Let a running job change to a kind that the policy wants, once enough devices of that are free."""
        choice, num = self._choices.of(job), len(job.devices)
        slots = self._availability.take_now(choice, num)
        if slots is None:
            is_leading = job.id in self._decision.leading
            if is_leading and candidates.preempt_for(job, choice, num, self._availability):
                self._availability.claim(choice, num)
            return
        devices = self._snapshot.layout.devices
        reason = f"moves to {devices[slots[0]].kind} for its deadline, at the least price"
        self._leave(job, ResizeRequested(self._now_s, job.id, tuple(devices[slot].id for slot in slots), reason))

    def _leave(self, job: Job, command: Command) -> None:
        devices, closed = self._snapshot.layout.devices, self._snapshot.closed
        self.commands.append(command)
        self.changed.add(job.id)
        self._availability.comes_free([s for s in self._eligibility.slots[job.id] if devices[s].id not in closed])
