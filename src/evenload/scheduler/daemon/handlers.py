"""Handlers of the socket's verbs: they check permissions, record events, and return the reply.

Nothing here acts. Recorded events are on disk before the reply is sent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler import validation
from evenload.scheduler.core import events
from evenload.scheduler.core.layout import layout_of
from evenload.scheduler.core.refusal import refusal
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.core.values import Job, JobSpec, Limits, Reservation
from evenload.scheduler.daemon import replies, requests
from evenload.scheduler.daemon.listening import listening_addresses
from evenload.scheduler.daemon.maintenance import first_window, shifted
from evenload.scheduler.daemon.queue_file import groups_of_users
from evenload.scheduler.daemon.requests import Caller, JobPart, job_names
from evenload.scheduler.daemon.state import DaemonState
from evenload.scheduler.job_lookup import row_of_attempt
from evenload.scheduler.messages import LARGEST_PAGE
from evenload.scheduler.queue_settings import settings_from
from evenload.scheduler.spec_rows import changed_spec, check_name, spec_from
from evenload.scheduler.store import rows, usage

READING = frozenset({"list", "job", "status", "wait", "report"})
"""Verbs that record nothing."""

_LONGEST_WAIT_S = 300.0
_MOST_WAITS = 50_000
"""Pairs of a job and another that it waits for, beyond one for each job."""


@dataclass(frozen=True, slots=True)
class DelayedReply:
    """A reply to send once there is an event behind number `after`, or at `until_s` (by the monotonic clock)."""

    after: int
    until_s: float


class RequestHandlers:
    def __init__(self, state: DaemonState) -> None:
        self.state = state
        self.is_over = False
        """The daemon was requested to end."""
        self.to_kill: set[str] = set()
        """Jobs to kill without a grace, once their end is on disk."""
        self._handlers: dict[str, Callable[..., dict[str, Any] | DelayedReply]] = {
            "submit": self._submit,
            "cancel": self._cancel,
            "hold": self._hold,
            "release": self._release,
            "change": self._change,
            "list": self._list,
            "job": self._job,
            "status": self._status,
            "set": self._set,
            "limits": self._limits,
            "reserve": self._reserve,
            "unreserve": self._unreserve,
            "wait": self._wait,
            "report": self._report,
            "stop": self._stop,
        }

    def handle(self, caller: Caller, verb: Any, fields: dict[str, Any]) -> dict[str, Any] | DelayedReply:
        """Return the reply; a message's fields are its handler's arguments. If this raises, nothing is recorded."""
        handler = self._handlers.get(verb) if isinstance(verb, str) else None
        if handler is None:
            raise ConfigError(f"verb={verb!r:.50}: there is no such verb; the verbs are {', '.join(self._handlers)}")
        return handler(caller, **validation.arguments(handler, fields, verb))

    def _submit(
        self,
        caller: Caller,
        *,
        spec: Mapping[str, Any] = MappingProxyType({}),
        program: Any = None,
        jobs: tuple[JobPart, ...] | None = None,
        array: bool = False,
        common: JobPart | None = None,
    ) -> dict[str, Any]:
        parts = (JobPart(spec, program),) if jobs is None else jobs
        if common is not None:
            parts = tuple(part.within(common) for part in parts)
        if not 1 <= len(parts) <= LARGEST_PAGE:
            raise ConfigError(f"{len(parts)} jobs in one message: expected 1 to {LARGEST_PAGE}")
        now_s, first = self.state.clock.now_s(), self.state.next_number
        array_id = f"{first}" if array else ""
        entries = [self._entry(caller, part, str(first + index), array_id, now_s) for index, part in enumerate(parts)]
        self._check_max_queued(caller, len(entries))
        self._check_max_waits([event.spec for event, _ in entries])
        for event, extra in entries:
            row = extra if event is entries[0][0] else rows.program_like(entries[0][0].job, entries[0][1], extra)
            self.state.record(event, extra=row)
        self.state.next_number = first + len(entries)
        names = [event.job for event, _ in entries]
        return {"job": names[0]} if jobs is None else {"jobs": names}

    def _entry(
        self, caller: Caller, part: JobPart, name: str, array: str, now_s: float
    ) -> tuple[events.Submitted, dict[str, Any]]:
        """Return one job, checked so that recording it can't fail."""
        program = requests.program_from(part.program, caller)
        spec = spec_from({**part.spec, "array": array} if array else part.spec, caller.name)
        spec = self._in_queue_time(spec, part.spec)
        if program.idle_end_s is not None and not self.state.settings.idle_below:
            raise ConfigError("idle_end_s has no effect: this queue's idle_below is 0, so no device counts as idle")
        learns = "preemptible" not in part.spec
        if learns:
            spec = replace(spec, preemptible=program.requeue)
        self._check_priority(caller, spec.priority)
        spec = self.state.memory_history.with_known_peak(spec, program.command)
        spec = self.state.run_estimates.with_estimate(spec, program.command)
        if reason := self.state.store.queue_state.refusal(spec):
            raise QueueError(reason)
        event = events.Submitted(now_s, name, spec)
        extra = {
            **program.to_row(),
            requests.LEARNED: learns and not program.requeue,
            requests.MEASURED: spec.restart_s is None,
        }
        rows.entry_row(event)
        rows.text_of(extra, "a job's program")
        return event, extra

    def _in_queue_time(self, spec: JobSpec, given: Mapping[str, Any]) -> JobSpec:
        """Return a spec whose times of day, if the request gave some by the wall clock, are by the queue's."""
        ahead_s = self.state.clock.ahead_s
        if spec.deadline_s is not None and given.get("deadline_s") is not None:
            if (policy := self.state.store.queue_state.settings.policy) != "cost":
                raise ConfigError(
                    f"a deadline has no effect here: this queue's policy is {policy}; evenload queue set policy=cost"
                )
            spec = replace(spec, deadline_s=spec.deadline_s - ahead_s)
        if spec.not_before_s is None or given.get("not_before_s") is None:
            return spec
        return replace(spec, not_before_s=spec.not_before_s - ahead_s)

    def _check_max_queued(self, caller: Caller, num: int) -> None:
        """`QueueState.refusal` checks one job; several together may be too many."""
        queue_state = self.state.store.queue_state
        user = queue_state.users.get(caller.name)
        most = None if user is None else user.limits.max_queued
        if most is not None:
            queued = sum(1 for job in queue_state.jobs.values() if job.spec.user == caller.name)
            if queued + num > most:
                raise QueueError(
                    f"{caller.name} has {queued} jobs in the queue and may have {most}: {num} are too many"
                )

    def _check_max_waits(self, specs: list[JobSpec]) -> None:
        """Refuse an array after an array where each end would change hundreds of jobs that wait for hundreds of others."""
        jobs = self.state.store.queue_state.jobs
        if sum(len(spec.after) for spec in specs) <= len(specs):
            return
        waits = [sum(after.job in jobs for after in spec.after) for spec in specs]  # those that have ended are no waits
        most, num = max(waits), sum(max(0, wait - 1) for wait in waits)
        if num and num + sum(max(0, len(job.unmet) - 1) for job in jobs.values()) > _MOST_WAITS:
            raise QueueError(
                f"{len(specs)} jobs after {most} others each are too many to follow ({num:,}; at most {_MOST_WAITS:,} in this "
                f"queue): submit one job between them (evenload submit --name between --after ... -- true), and these "
                f"--after between"
            )

    def _check_priority(self, caller: Caller, priority: int) -> None:
        most = self.state.settings.max_priority
        if priority > most and not caller.is_admin:
            raise QueueError(f"priority={priority}: {caller.name} may give up to {most}; an admin may give more")

    def _own(self, caller: Caller, name: str) -> Job | None:
        """Return a job that the caller may change, None if it has ended; raise a `QueueError` for any other."""
        queue_state = self.state.store.queue_state
        if name not in queue_state.jobs and name not in queue_state.outcomes:
            raise QueueError(f"there is no job {name!r:.50}")
        job = queue_state.jobs.get(name)
        owner = job.spec.user if job is not None else ""
        if job is not None and not caller.is_admin and owner != caller.name:
            raise QueueError(
                f"job {name} is {owner}'s: only its owner or an admin may change it, and you are {caller.name}"
            )
        return job

    def _own_all(self, caller: Caller, names: Iterable[str]) -> list[Job]:
        """Return those of the jobs that have not ended; refuse all where one is another user's."""
        jobs = [job for name in names if (job := self._own(caller, name)) is not None]
        if not jobs:
            outcomes = self.state.store.queue_state.outcomes
            ended = ", ".join(f"{name} ({outcomes[name].lower()})" for name in list(names)[:10])
            raise QueueError(f"nothing to do: ended already: {ended}")
        return jobs

    def _job_rows(self, jobs: list[Job]) -> dict[str, Any]:
        live = self.state.store.queue_state.jobs
        return {"jobs": [replies.job_row(self.state, live.get(job.id, job)) for job in jobs]}

    def _cancel(
        self, caller: Caller, *, job: str = "", jobs: str | tuple[str, ...] = (), now: bool = False
    ) -> dict[str, Any]:
        changed, killed = [], []
        reason = f"cancelled by {caller.name}"
        for own in self._own_all(caller, job_names(job, jobs)):
            if own.state is JobState.PENDING:
                changed.append(self.state.record(events.Cancelled(self.state.clock.now_s(), own.id, reason))[0])
                continue
            changed.append(own)
            if own.ending is None:
                self.state.record(events.StopRequested(self.state.clock.now_s(), own.id, JobState.CANCELLED, reason))
            if now or own.ending is not None:  # a second request
                self.to_kill.add(own.id)
                killed.append(own.id)
        return {**self._job_rows(changed), "killed": killed}

    def _hold(self, caller: Caller, *, job: str = "", jobs: str | tuple[str, ...] = ()) -> dict[str, Any]:
        held = self._own_all(caller, job_names(job, jobs))
        for own in held:
            if own.state is not JobState.PENDING:
                raise QueueError(f"job {own.id} is {own.state}: only a pending job can be held back")
        for own in held:
            self.state.record(events.JobHeld(self.state.clock.now_s(), own.id))
        return self._job_rows(held)

    def _release(self, caller: Caller, *, job: str = "", jobs: str | tuple[str, ...] = ()) -> dict[str, Any]:
        released = self._own_all(caller, job_names(job, jobs))
        for own in released:
            self.state.record(events.Released(self.state.clock.now_s(), own.id))
        return self._job_rows(released)

    def _change(self, caller: Caller, *, job: str, **changes: Any) -> dict[str, Any]:
        own = self._own_all(caller, (job,))[0]
        before = own.spec
        if "not_before_s" in changes and own.state is not JobState.PENDING:
            raise QueueError(f"job {job} is {own.state}: when it begins can be changed only while it waits")
        spec = self._in_queue_time(changed_spec(before, changes), changes)
        if spec.priority > before.priority:
            self._check_priority(caller, spec.priority)
        queue_state = self.state.store.queue_state
        if reason := refusal(
            replace(spec, after=()), {}, {}, queue_state.users, layout_of(queue_state.devices.values())
        ):
            raise QueueError(reason)
        changed = self.state.record(events.SpecChanged(self.state.clock.now_s(), job, spec))
        return {"job": replies.job_row(self.state, changed[0])}

    def _list(
        self,
        caller: Caller,
        *,
        user: str | None = None,
        states: tuple[JobState, ...] | None = None,
        ended: bool = False,
        after: int = 0,
        limit: int = LARGEST_PAGE,
        newest_first: bool = False,
    ) -> dict[str, Any]:
        if limit < 1:
            raise ConfigError(f"limit={limit}: expected a whole number of at least 1")
        if states is None:
            states = () if ended else tuple(state for state in JobState if state not in ENDED)
        limit = min(limit, LARGEST_PAGE)
        reader, queue_state = self.state.reader, self.state.store.queue_state
        lines = reader.jobs(
            states=states,
            user=user,
            after=after,
            limit=limit + 1,
            newest_first=newest_first,
        )
        forecasts = self.state.forecasts()
        rows = []
        for line in lines[:limit]:
            job = queue_state.jobs.get(line.id)
            row = (
                replies.ended_row(self.state, line)
                if job is None
                else replies.job_row(self.state, job, forecasts.get(job.id))
            )
            rows.append({**row, "number": line.number})
        counts = {str(state): num for state, num in reader.counts(user).items()}
        return {"jobs": rows, "more": len(lines) > limit, "counts": counts}

    def _job(self, caller: Caller, *, job: str, listens: bool = False) -> dict[str, Any]:
        queue_state, reader = self.state.store.queue_state, self.state.reader
        live = queue_state.jobs.get(job)
        found = live or reader.job(job)
        if found is None:
            raise QueueError(f"there is no job {job!r:.50}")
        program = reader.program(found.id) or {}
        for flag in (requests.LEARNED, requests.MEASURED):
            program.pop(flag, None)
        if not caller.is_admin and program.get("uid") != caller.uid:
            program = {key: program[key] for key in ("command", "folder") if key in program}
        attempts = reader.attempts(found.id)
        forecast = self.state.forecasts(found.id).get(found.id) if live is not None else None
        return {
            "job": replies.job_row(self.state, found, forecast),
            "spec": replies.spec_row(self.state, found.spec),
            "program": program,
            "listens": self._listens(caller, found, program) if listens else [],
            "attempts": [row_of_attempt(attempt, self.state.clock.ahead_s) for attempt in attempts],
            "cost": reader.prices().cost_of(attempts, self.state.clock.now_s()),
        }

    def _listens(self, caller: Caller, job: Job, program: Mapping[str, Any]) -> list[str]:
        """Return the addresses on which a running job listens, to its owner and the admins."""
        live = self.state.runners.live.get(job.id)
        is_own = caller.is_admin or program.get("uid") == caller.uid
        if live is None or live.identity is None or not is_own:
            return []
        return listening_addresses(live.identity.pid)

    def _status(self, caller: Caller) -> dict[str, Any]:
        return dict(replies.status_row(self.state))

    def _check_admin(self, caller: Caller, verb: str) -> None:
        if not caller.is_admin:
            raise QueueError(f"{verb} is for this queue's admins, and you are {caller.name}")

    def _set(self, caller: Caller, *, settings: Mapping[str, Any]) -> dict[str, Any]:
        self._check_admin(caller, "set")
        if not settings:
            raise ConfigError("settings is empty: expected an object of names and values")
        if twice := settings.keys() & self.state.settings.settings.keys():
            raise ConfigError(f"{', '.join(sorted(twice))}: set in the queue's own queue.toml; change it there")
        new = settings_from(settings, self.state.store.queue_state.settings)
        self.state.record(events.SettingsSet(self.state.clock.now_s(), new))
        return {"settings": asdict(new)}

    def _limits(self, caller: Caller, *, user: str, **changes: Any) -> dict[str, Any]:
        self._check_admin(caller, "limits")
        name = check_name("user", user)
        if name in self.state.settings.limits:
            raise ConfigError(f"the limits of {name} are set in the queue's own queue.toml; change them there")
        users = self.state.store.queue_state.users
        before = users[name].limits if name in users else Limits()
        limits = validation.build(Limits, {**validation.plain(before), **changes}, "limits")
        self.state.record(events.LimitsSet(self.state.clock.now_s(), name, limits))
        return {"user": replies.user_row(self.state, name)}

    def _reserve(
        self,
        caller: Caller,
        *,
        devices: tuple[str, ...],
        start_s: float,
        end_s: float,
        users: tuple[str, ...] = (),
        every: str = "",
    ) -> dict[str, Any]:
        self._check_admin(caller, "reserve")
        labels = {found.label: name for name, found in self.state.devices.items()}
        reserved = frozenset(labels.get(name, name) for name in devices)
        name = f"r{self.state.store.last + 1}"
        ahead_s = self.state.clock.ahead_s
        made = first_window(Reservation(name, reserved, start_s, end_s, frozenset(users), every))
        made = shifted(made, -ahead_s)
        if made.end_s <= self.state.clock.now_s() and not every:
            raise ConfigError("the reservation's window is over")
        self.state.record(events.ReservationSet(self.state.clock.now_s(), made))
        return {"reservation": replies.reservation_row(self.state, name)}

    def _unreserve(self, caller: Caller, *, reservation: str) -> dict[str, Any]:
        self._check_admin(caller, "unreserve")
        self.state.record(events.ReservationEnded(self.state.clock.now_s(), reservation))
        return {}

    def _report(self, caller: Caller, *, by: tuple[str, ...] = usage.REPORT_KEYS, month: str = "") -> dict[str, Any]:
        groups = groups_of_users(self.state.settings.groups)
        return usage.report_table(usage.usage_rows(self.state.reader, groups, by, month), by)

    def _wait(self, caller: Caller, *, after: int | None = None, timeout_s: float = 30.0) -> DelayedReply:
        if timeout_s < 0:
            raise ConfigError(f"timeout_s={timeout_s}: expected a number of seconds, at least 0")
        return DelayedReply(
            self.state.store.last if after is None else after, time.monotonic() + min(timeout_s, _LONGEST_WAIT_S)
        )

    def _stop(self, caller: Caller) -> dict[str, Any]:
        self._check_admin(caller, "stop")
        self.is_over = True
        return {"pid": os.getpid()}
