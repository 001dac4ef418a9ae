"""What each verb of the socket does: checks who asks and what for, records events, and says what to answer.

Nothing here acts. What is recorded is on disk before the answer goes out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler.core import events
from evenload.scheduler.core.layout import layout_of
from evenload.scheduler.core.refusal import refusal
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.core.values import Job, Limits, Reservation, settings_from
from evenload.scheduler.daemon import replies, requests
from evenload.scheduler.daemon.requests import Caller, check_name, job_names, only
from evenload.scheduler.daemon.state import DaemonState
from evenload.scheduler.job_lookup import row_of_attempt
from evenload.scheduler.messages import LARGEST_PAGE, VERBS
from evenload.scheduler.store import rows

_LONGEST_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class DelayedReply:
    """An answer for when something has happened behind event `after`, or for `until_s` (by the monotonic clock)."""

    after: int
    until_s: float


class RequestHandlers:
    """The verbs, on one queue."""

    def __init__(self, state: DaemonState) -> None:
        self.state = state
        self.is_over = False
        """Somebody who may asked the daemon to end."""
        self.to_kill: set[str] = set()
        """Jobs whose programs are to be killed without a grace, once their end is on disk."""
        self._handlers: dict[str, Callable[[Caller, dict[str, Any]], dict[str, Any] | DelayedReply]] = {
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
            "stop": self._stop,
        }

    def handle(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any] | DelayedReply:
        """The answer to a message.

        Raises:
            ConfigError, QueueError: it is refused; nothing is recorded then.
        """
        verb = message.get("verb")
        function = self._handlers.get(verb) if isinstance(verb, str) else None
        if function is None:
            raise ConfigError(f"verb={verb!r:.50}: there is no such verb; there are {', '.join(VERBS[:-1])}")
        return function(caller, message)

    def _submit(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
        only(message, "spec", "program", "jobs", "array")
        given = message.get("jobs")
        many = given if given is not None else [{"spec": message.get("spec"), "program": message.get("program")}]
        if not isinstance(many, list) or not many or not all(isinstance(row, Mapping) for row in many):
            raise ConfigError(f"jobs={many!r:.100}: expected a list of objects with spec and program")
        if len(many) > LARGEST_PAGE:
            raise ConfigError(f"{len(many)} jobs in one message: expected at most {LARGEST_PAGE}")
        now_s, first = time.time(), self.state.next_number
        array = f"{first}" if message.get("array") else ""
        entries = [self._entry(caller, row, str(first + index), array, now_s) for index, row in enumerate(many)]
        self._check_room(caller, len(entries))
        for event, extra in entries:
            self.state.record(event, extra=extra)
        self.state.next_number = first + len(entries)
        names = [event.job for event, _ in entries]
        return {"jobs": names} if given is not None else {"job": names[0]}

    def _entry(
        self, caller: Caller, row: Mapping[str, Any], name: str, array: str, now_s: float
    ) -> tuple[events.Submitted, dict[str, Any]]:
        """One job, checked so far that recording it can't fail."""
        only(row, "spec", "program")
        given = row.get("spec", {})
        program = requests.program_from(row.get("program"), caller)
        spec = requests.spec_from(
            {**given, "array": array} if array and isinstance(given, Mapping) else given, caller.name
        )
        learns = isinstance(given, Mapping) and "preemptible" not in given
        if learns:
            spec = replace(spec, preemptible=program.requeue)
        self._check_priority(caller, spec.priority)
        spec = self.state.memory_history.known(spec, program.command)
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

    def _check_room(self, caller: Caller, num: int) -> None:
        """`Book.refusal` looks at one job; several together may be too many."""
        queue_state = self.state.store.queue_state
        user = queue_state.users.get(caller.name)
        most = None if user is None else user.limits.max_queued
        if most is not None:
            queued = sum(1 for job in queue_state.jobs.values() if job.spec.user == caller.name)
            if queued + num > most:
                raise QueueError(
                    f"{caller.name} has {queued} jobs in the queue and may have {most}: {num} are too many"
                )

    def _check_priority(self, caller: Caller, priority: int) -> None:
        most = self.state.settings.max_priority
        if priority > most and not caller.is_admin:
            raise QueueError(f"priority={priority}: {caller.name} may give up to {most}; an admin may give more")

    def _own(self, caller: Caller, name: str) -> Job | None:
        """A job that the caller may change, None if it has ended.

        Raises:
            QueueError: there is no such job, or it is another's.
        """
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

    def _own_all(self, caller: Caller, message: dict[str, Any]) -> list[Job]:
        """All the jobs named that have not ended; none is touched where one is another's."""
        names = job_names(message.get("jobs", message.get("job")))
        jobs = [job for name in names if (job := self._own(caller, name)) is not None]
        if not jobs:
            states = ", ".join(f"{name} ({self.state.store.queue_state.outcomes[name]})" for name in names[:10])
            raise QueueError(f"nothing to do: ended already: {states}")
        return jobs

    def _told(self, jobs: list[Job]) -> dict[str, Any]:
        queue_state = self.state.store.queue_state
        return {"jobs": [replies.job_row(self.state, queue_state.jobs.get(job.id, job)) for job in jobs]}

    def _cancel(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
        only(message, "job", "jobs", "now")
        is_now = message.get("now", False)
        if not isinstance(is_now, bool):
            raise ConfigError(f"now={is_now!r:.50}: expected true or false")
        jobs, changed = self._own_all(caller, message), []
        reason = f"cancelled by {caller.name}"
        for job in jobs:
            changed.append(job)
            if job.state is JobState.PENDING:
                ended = self.state.record(events.Cancelled(time.time(), job.id, reason))
                changed[-1] = ended[0]
                continue
            if job.ending is None:
                self.state.record(events.StopRequested(time.time(), job.id, JobState.CANCELLED, reason))
            if is_now or job.ending is not None:  # asked again
                self.to_kill.add(job.id)
        return self._told(changed)

    def _hold(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
        only(message, "job", "jobs")
        jobs = self._own_all(caller, message)
        for job in jobs:
            if job.state is not JobState.PENDING:
                raise QueueError(f"job {job.id} is {job.state}: only a pending job can be held back")
        for job in jobs:
            self.state.record(events.JobHeld(time.time(), job.id))
        return self._told(jobs)

    def _release(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
        only(message, "job", "jobs")
        jobs = self._own_all(caller, message)
        for job in jobs:
            self.state.record(events.Released(time.time(), job.id))
        return self._told(jobs)

    def _change(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
        changes = {name: value for name, value in message.items() if name not in ("verb", "job", "id")}
        jobs = self._own_all(caller, {"verb": "change", "job": message.get("job")})
        spec = requests.changed_spec(jobs[0].spec, changes)
        if spec.priority > jobs[0].spec.priority:
            self._check_priority(caller, spec.priority)
        queue_state = self.state.store.queue_state
        if reason := refusal(
            replace(spec, after=()), {}, {}, queue_state.users, layout_of(queue_state.devices.values())
        ):
            raise QueueError(reason)
        changed = self.state.record(events.SpecChanged(time.time(), jobs[0].id, spec))
        return {"job": replies.job_row(self.state, changed[0])}

    def _list(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
        only(message, "user", "states", "ended", "after", "limit", "newest_first")
        user, after, limit = message.get("user"), message.get("after", 0), message.get("limit", LARGEST_PAGE)
        if not (isinstance(after, int) and isinstance(limit, int) and 0 <= after < 2**62 and limit > 0):
            raise ConfigError(f"after={after!r:.50}, limit={limit!r:.50}: expected numbers, limit of at least 1")
        if user is not None and not isinstance(user, str):
            raise ConfigError(f"user={user!r:.50}: expected a name")
        states = _states(message.get("states"), bool(message.get("ended", False)))
        limit = min(limit, LARGEST_PAGE)
        reader, queue_state = self.state.reader, self.state.store.queue_state
        lines = reader.jobs(
            states=states,
            user=user,
            after=after,
            limit=limit + 1,
            newest_first=bool(message.get("newest_first", False)),
        )
        foreseen = self.state.outlook(queue_state.snapshot())
        found = []
        for line in lines[:limit]:
            job = queue_state.jobs.get(line.id)
            row = (
                replies.ended_row(self.state, line)
                if job is None
                else replies.job_row(self.state, job, foreseen.get(job.id))
            )
            found.append({**row, "number": line.number})
        counts = {str(state): num for state, num in reader.counts(user).items()}
        return {"jobs": found, "more": len(lines) > limit, "counts": counts}

    def _job(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
        only(message, "job")
        name = message.get("job")
        queue_state, reader = self.state.store.queue_state, self.state.reader
        live = queue_state.jobs.get(name) if isinstance(name, str) else None
        job = live or (reader.job(name) if isinstance(name, str) else None)
        if job is None:
            raise QueueError(f"there is no job {name!r:.50}")
        program = reader.program(job.id) or {}
        for flag in (requests.LEARNED, requests.MEASURED):
            program.pop(flag, None)
        if not caller.is_admin and program.get("uid") != caller.uid:
            program = {key: program[key] for key in ("command", "folder") if key in program}
        foreseen = self.state.outlook(queue_state.snapshot()).get(job.id) if live is not None else None
        spec = events.as_row(events.Submitted(0.0, "", job.spec))["spec"]
        return {
            "job": replies.job_row(self.state, job, foreseen),
            "spec": spec,
            "program": program,
            "attempts": [row_of_attempt(attempt) for attempt in reader.attempts(job.id)],
        }

    def _status(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
        only(message)
        return dict(replies.status_row(self.state))

    def _admin(self, caller: Caller, verb: str) -> None:
        if not caller.is_admin:
            raise QueueError(f"{verb} is for this queue's admins, and you are {caller.name}")

    def _set(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
        only(message, "settings")
        self._admin(caller, "set")
        given = message.get("settings")
        if not isinstance(given, Mapping) or not given:
            raise ConfigError(f"settings={given!r:.100}: expected an object of names and values")
        if twice := given.keys() & self.state.settings.settings.keys():
            raise ConfigError(f"{', '.join(sorted(twice))}: set in the queue's own queue.toml; change it there")
        known = settings_from(given)
        changes = {name: getattr(known, name) for name in given}
        new = replace(self.state.store.queue_state.settings, **changes)
        self.state.record(events.SettingsSet(time.time(), new))
        return {"settings": asdict(new)}

    def _limits(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
        only(message, "user", "max_devices", "max_running", "max_queued", "share")
        self._admin(caller, "limits")
        name = check_name("user", message.get("user"))
        if name in self.state.settings.limits:
            raise ConfigError(f"the limits of {name} are set in the queue's own queue.toml; change them there")
        queue_state = self.state.store.queue_state
        before = queue_state.users[name].limits if name in queue_state.users else Limits()
        changes = {key: value for key, value in message.items() if key not in ("verb", "user", "id")}
        try:
            event = events.LimitsSet(time.time(), name, replace(before, **changes))
        except TypeError as error:
            raise ConfigError(f"limits: {error}") from error
        self.state.record(event)
        return {"user": replies.user_row(self.state, name)}

    def _reserve(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
        only(message, "devices", "start_s", "end_s", "users")
        self._admin(caller, "reserve")
        devices, users = message.get("devices"), message.get("users", [])
        if not all(isinstance(part, list) and all(isinstance(name, str) for name in part) for part in (devices, users)):
            raise ConfigError("reserve: expected devices and users as lists of names")
        labels = {found.label: name for name, found in self.state.devices.items()}
        taken = {labels.get(name, name) for name in devices or ()}
        name = f"r{self.state.store.last + 1}"
        start_s, end_s = message.get("start_s"), message.get("end_s")
        if not isinstance(start_s, int | float) or not isinstance(end_s, int | float):
            raise ConfigError(f"start_s={start_s!r:.50}, end_s={end_s!r:.50}: expected seconds since 1970")
        made = Reservation(name, frozenset(taken), start_s, end_s, frozenset(users))
        self.state.record(events.ReservationSet(time.time(), made))
        return {"reservation": replies.reservation_row(self.state, name)}

    def _unreserve(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
        only(message, "reservation")
        self._admin(caller, "unreserve")
        self.state.record(events.ReservationEnded(time.time(), str(message.get("reservation"))))
        return {}

    def _wait(self, caller: Caller, message: dict[str, Any]) -> DelayedReply:
        only(message, "after", "timeout_s")
        after, timeout_s = message.get("after", self.state.store.last), message.get("timeout_s", 30.0)
        if not isinstance(after, int) or not isinstance(timeout_s, int | float) or timeout_s < 0:
            raise ConfigError(
                f"after={after!r:.50}, timeout_s={timeout_s!r:.50}: expected an event's number and seconds"
            )
        return DelayedReply(after, time.monotonic() + min(float(timeout_s), _LONGEST_WAIT_S))

    def _stop(self, caller: Caller, message: dict[str, Any]) -> dict[str, Any]:
        only(message)
        self._admin(caller, "stop")
        self.is_over = True
        return {"pid": os.getpid()}


def _states(given: Any, ended: bool) -> list[JobState]:
    if given is None:
        return [] if ended else [state for state in JobState if state not in ENDED]
    if not isinstance(given, list) or not all(isinstance(name, str) and name in list(JobState) for name in given):
        raise ConfigError(f"states={given!r:.100}: expected a list of {', '.join(JobState)}")
    return [JobState(name) for name in given]
