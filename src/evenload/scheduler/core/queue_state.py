"""The queue's state, folded from its events; the same events always give the same state.

Only `QueueState` is mutable. Applying an event takes a few microseconds however many jobs there are, and so does a
snapshot, apart from its tuple of jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from evenload.balance.run_times import NOTHING_SEEN, PastRuns
from evenload.errors import QueueError
from evenload.scheduler.core import events
from evenload.scheduler.core.layout import Layout, layout_of
from evenload.scheduler.core.refusal import refusal
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.states import WITH_DEVICES, JobState, Verb, next_state
from evenload.scheduler.core.values import Device, Job, JobSpec, Reservation, Settings, User


@dataclass(eq=False)
class QueueState:
    """Built empty, or from what was stored of one, as if its events had been applied."""

    time_s: float = 0.0
    """Of the latest event."""
    settings: Settings = field(default_factory=Settings)
    devices: dict[str, Device] = field(default_factory=dict)
    """In the order in which they were added."""
    closed: dict[str, str] = field(default_factory=dict)
    users: dict[str, User] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    """All that have not ended, in the order of submission."""
    outcomes: dict[str, JobState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.holder: dict[str, tuple[str, ...]] = {}
        """Device → jobs that hold it, or will hold it next (RESIZING): one, or several that share it, by their arrival."""
        self.dependents: dict[str, list[str]] = {}
        """Job → jobs that wait for it to end."""
        self._layout: Layout | None = None
        self._now_s = self.time_s
        """Of the event that is being applied."""
        self._changed: dict[str, Job] = {}
        """The jobs that it has changed so far."""
        for job in self.jobs.values():
            self._occupy(job, (*job.devices, *job.target))
            for name in job.unmet:
                self.dependents.setdefault(name, []).append(job.id)

    def apply(self, event: events.QueueEvent) -> tuple[Job, ...]:
        """Apply one event; return the jobs it changed as they are now, ended ones included.

        The clock never goes back: an event that claims to be older than the one before counts as of the same time.

        Raises:
            QueueError: the event can't follow those before it; the state is unchanged then.
        """
        handler = _HANDLERS[type(event)]
        self._now_s, self._changed = max(self.time_s, event.time_s), {}
        if isinstance(event, events.JobEvent) and not isinstance(event, events.Submitted):
            handler(self, self._job(event.job), event)
        else:
            handler(self, event)
        self.time_s = self._now_s
        return tuple(self._changed.values())

    def snapshot(self, past: PastRuns = NOTHING_SEEN) -> QueueSnapshot:
        return QueueSnapshot(
            jobs=tuple(self.jobs.values()),
            layout=self._drawn(),
            closed=dict(self.closed),
            users=dict(self.users),
            reservations=tuple(self.reservations.values()),
            settings=self.settings,
            past=past,
        )

    def refusal(self, spec: JobSpec) -> str | None:
        return refusal(spec, self.jobs, self.outcomes, self.users, self._drawn())

    def _drawn(self) -> Layout:
        if self._layout is None:
            self._layout = layout_of(self.devices.values())
        return self._layout

    # What each event does, by the type of `event`. Each checks first and changes then.

    def _on_submitted(self, event: events.Submitted) -> None:
        spec, now_s = event.spec, self._now_s
        if event.job in self.jobs or event.job in self.outcomes:
            raise QueueError(f"job {event.job} was submitted twice")
        unmet, doomed = self._waits_for(event.job, spec)
        for name in unmet:
            self.dependents.setdefault(name, []).append(event.job)
        self._user(spec.user)
        job = Job(event.job, spec, now_s, since_s=now_s, accounted_s=now_s, unmet=unmet, doomed=doomed)
        self._set(replace(job, total=spec.total, rates=spec.rates))

    def _on_placed(self, job: Job, event: events.Placed) -> None:
        state = next_state(job.state, Verb.PLACE)
        self._check_devices(job, event.devices, may_join=True)
        if event.attempt != job.attempt + 1:
            raise QueueError(f"attempt {event.attempt} of job {job.id}, whose last was {job.attempt}")
        self._hold(job, event.devices, state=state, attempt=event.attempt, reason=event.reason)

    def _on_began(self, job: Job, event: events.JobStarted) -> None:
        state, now_s = next_state(job.state, Verb.BEGIN), self._now_s
        first_s = now_s if job.first_began_s is None else job.first_began_s
        self._put(job, state=state, first_began_s=first_s, reported_s=now_s)

    def _on_reported(self, job: Job, event: events.Reported) -> None:
        rates = job.rates if event.rates is None else tuple(event.rates)
        total = job.total if event.total is None else event.total
        rate_per_s, now_s = event.rate_per_s, self._now_s
        self._set(replace(job, done=event.done, total=total, rate_per_s=rate_per_s, rates=rates, reported_s=now_s))

    def _on_measured(self, job: Job, event: events.MemoryMeasured) -> None:
        self._set(replace(job, peak_bytes=max(job.peak_bytes, event.peak_bytes)))

    def _on_resize_requested(self, job: Job, event: events.ResizeRequested) -> None:
        state = next_state(job.state, Verb.RESIZE)
        self._check_devices(job, event.devices)
        self._occupy(job, event.devices)
        counted = job.preempted_until(self._now_s) if event.is_forced else job.preempted_s
        self._put(job, state=state, target=event.devices, preempted_s=counted, reason=event.reason)

    def _on_resized(self, job: Job, event: events.Resized) -> None:
        state = next_state(job.state, Verb.SWITCH)
        if event.devices == job.devices:  # it keeps them
            self._vacate(job, set(job.target) - set(job.devices))
            self._put(job, state=state, target=(), reason=event.reason)
        elif (event.devices, event.attempt) == (job.target, job.attempt + 1):
            self._hold(job, event.devices, state=state, attempt=event.attempt)
        else:
            raise QueueError(f"job {job.id} was to continue on {job.target}, and does so on {event.devices}")

    def _on_resize_refused(self, job: Job, event: events.ResizeRefused) -> None:
        if job.state is not JobState.RESIZING:
            raise QueueError(f"job {job.id} is {job.state}, not about to continue on other devices")
        reason = f"{job.reason}, by a stop and a start: {event.reason}"
        self._put(job, spec=replace(job.spec, resize_s=None), reason=reason)

    def _on_stop_requested(self, job: Job, event: events.StopRequested) -> None:
        state = next_state(job.state, Verb.STOP)
        if event.then not in (JobState.PENDING, JobState.CANCELLED, JobState.FAILED):
            raise QueueError(f"job {job.id} is to stop and then be {event.then}: expected PENDING, CANCELLED or FAILED")
        ending = job.ending if event.is_preemption else event.then
        counted = job.preempted_s
        if event.is_preemption and job.state is not JobState.PREEMPTING:
            counted = job.preempted_until(self._now_s)
        if job.state is JobState.RESIZING and job.resizes_in_place and len(job.target) > len(job.devices):
            job = self._hold(job, job.target, state=state, attempt=job.attempt + 1)  # ranks may run there
        self._vacate(job, set(job.target) - set(job.devices))
        self._put(job, state=state, target=(), ending=ending, preempted_s=counted, reason=event.reason)

    def _on_yielded(self, job: Job, event: events.Yielded) -> None:
        reason = event.reason or job.reason
        if job.ending is not None:
            self._end(job, _ending_verb(job), reason, event.ended_s)
        elif job.state is not JobState.RESIZING:
            self._release(job, next_state(job.state, Verb.YIELD), reason, event.ended_s)
        elif any(device in self.closed for device in job.target):
            state = next_state(job.state, Verb.LOSE)
            self._release(job, state, "its new devices can't be used now", event.ended_s)
        else:
            self._hold(job, job.target, state=next_state(job.state, Verb.YIELD), attempt=job.attempt + 1)

    def _on_ended(self, job: Job, event: events.Ended) -> None:
        if event.is_success:
            self._end(job, Verb.SUCCEED, event.reason, event.ended_s)
        elif job.ending is not None:
            self._end(job, _ending_verb(job), job.reason or event.reason, event.ended_s)
        elif job.num_failures < job.spec.retries:
            state, reason = next_state(job.state, Verb.RETRY), f"{event.reason}; it is tried again".lstrip("; ")
            self._release(replace(job, num_failures=job.num_failures + 1), state, reason, event.ended_s)
        else:
            self._end(job, Verb.FAIL, event.reason, event.ended_s)

    def _on_lost(self, job: Job, event: events.Lost) -> None:
        state, num_lost = next_state(job.state, Verb.LOSE), job.num_lost + 1
        if job.ending is not None:
            self._end(job, _ending_verb(job), job.reason or event.reason, event.ended_s)
        elif num_lost >= self.settings.max_lost:
            reason = f"lost {num_lost} times, last: {event.reason}"
            self._end(replace(job, num_lost=num_lost), Verb.FAIL, reason, event.ended_s)
        else:
            self._release(replace(job, num_lost=num_lost), state, event.reason, event.ended_s)

    def _on_cancelled(self, job: Job, event: events.Cancelled) -> None:
        if job.state is not JobState.PENDING:
            raise QueueError(f"job {job.id} is {job.state}: request its stop (StopRequested) before cancelling it")
        self._end(job, Verb.CANCEL, event.reason)

    def _on_held(self, job: Job, event: events.JobHeld) -> None:
        if job.state is not JobState.PENDING:
            raise QueueError(f"job {job.id} is {job.state}: only a pending job can be held back")
        self._put(job, is_held=True)

    def _on_released(self, job: Job, event: events.Released) -> None:
        self._put(job, is_held=False)

    def _on_respecified(self, job: Job, event: events.SpecChanged) -> None:
        spec = event.spec
        if spec.user != job.spec.user or spec.after != job.spec.after or spec.array != job.spec.array:
            raise QueueError(f"job {job.id}: its user, its array and what it starts after can't be changed")
        if job.state in WITH_DEVICES and (spec.needs, spec.share_device) != (job.spec.needs, job.spec.share_device):
            raise QueueError(f"job {job.id} is {job.state}: the devices it needs can't be changed while it holds some")
        self._put(job, spec=spec, total=spec.total if spec.total is not None else job.total)

    def _on_device_added(self, event: events.DeviceAdded) -> None:
        known = self.devices.get(event.device.id)
        if known is not None and known.host != event.device.host:
            raise QueueError(f"device {known.id} of host {known.host} can't be one of host {event.device.host} too")
        self.devices[event.device.id] = event.device
        self._layout = None

    def _on_device_closed(self, event: events.DeviceClosed) -> None:
        self.closed[self._known_device(event.device)] = event.reason

    def _on_device_opened(self, event: events.DeviceOpened) -> None:
        self.closed.pop(self._known_device(event.device), None)

    def _on_device_removed(self, event: events.DeviceRemoved) -> None:
        self._known_device(event.device)
        if event.device in self.holder:
            jobs = ", ".join(self.holder[event.device])
            raise QueueError(f"device {event.device} is held by job {jobs}: close it and wait")
        del self.devices[event.device]
        self.closed.pop(event.device, None)
        self._layout = None

    def _on_limits_set(self, event: events.LimitsSet) -> None:
        self.users[event.user] = replace(self._user(event.user), limits=event.limits)

    def _on_reservation_set(self, event: events.ReservationSet) -> None:
        for device in sorted(event.reservation.devices):
            self._known_device(device)
        self.reservations[event.reservation.id] = event.reservation

    def _on_reservation_ended(self, event: events.ReservationEnded) -> None:
        if event.reservation not in self.reservations:
            raise QueueError(f"there is no reservation {event.reservation}")
        del self.reservations[event.reservation]

    def _on_settings_set(self, event: events.SettingsSet) -> None:
        for name, user in self.users.items():  # what was used so far decayed at the old rate
            self.users[name] = user.until(self._now_s, self.settings.half_life_s)
        self.settings = event.settings

    # The few ways in which a job changes.

    def _job(self, name: str) -> Job:
        job = self.jobs.get(name)
        if job is None:
            ended = self.outcomes.get(name)
            raise QueueError(f"job {name} has ended ({ended})" if ended else f"there is no job {name}")
        return job

    def _waits_for(self, job: str, spec: JobSpec) -> tuple[tuple[str, ...], str]:
        """Return the jobs that a job still waits for, and why it can never start."""
        unmet, doomed = [], ""
        for after in spec.after:
            if after.job in self.jobs:
                unmet.append(after.job)
            elif after.job not in self.outcomes:
                raise QueueError(f"job {job} is to start after {after.job}, but there is no such job")
            elif not after.is_met(self.outcomes[after.job]):
                doomed = f"it was to start after job {after.job}, which is {self.outcomes[after.job]}"
        return tuple(dict.fromkeys(unmet)), doomed

    def _user(self, name: str) -> User:
        return self.users.setdefault(name, User(name))

    def _known_device(self, device: str) -> str:
        if device not in self.devices:
            names = ", ".join(sorted(self.devices)[:8])
            raise QueueError(f"there is no device {device} in this queue; there are {len(self.devices)}: {names}")
        return device

    def _check_devices(self, job: Job, devices: tuple[str, ...], *, may_join: bool = False) -> None:
        """Raise `QueueError` if the job can't get a device: it is closed, or a holder doesn't share it with the job.

        Memory is not checked here: what fitted when it was decided is not judged by later rules.
        """
        if not devices or len(set(devices)) != len(devices):
            raise QueueError(f"job {job.id} is to get the devices {devices}: expected some, none twice")
        for device in devices:
            self._known_device(device)
            others = [name for name in self.holder.get(device, ()) if name != job.id]
            may_share = may_join and job.spec.share_device
            if others and not (may_share and all(self.jobs[name].may_be_joined for name in others)):
                raise QueueError(f"job {job.id} is to get device {device}, which job {', '.join(others)} holds")
            if device in self.closed and device not in job.devices:
                raise QueueError(f"job {job.id} is to get device {device}, which is closed: {self.closed[device]}")

    def _occupy(self, job: Job, devices: Iterable[str]) -> None:
        """Add a job to devices, beside those that share them."""
        for device in devices:
            names = {*self.holder.get(device, ()), job.id}  # in an order that a state read from a store has too
            self.holder[device] = tuple(sorted(names, key=lambda name: (self.jobs[name].attempt_began_s, name)))

    def _vacate(self, job: Job, devices: Iterable[str]) -> None:
        for device in devices:
            if others := tuple([name for name in self.holder[device] if name != job.id]):
                self.holder[device] = others
            else:
                del self.holder[device]

    def _set(self, job: Job) -> Job:
        self.jobs[job.id] = self._changed[job.id] = job
        return job

    def _put(self, job: Job, until_s: float | None = None, **changes: Any) -> Job:
        """Bring the job's times up to now and change it; its use of devices counts until `until_s`, or now."""
        used_s, state = self._now_s if until_s is None else until_s, changes.get("state", job.state)
        new = replace(
            job,
            held_s=max(0.0, job.held_until(used_s)),
            service_device_s=max(0.0, job.service_until(used_s)),
            waited_s=job.waited_until(self._now_s),
            accounted_s=self._now_s,
            since_s=job.since_s if state is job.state else used_s,
            **changes,
        )
        return self._set(new)

    def _hold(self, job: Job, devices: tuple[str, ...], **changes: Any) -> Job:
        """Give devices to the job in place of those it has."""
        self._vacate(job, set(job.devices) - set(devices))
        self._account(job, len(devices) - len(job.devices), self._now_s)
        needs, starts = job.spec.needs, changes.get("state") is JobState.STARTING
        new = self._put(
            job,
            devices=devices,
            target=(),
            attempt_began_s=self._now_s if starts else job.attempt_began_s,
            num_restarts=job.num_restarts + (job.attempt > 0 and starts),
            rate_per_s=0.0 if needs.min_devices < needs.max_devices else job.rate_per_s,  # it was measured on others
            **changes,
        )
        self._occupy(new, devices)
        return new

    def _release(self, job: Job, state: JobState, reason: str, ended_s: float | None) -> None:
        """Free the job's devices; it used them until `ended_s` (None: until now)."""
        self._vacate(job, {*job.devices, *job.target})
        until_s = self._now_s
        if job.devices and ended_s is not None:
            until_s = min(until_s, max(job.attempt_began_s, ended_s))
        self._account(job, -len(job.devices), until_s)
        self._put(job, until_s, state=state, devices=(), target=(), reason=reason)

    def _end(self, job: Job, verb: Verb, reason: str, ended_s: float | None = None) -> None:
        state = next_state(job.state, verb)
        self._release(job, state, reason, ended_s)
        del self.jobs[job.id]
        self.outcomes[job.id] = state
        for name in self.dependents.pop(job.id, ()):
            if (waiting := self.jobs.get(name)) is not None:
                unmet, doomed = self._waits_for(name, waiting.spec)
                self._put(waiting, unmet=unmet, doomed=doomed)

    def _account(self, job: Job, change: int, until_s: float) -> None:
        """Change how many devices the job's user has; those that the job has count until `until_s`."""
        user = self._user(job.spec.user).until(self._now_s, self.settings.half_life_s)
        used_device_s = max(0.0, user.usage_device_s - len(job.devices) * (self._now_s - until_s))
        self.users[user.name] = replace(user, usage_device_s=used_device_s, num_devices=user.num_devices + change)


def _ending_verb(job: Job) -> Verb:
    return Verb.CANCEL if job.ending is JobState.CANCELLED else Verb.FAIL


_HANDLERS: dict[type[Any], Callable[..., None]] = {
    get_type_hints(method)["event"]: method for name, method in vars(QueueState).items() if name.startswith("_on_")
}
"""Class of event → what it does; to all but `Submitted` a job's event is given after the job."""
