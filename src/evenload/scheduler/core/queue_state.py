"""The queue's state, folded from its events; the same events always give the same state.

Only `QueueState` is mutable. Applying an event takes a few microseconds however many jobs there are, and so does a
snapshot, apart from its tuple of jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from evenload.errors import QueueError
from evenload.scheduler.core import events, occupancy
from evenload.scheduler.core.accounting import accounted, counted_preemptions, without_unused
from evenload.scheduler.core.dependencies import after_end, waits_for
from evenload.scheduler.core.layout import Layout, layout_of
from evenload.scheduler.core.refusal import refusal
from evenload.scheduler.core.run_times import NOTHING_SEEN, PastRuns
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.states import WITH_DEVICES, JobState, Verb, next_state
from evenload.scheduler.core.values import Device, Job, JobSpec, Reservation, Settings, User


class QueueState:
    def __init__(self, past: Iterable[events.QueueEvent] = ()) -> None:
        self.jobs: dict[str, Job] = {}
        """All that have not ended, in the order of submission."""
        self.outcomes: dict[str, JobState] = {}
        self.devices: dict[str, Device] = {}
        self.closed: dict[str, str] = {}
        self.users: dict[str, User] = {}
        self.reservations: dict[str, Reservation] = {}
        self.settings = Settings()
        self.holder: dict[str, tuple[str, ...]] = {}
        """Device → jobs that hold it, or will hold it next (RESIZING): one, or several that share it, by their arrival."""
        self.time_s = 0.0
        """Of the latest event."""
        self.dependents: dict[str, list[str]] = {}
        """Job → jobs that wait for it to end."""
        self._layout: Layout | None = None
        self.num_sharing = 0
        """Of `jobs`, how many may share a device."""
        for event in past:
            self.apply(event)

    def restore(
        self,
        *,
        time_s: float,
        settings: Settings,
        devices: Iterable[Device],
        closed: Mapping[str, str],
        users: Iterable[User],
        reservations: Iterable[Reservation],
        jobs: Iterable[Job],
        outcomes: Mapping[str, JobState],
    ) -> None:
        """Take over a stored state, as if its events had been applied.

        Devices are given in the order in which they were added, unended jobs in the order of submission.
        """
        self.time_s, self.settings, self._layout = time_s, settings, None
        self.devices = {device.id: device for device in devices}
        self.closed = dict(closed)
        self.users = {user.name: user for user in users}
        self.reservations = {reservation.id: reservation for reservation in reservations}
        self.jobs = {job.id: job for job in jobs}
        self.outcomes = dict(outcomes)
        self.holder, self.dependents = {}, {}
        self.num_sharing = sum(job.spec.share_device for job in self.jobs.values())
        for job in self.jobs.values():
            occupancy.occupy(self.holder, self.jobs, job, (*job.devices, *job.target))
            for name in job.unmet:
                self.dependents.setdefault(name, []).append(job.id)

    def apply(self, event: events.QueueEvent) -> tuple[Job, ...]:
        """Apply one event; return the jobs it changed as they are now, ended ones included.

        The clock never goes back: an event that claims to be older than the one before counts as of the same time.

        Raises:
            QueueError: the event can't follow those before it; the state is unchanged then.
        """
        handler = _HANDLERS[type(event)]
        time_s = max(self.time_s, event.time_s)
        changed = handler(self, event, time_s)
        self.time_s = time_s
        return tuple(changed or ())

    def snapshot(self, past: PastRuns = NOTHING_SEEN) -> QueueSnapshot:
        return QueueSnapshot(
            jobs=tuple(self.jobs.values()),
            layout=self._drawn(),
            closed=dict(self.closed),
            users=dict(self.users),
            reservations=tuple(self.reservations.values()),
            settings=self.settings,
            shares=self.num_sharing > 0,
            past=past,
        )

    def refusal(self, spec: JobSpec) -> str | None:
        return refusal(spec, self.jobs, self.outcomes, self.users, self._drawn())

    def _drawn(self) -> Layout:
        if self._layout is None:
            self._layout = layout_of(self.devices.values())
        return self._layout

    # What each event does. Each checks first and changes then.

    def _submitted(self, event: events.Submitted, time_s: float) -> list[Job]:
        if event.job in self.jobs or event.job in self.outcomes:
            raise QueueError(f"job {event.job} was submitted twice")
        unmet, doomed = waits_for(event.job, event.spec, self.jobs, self.outcomes)
        job = Job(
            id=event.job,
            spec=event.spec,
            submitted_s=time_s,
            since_s=time_s,
            accounted_s=time_s,
            total=event.spec.total,
            rates=event.spec.rates,
            unmet=unmet,
            doomed=doomed,
        )
        for name in job.unmet:
            self.dependents.setdefault(name, []).append(job.id)
        self._user(event.spec.user)
        self.jobs[job.id] = job
        self.num_sharing += job.spec.share_device
        return [job]

    def _placed(self, event: events.Placed, time_s: float) -> list[Job]:
        job = self._job(event.job)
        state = next_state(job.state, Verb.PLACE)
        self._check_devices(job, event.devices, may_join=True)
        if event.attempt != job.attempt + 1:
            raise QueueError(f"attempt {event.attempt} of job {job.id}, whose last was {job.attempt}")
        return [self._hold(job, time_s, event.devices, state=state, attempt=event.attempt, reason=event.reason)]

    def _began(self, event: events.JobStarted, time_s: float) -> list[Job]:
        job = self._job(event.job)
        state = next_state(job.state, Verb.BEGIN)
        first_s = time_s if job.first_began_s is None else job.first_began_s
        return [self._put(job, time_s, state=state, first_began_s=first_s, reported_s=time_s)]

    def _reported(self, event: events.Reported, time_s: float) -> list[Job]:
        job = self._job(event.job)
        rates = job.rates if event.rates is None else tuple(event.rates)
        total = job.total if event.total is None else event.total
        new = replace(job, done=event.done, total=total, rate_per_s=event.rate_per_s, rates=rates, reported_s=time_s)
        self.jobs[job.id] = new
        return [new]

    def _measured(self, event: events.MemoryMeasured, time_s: float) -> list[Job]:
        job = self._job(event.job)
        new = self.jobs[job.id] = replace(job, peak_bytes=max(job.peak_bytes, event.peak_bytes))
        return [new]

    def _resize_requested(self, event: events.ResizeRequested, time_s: float) -> list[Job]:
        job = self._job(event.job)
        state = next_state(job.state, Verb.RESIZE)
        self._check_devices(job, event.devices)
        occupancy.occupy(self.holder, self.jobs, job, event.devices)
        counted = counted_preemptions(job, time_s) if event.is_forced else job.preempted_s
        return [self._put(job, time_s, state=state, target=event.devices, preempted_s=counted, reason=event.reason)]

    def _resized(self, event: events.Resized, time_s: float) -> list[Job]:
        job = self._job(event.job)
        state = next_state(job.state, Verb.SWITCH)
        if event.devices == job.devices:  # it keeps them
            occupancy.vacate(self.holder, job, set(job.target) - set(job.devices))
            return [self._put(job, time_s, state=state, target=(), reason=event.reason)]
        if (event.devices, event.attempt) != (job.target, job.attempt + 1):
            raise QueueError(f"job {job.id} was to continue on {job.target}, and does so on {event.devices}")
        return [self._hold(job, time_s, event.devices, state=state, attempt=event.attempt)]

    def _resize_refused(self, event: events.ResizeRefused, time_s: float) -> list[Job]:
        job = self._job(event.job)
        if job.state is not JobState.RESIZING:
            raise QueueError(f"job {job.id} is {job.state}, not about to continue on other devices")
        spec = replace(job.spec, resize_s=None)
        return [self._put(job, time_s, spec=spec, reason=f"{job.reason}, by a stop and a start: {event.reason}")]

    def _stop_requested(self, event: events.StopRequested, time_s: float) -> list[Job]:
        job = self._job(event.job)
        state = next_state(job.state, Verb.STOP)
        if event.then not in (JobState.PENDING, JobState.CANCELLED, JobState.FAILED):
            raise QueueError(f"job {job.id} is to stop and then be {event.then}: expected PENDING, CANCELLED or FAILED")
        ending = job.ending if event.then is JobState.PENDING else event.then
        counted = job.preempted_s
        if event.then is JobState.PENDING and job.state is not JobState.PREEMPTING:
            counted = counted_preemptions(job, time_s)
        if job.state is JobState.RESIZING and job.resizes_in_place and len(job.target) > len(job.devices):
            job = self._hold(job, time_s, job.target, state=state, attempt=job.attempt + 1)  # ranks may run there
        occupancy.vacate(self.holder, job, set(job.target) - set(job.devices))
        return [self._put(job, time_s, state=state, target=(), ending=ending, preempted_s=counted, reason=event.reason)]

    def _yielded(self, event: events.Yielded, time_s: float) -> list[Job]:
        job = self._job(event.job)
        if job.ending is not None:
            return self._end(job, time_s, _ending_verb(job), event.reason or job.reason, event.ended_s)
        if job.state is JobState.RESIZING:
            if not any(device in self.closed for device in job.target):
                state = next_state(job.state, Verb.YIELD)
                return [self._hold(job, time_s, job.target, state=state, attempt=job.attempt + 1, reason=job.reason)]
            state, reason = next_state(job.state, Verb.LOSE), "its new devices can't be used now"
            return [self._release(job, time_s, state, reason, event.ended_s)]
        state = next_state(job.state, Verb.YIELD)
        return [self._release(job, time_s, state, event.reason or job.reason, event.ended_s)]

    def _ended(self, event: events.Ended, time_s: float) -> list[Job]:
        job = self._job(event.job)
        if event.is_success:
            return self._end(job, time_s, Verb.SUCCEED, event.reason, event.ended_s)
        if job.ending is not None:
            return self._end(job, time_s, _ending_verb(job), job.reason or event.reason, event.ended_s)
        if job.num_failures < job.spec.retries:
            state = next_state(job.state, Verb.RETRY)
            tried = replace(job, num_failures=job.num_failures + 1)
            reason = f"{event.reason}; it is tried again".lstrip("; ")
            return [self._release(tried, time_s, state, reason, event.ended_s)]
        return self._end(job, time_s, Verb.FAIL, event.reason, event.ended_s)

    def _lost(self, event: events.Lost, time_s: float) -> list[Job]:
        job = self._job(event.job)
        state = next_state(job.state, Verb.LOSE)
        if job.ending is not None:
            return self._end(job, time_s, _ending_verb(job), job.reason or event.reason, event.ended_s)
        job = replace(job, num_lost=job.num_lost + 1)
        if job.num_lost >= self.settings.max_lost:
            reason = f"lost {job.num_lost} times, last: {event.reason}"
            return self._end(job, time_s, Verb.FAIL, reason, event.ended_s)
        return [self._release(job, time_s, state, event.reason, event.ended_s)]

    def _cancelled(self, event: events.Cancelled, time_s: float) -> list[Job]:
        job = self._job(event.job)
        if job.state is not JobState.PENDING:
            raise QueueError(f"job {job.id} is {job.state}: request its stop (StopRequested) before cancelling it")
        return self._end(job, time_s, Verb.CANCEL, event.reason)

    def _held(self, event: events.JobHeld, time_s: float) -> list[Job]:
        job = self._job(event.job)
        if job.state is not JobState.PENDING:
            raise QueueError(f"job {job.id} is {job.state}: only a pending job can be held back")
        return [self._put(job, time_s, is_held=True)]

    def _released(self, event: events.Released, time_s: float) -> list[Job]:
        return [self._put(self._job(event.job), time_s, is_held=False)]

    def _respecified(self, event: events.SpecChanged, time_s: float) -> list[Job]:
        job, spec = self._job(event.job), event.spec
        if spec.user != job.spec.user or spec.after != job.spec.after or spec.array != job.spec.array:
            raise QueueError(f"job {job.id}: its user, its array and what it starts after can't be changed")
        if job.state in WITH_DEVICES and (spec.needs, spec.share_device) != (job.spec.needs, job.spec.share_device):
            raise QueueError(
                f"job {job.id} is {job.state}: which devices it needs can't be changed while it holds some"
            )
        self.num_sharing += spec.share_device - job.spec.share_device
        return [self._put(job, time_s, spec=spec, total=spec.total if spec.total is not None else job.total)]

    def _device_added(self, event: events.DeviceAdded, time_s: float) -> None:
        known = self.devices.get(event.device.id)
        if known is not None and known.host != event.device.host:
            raise QueueError(f"device {known.id} of host {known.host} can't be one of host {event.device.host} too")
        self.devices[event.device.id] = event.device
        self._layout = None

    def _device_closed(self, event: events.DeviceClosed, time_s: float) -> None:
        self._known_device(event.device)
        self.closed[event.device] = event.reason

    def _device_opened(self, event: events.DeviceOpened, time_s: float) -> None:
        self._known_device(event.device)
        self.closed.pop(event.device, None)

    def _device_removed(self, event: events.DeviceRemoved, time_s: float) -> None:
        self._known_device(event.device)
        if event.device in self.holder:
            jobs = ", ".join(self.holder[event.device])
            raise QueueError(f"device {event.device} is held by job {jobs}: close it and wait")
        del self.devices[event.device]
        self.closed.pop(event.device, None)
        self._layout = None

    def _limits_set(self, event: events.LimitsSet, time_s: float) -> None:
        self.users[event.user] = replace(self._user(event.user), limits=event.limits)

    def _reservation_set(self, event: events.ReservationSet, time_s: float) -> None:
        for device in event.reservation.devices:
            self._known_device(device)
        self.reservations[event.reservation.id] = event.reservation

    def _reservation_ended(self, event: events.ReservationEnded, time_s: float) -> None:
        if event.reservation not in self.reservations:
            raise QueueError(f"there is no reservation {event.reservation}")
        del self.reservations[event.reservation]

    def _settings_set(self, event: events.SettingsSet, time_s: float) -> None:
        for name, user in self.users.items():  # what was used so far decayed at the old rate
            self.users[name] = accounted(user, time_s, self.settings.half_life_s)
        self.settings = event.settings

    # The few ways in which a job changes.

    def _job(self, name: str) -> Job:
        job = self.jobs.get(name)
        if job is None:
            ended = self.outcomes.get(name)
            raise QueueError(f"job {name} has ended ({ended})" if ended else f"there is no job {name}")
        return job

    def _user(self, name: str) -> User:
        return self.users.setdefault(name, User(name))

    def _known_device(self, device: str) -> None:
        if device not in self.devices:
            raise QueueError(f"there is no device {device} in this queue")

    def _check_devices(self, job: Job, devices: tuple[str, ...], *, may_join: bool = False) -> None:
        if not devices or len(set(devices)) != len(devices):
            raise QueueError(f"job {job.id} is to get the devices {devices}: expected some, none twice")
        for device in devices:
            self._known_device(device)
            occupancy.check(self.holder, self.jobs, self.closed, job, device, may_join=may_join)

    def _put(self, job: Job, time_s: float, **changes: Any) -> Job:
        """Bring the job's times up to now and change it."""
        state = changes.get("state", job.state)
        new = replace(
            job,
            held_s=job.held_until(time_s),
            service_device_s=job.service_until(time_s),
            waited_s=job.waited_until(time_s),
            accounted_s=time_s,
            since_s=job.since_s if state is job.state else time_s,
            **changes,
        )
        self.jobs[job.id] = new
        return new

    def _hold(self, job: Job, time_s: float, devices: tuple[str, ...], **changes: Any) -> Job:
        """Give devices to the job in place of those it has."""
        occupancy.vacate(self.holder, job, set(job.devices) - set(devices))
        self._account(job, time_s, len(devices) - len(job.devices))
        needs, starts = job.spec.needs, changes.get("state") is JobState.STARTING
        new = self._put(
            job,
            time_s,
            devices=devices,
            target=(),
            attempt_began_s=time_s if starts else job.attempt_began_s,
            num_restarts=job.num_restarts + (job.attempt > 0 and starts),
            rate_per_s=0.0 if needs.min_devices < needs.max_devices else job.rate_per_s,  # it was measured on others
            **changes,
        )
        occupancy.occupy(self.holder, self.jobs, new, devices)
        return new

    def _release(
        self, job: Job, time_s: float, state: JobState, reason: str, ended_s: float | None, **changes: Any
    ) -> Job:
        """Free the job's devices; it used them until `ended_s` (None: until now)."""
        occupancy.vacate(self.holder, job, {*job.devices, *job.target})
        self._account(job, time_s, -len(job.devices))
        new = self._put(job, time_s, state=state, devices=(), target=(), reason=reason, **changes)
        if ended_s is not None and job.devices and (unused_s := time_s - max(job.attempt_began_s, ended_s)) > 0:
            new, self.users[job.spec.user] = without_unused(new, self.users[job.spec.user], len(job.devices), unused_s)
            self.jobs[job.id] = new
        return new

    def _end(self, job: Job, time_s: float, verb: Verb, reason: str, ended_s: float | None = None) -> list[Job]:
        state = next_state(job.state, verb)
        changed = [self._release(job, time_s, state, reason, ended_s)]
        del self.jobs[job.id]
        self.num_sharing -= job.spec.share_device
        self.outcomes[job.id] = state
        for name in self.dependents.pop(job.id, ()):
            if (waiting := self.jobs.get(name)) is not None:
                unmet, doomed = after_end(waiting, job.id, state)
                changed.append(self._put(waiting, time_s, unmet=unmet, doomed=doomed))
        return changed

    def _account(self, job: Job, time_s: float, change: int) -> None:
        user = accounted(self._user(job.spec.user), time_s, self.settings.half_life_s)
        self.users[user.name] = replace(user, num_devices=user.num_devices + change)


def _ending_verb(job: Job) -> Verb:
    return Verb.CANCEL if job.ending is JobState.CANCELLED else Verb.FAIL


_HANDLERS: dict[type[Any], Callable[[QueueState, Any, float], list[Job] | None]] = {
    events.Submitted: QueueState._submitted,
    events.Placed: QueueState._placed,
    events.JobStarted: QueueState._began,
    events.Reported: QueueState._reported,
    events.MemoryMeasured: QueueState._measured,
    events.ResizeRequested: QueueState._resize_requested,
    events.Resized: QueueState._resized,
    events.ResizeRefused: QueueState._resize_refused,
    events.StopRequested: QueueState._stop_requested,
    events.Yielded: QueueState._yielded,
    events.Ended: QueueState._ended,
    events.Lost: QueueState._lost,
    events.Cancelled: QueueState._cancelled,
    events.JobHeld: QueueState._held,
    events.Released: QueueState._released,
    events.SpecChanged: QueueState._respecified,
    events.DeviceAdded: QueueState._device_added,
    events.DeviceClosed: QueueState._device_closed,
    events.DeviceOpened: QueueState._device_opened,
    events.DeviceRemoved: QueueState._device_removed,
    events.LimitsSet: QueueState._limits_set,
    events.ReservationSet: QueueState._reservation_set,
    events.ReservationEnded: QueueState._reservation_ended,
    events.SettingsSet: QueueState._settings_set,
}
