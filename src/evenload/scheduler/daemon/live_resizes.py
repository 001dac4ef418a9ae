"""Changes of devices that running programs carry out without a stop (`evenload.job.devices`).

Everything follows from the store and the two files of each attempt: a daemon that was killed in between goes on with the change.
A program that can't change its devices, or doesn't reply, is stopped and resumed on them, as one without this ability.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from evenload.job.devices import CHANGED, READY, REFUSED, GivenDevice, GivenDevices, read_given, read_reply, write_given
from evenload.job.processes import boottime_s
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job
from evenload.scheduler.daemon.learning import Learning
from evenload.scheduler.daemon.runners import LiveAttempt
from evenload.scheduler.daemon.state import DaemonState

ASSUMED_S = 3.0
"""Cost of a change before the first was measured."""
_REPLY_WITHIN_S = 600.0
"""A new rank starts within this, while the others go on; a program that is to give devices back has the time of its grace."""
_BEGIN_WITHIN_S = 10.0
"""A program that has not begun to train loses nothing by a stop, so others don't wait longer for its devices."""
_LOOK_EVERY_S = 0.1

Record = Callable[..., tuple[Job, ...]]
Problem = Callable[[Job, float], tuple[str, str] | tuple[()] | None]


class LiveResizes:
    def __init__(self, state: DaemonState, learning: Learning, problem: Problem) -> None:
        """`problem` returns the new device that isn't free, and the reason; () if all are, None while that isn't known."""
        self._state, self._learning, self._problem = state, learning, problem

    def begin(self, live: LiveAttempt, job: Job) -> None:
        """Write the devices of an attempt that starts, if their number may change; without the file it is stopped for that."""
        if job.spec.needs.min_devices < job.spec.needs.max_devices:
            with contextlib.suppress(OSError):
                write_given(Path(live.terms.devices_file), self._given(0, job.devices))

    def note_abilities(self, record: Record) -> None:
        """Record which programs can change their devices without a stop: policies count less for their changes."""
        for live, job in self._elastic(JobState.RUNNING):
            if job.spec.resize_s is None and (reply := read_reply(live.terms)) and reply.state == READY:
                record(events.SpecChanged(self._now_s, job.id, replace(job.spec, resize_s=ASSUMED_S)))

    def refusal(self, job: Job) -> events.ResizeRefused | None:
        """Return the event of a requested resize that the job's program can't carry out, as it has announced with its reason."""
        live = self._state.runners.live.get(job.id)
        reply = None if live is None else read_reply(live.terms)
        if reply is None or reply.state != REFUSED:
            return None
        return events.ResizeRefused(self._now_s, job.id, reply.reason)

    def request(self, live: LiveAttempt, job: Job) -> float:
        """Have a program change its devices, once it trains; return when to look for its reply, by the monotonic clock."""
        if live.resizing_since_s is None:
            live.resizing_since_s = time.monotonic()
        path = Path(live.terms.devices_file)
        given, reply = read_given(path), read_reply(live.terms)
        is_due = given is not None and reply is not None and reply.state != REFUSED and not _is_of(given, job)
        if given is not None and is_due and self._problem(job, live.resizing_since_s) == ():
            try:
                write_given(path, self._given(given.number + 1, job.target))
            except OSError as error:
                self._state.problems["disk"] = str(error)  # the next turn tries again
        return time.monotonic() + _LOOK_EVERY_S

    def follow(self, record: Record) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Record the replies to requested changes; yield each job that gave devices back, and these."""
        for live, job in self._elastic(JobState.RESIZING):
            if not job.resizes_in_place or live.requested or live.resizing_since_s is None:
                continue
            given, reply = read_given(Path(live.terms.devices_file)), read_reply(live.terms)
            waited_s = time.monotonic() - live.resizing_since_s
            if given is None:
                self._refuse(live, job, "it was started by an earlier version, without a file of its devices", record)
            elif reply is not None and reply.state == REFUSED:
                self._refuse(live, job, reply.reason, record)
            elif reply is not None and _is_of(given, job) and (reply.number, reply.state) == (given.number, CHANGED):
                yield job.id, tuple(device for device in job.devices if device not in job.target)
                self._has_changed(live, job, reply.seconds, record)
            elif not _is_of(given, job) and (problem := self._problem(job, live.resizing_since_s)):
                self._keep(live, job, *problem, record)
            elif waited_s > (limit_s := _limit_s(live, job, has_begun=reply is not None)):
                self._refuse(live, job, f"it did not do so within {limit_s:g} s", record)

    def _keep(self, live: LiveAttempt, job: Job, device: str, reason: str, record: Record) -> None:
        """Let a job keep its devices: a new one isn't free."""
        live.resizing_since_s = None
        record(events.DeviceClosed(self._now_s, device, reason))
        record(events.Resized(self._now_s, job.id, job.devices, job.attempt, reason=f"{device} is {reason}"))

    def _has_changed(self, live: LiveAttempt, job: Job, seconds: float, record: Record) -> None:
        record(events.Resized(self._now_s, job.id, job.target, job.attempt + 1, seconds))
        live.resizing_since_s, live.resized_since_boot_s = None, boottime_s()
        live.recorded_s, live.has_speed = 0.0, False
        live.busy_s.clear()
        if (measured := self._learning.resized(job, seconds)) is not None:
            record(measured)
        labels = ", ".join(found.label for name in job.target if (found := self._state.devices.get(name)) is not None)
        text = f"it goes on with {labels} without a stop ({job.reason}), {seconds:.1f} s after the request"
        self._state.runners.note(job.id, text)

    def _refuse(self, live: LiveAttempt, job: Job, reason: str, record: Record) -> None:
        live.resizing_since_s = None
        record(events.ResizeRefused(self._now_s, job.id, reason))

    def _elastic(self, state: JobState) -> Iterator[tuple[LiveAttempt, Job]]:
        jobs = self._state.store.queue_state.jobs
        for live in list(self._state.runners.live.values()):
            job = jobs.get(live.fence.job)
            if job is None or job.state is not state or live.identity is None or live.is_gone:
                continue
            if job.spec.needs.min_devices < job.spec.needs.max_devices:
                yield live, job

    def _given(self, number: int, devices: tuple[str, ...]) -> GivenDevices:
        found = self._state.devices
        return GivenDevices(
            number, tuple(GivenDevice(name, found[name].cores if name in found else ()) for name in devices)
        )

    @property
    def _now_s(self) -> float:
        return self._state.clock.now_s()


def _is_of(given: GivenDevices, job: Job) -> bool:
    return tuple(device.id for device in given.devices) == job.target


def _limit_s(live: LiveAttempt, job: Job, *, has_begun: bool) -> float:
    if len(job.target) > len(job.devices):
        return _REPLY_WITHIN_S
    return live.terms.grace_s if has_begun else min(_BEGIN_WITHIN_S, live.terms.grace_s)
