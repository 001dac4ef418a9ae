"""Attempts, folded from the queue's events beside the core's own state; each has a fence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from evenload.errors import QueueError, StaleError
from evenload.scheduler.core import events
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.values import Job
from evenload.scheduler.store.event_rows import stored_kind

NOT_SAVED = "NotSaved"
RESIZED = "Resized"


@dataclass(frozen=True, slots=True)
class Fence:
    """Fencing number of one attempt: a runner shows it in its messages, and one of an earlier attempt is refused."""

    job: str
    attempt: int
    number: int
    """Number of the event that began the attempt; unique in a queue, and growing."""


@dataclass(frozen=True, slots=True)
class RunnerStarted:
    """A runner has registered for an attempt. Its facts identify it after a crash; the queue's state doesn't change."""

    time_s: float
    job: str
    attempt: int
    facts: Mapping[str, Any]
    """Plain values, such as its pid, start time and boot id."""


@dataclass(frozen=True, slots=True)
class ProgramStarted:
    """An attempt's program has begun, as its runner noted it: the attempt is billed from `began_s` on."""

    time_s: float
    job: str
    attempt: int
    began_s: float
    """By the queue's clock."""


AttemptEntry = RunnerStarted | ProgramStarted
"""Entries of the log that concern an attempt alone."""

Entry = events.QueueEvent | AttemptEntry


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    fence: Fence
    devices: tuple[str, ...]
    began_s: float
    """When it got its devices; once its program has begun, that time: from then on it is billed."""
    ended_s: float | None = None
    ending: str = ""
    """The kind of event that ended it: ``Yielded``, ``Ended``, ``Lost``; `NOT_SAVED` where it yielded without a save, and
    `RESIZED` where its program goes on in the next attempt, on other devices."""
    reason: str = ""
    runner: Mapping[str, Any] | None = None
    """Facts of its `RunnerStarted`; where an earlier attempt's goes on, also that ``attempt`` and the number of its ``fence``."""

    @property
    def runner_fence(self) -> Fence:
        """The fence of the attempt for which its runner was started."""
        facts, own = self.runner or {}, self.fence
        return Fence(own.job, int(facts.get("attempt", own.attempt)), int(facts.get("fence", own.number)))


@dataclass(slots=True)
class Changes:
    """Changes made by events: jobs and attempts as they are after the last event, and the names of everything else."""

    jobs: dict[str, Job] = field(default_factory=dict)
    attempts: dict[int, AttemptRecord] = field(default_factory=dict)
    users: set[str] = field(default_factory=set)
    devices: dict[str, None] = field(default_factory=dict)
    """New ones in the order in which they came: that of the queue's state."""
    reservations: dict[str, None] = field(default_factory=dict)
    removed: set[tuple[str, str]] = field(default_factory=set)
    """("device" or "reservation", its id), even where it was added again."""
    has_settings: bool = False


class Ledger:
    """The core's queue_state, the attempts that are under way, and the number of the last event."""

    def __init__(self) -> None:
        self.queue_state = QueueState()
        self.open: dict[str, AttemptRecord] = {}
        self.last = 0

    def apply(self, entry: Entry, changes: Changes) -> tuple[Job, ...]:
        """Apply the next entry of the log, note its changes in `changes`, and return the changed jobs.

        Raises `QueueError` if it can't follow the entries before it; nothing is changed then.
        """
        if isinstance(entry, AttemptEntry):
            attempt = self._attempt(entry.job, entry.attempt)
            if isinstance(entry, RunnerStarted):
                attempt = replace(attempt, runner=dict(entry.facts))
            else:
                attempt = replace(attempt, began_s=max(attempt.began_s, entry.began_s))
            self._put(attempt, changes)
            self.last += 1
            return ()
        new = self._new_names(entry)
        changed = self.queue_state.apply(entry)
        self.last += 1
        for job in changed:
            changes.jobs[job.id] = job
            changes.users.add(job.spec.user)
            self._follow(job, entry, changes)
        match entry:
            case events.DeviceAdded():
                _note(changes.devices, entry.device.id, is_new=entry.device.id in new)
            case events.DeviceClosed() | events.DeviceOpened():
                _note(changes.devices, entry.device)
            case events.DeviceRemoved():
                _note(changes.devices, entry.device)
                changes.removed.add(("device", entry.device))
            case events.ReservationSet():
                _note(changes.reservations, entry.reservation.id, is_new=entry.reservation.id in new)
            case events.ReservationEnded():
                _note(changes.reservations, entry.reservation)
                changes.removed.add(("reservation", entry.reservation))
            case events.LimitsSet():
                changes.users.add(entry.user)
            case events.SettingsSet():
                changes.users |= self.queue_state.users.keys()
                changes.has_settings = True
        return changed

    def check(self, fence: Fence) -> None:
        """Raise `StaleError` if the fence's attempt is over."""
        attempt = self.open.get(fence.job)
        if attempt is not None and attempt.fence == fence:
            return
        now = "none is under way" if attempt is None else f"attempt {attempt.fence.attempt} is under way"
        raise StaleError(
            f"attempt {fence.attempt} of job {fence.job} (fence {fence.number}) is over: {now}. Its processes "
            f"have to end"
        )

    def _new_names(self, event: events.QueueEvent) -> set[str]:
        """The device or reservation that the event brings, where the queue's state doesn't have it."""
        if isinstance(event, events.DeviceAdded):
            return {event.device.id} - self.queue_state.devices.keys()
        if isinstance(event, events.ReservationSet):
            return {event.reservation.id} - self.queue_state.reservations.keys()
        return set()

    def _attempt(self, job: str, number: int) -> AttemptRecord:
        attempt = self.open.get(job)
        if attempt is None or attempt.fence.attempt != number:
            raise QueueError(f"attempt {number} of job {job} is not under way")
        return attempt

    def _follow(self, job: Job, event: events.QueueEvent, changes: Changes) -> None:
        before = self.open.get(job.id)
        number = job.attempt if job.devices else None
        runner = None
        if before is not None and before.fence.attempt != number:
            kind, reason = stored_kind(type(event)), getattr(event, "reason", "") or job.reason
            if isinstance(event, events.Yielded) and not event.has_saved:
                kind = NOT_SAVED
            if isinstance(event, events.Resized | events.StopRequested):
                kind, own = RESIZED, before.runner_fence
                runner = {**(before.runner or {}), "attempt": own.attempt, "fence": own.number}
            ended_s, told_s = self.queue_state.time_s, getattr(event, "ended_s", None)
            if told_s is not None:
                ended_s = min(ended_s, max(before.began_s, told_s))
            self._put(replace(before, ended_s=ended_s, ending=kind, reason=reason), changes)
            before = None
        if before is not None and isinstance(event, events.JobStarted):  # what the queue needed until now isn't billed
            self._put(replace(before, began_s=self.queue_state.time_s), changes)
        if before is None and number is not None:
            fence = Fence(job.id, number, self.last)
            self._put(AttemptRecord(fence, job.devices, began_s=self.queue_state.time_s, runner=runner), changes)

    def _put(self, attempt: AttemptRecord, changes: Changes) -> None:
        changes.attempts[attempt.fence.number] = attempt
        if attempt.ended_s is None:
            self.open[attempt.fence.job] = attempt
        else:
            del self.open[attempt.fence.job]


def _note(names: dict[str, None], name: str, *, is_new: bool = False) -> None:
    if is_new:
        names.pop(name, None)
    names.setdefault(name)
