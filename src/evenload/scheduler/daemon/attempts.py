"""Attempts and their runners: launched, adopted, admitted to free devices, requested to stop, ended.

Everything follows from the store alone: an attempt without a runner gets one, and the runner of a job that has to stop gets
a request, whether that was recorded a moment ago or by an earlier daemon that was killed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from evenload.errors import EvenloadError, QueueError
from evenload.job.processes import ProcessIdentity, identity_of
from evenload.scheduler.core import events
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.core.values import Job
from evenload.scheduler.daemon.attempt_specs import attempt_spec
from evenload.scheduler.daemon.endings import ending
from evenload.scheduler.daemon.external_processes import closed_reason, join_refusal
from evenload.scheduler.daemon.idle import IdleWatch
from evenload.scheduler.daemon.learning import Learning
from evenload.scheduler.daemon.live_resizes import LiveResizes
from evenload.scheduler.daemon.log import DaemonLog
from evenload.scheduler.daemon.peaks import MemoryPeaks
from evenload.scheduler.daemon.runners import EndedAttempt, LiveAttempt
from evenload.scheduler.daemon.server import ClientConnection
from evenload.scheduler.daemon.state import DaemonState
from evenload.scheduler.runner.files import RunnerRequest, began_since_boot_s, is_full_disk, may_report
from evenload.scheduler.runner.lost_programs import final
from evenload.scheduler.store.ledger import AttemptRecord, Fence, ProgramStarted, RunnerStarted

_REPORT_EVERY_S = 60.0
_GRACE_S = 60.0
"""Grace of a program that isn't in the store any more."""
_LEAST_RUN_S = 2.0
"""A program that hasn't reported yet runs at least this long before it is requested to give its devices to others."""
_BACK_WITHIN_S = 5.0
"""Time for the driver to free the memory of a job that goes on with other devices."""
_LOOK_WITHIN_S = 30.0
"""A driver that doesn't answer for this long prevents a job from starting."""

Record = Callable[..., tuple[Job, ...]]
_Reply = tuple[ClientConnection, dict[str, Any]]

_ADMITTED = {"ok": True, "result": {"go": True}}
_REFUSED = {"ok": True, "result": {"go": False}}


@dataclass(frozen=True, slots=True)
class _PendingRunner:
    connection: ClientConnection
    fence: Fence
    identity: ProcessIdentity
    since_s: float


class Attempts:
    def __init__(self, state: DaemonState, log: DaemonLog, scan_soon: Callable[[], None]) -> None:
        self._state, self._log, self._scan_soon = state, log, scan_soon
        self._learning = Learning(state)
        self._peaks = MemoryPeaks(state, log)
        self._idle = IdleWatch(state)
        self.resizes = LiveResizes(state, self._learning, self._new_devices_problem)
        self._pending: list[_PendingRunner] = []
        self._released_s: dict[str, float] = {}
        """GPU → when a job last released it, by the monotonic clock."""
        self._last_holder: dict[str, str] = {}
        """GPU → the job that last released it."""
        self.next_request_s: float | None = None
        """When the next job that began a moment ago is requested to stop, by the monotonic clock."""
        self._uncommitted: list[LiveAttempt] = []
        """Attempts whose first report was recorded since the last commit."""
        self._failed: dict[str, str] = {}
        """Job → why its runner couldn't be started."""

    def adopt_running(self) -> None:
        num = 0
        for attempt in self._state.store.attempts():
            if attempt.runner is None:
                continue  # no program of it has begun: `launch` gives it a runner
            job, stored = (
                self._state.store.queue_state.jobs[attempt.fence.job],
                self._state.program_of(attempt.fence.job),
            )
            num += self._state.runners.adopt(
                attempt,
                grace_s=_GRACE_S if stored is None else stored.program.grace_s,
                learns=stored is not None and stored.learns,
                measures=False,  # its first progress may be long ago
                done=job.done,
            )
            self._state.runners.live[job.id].idle_end_s = None if stored is None else stored.program.idle_end_s
        if num:
            self._log.write(f"{num} running jobs adopted")

    def launch(self) -> None:
        for attempt in self._state.store.attempts():
            name = attempt.fence.job
            live = self._state.runners.live.get(name)
            if name in self._failed or (live is not None and live.fence == attempt.runner_fence):
                continue
            if live is not None:
                continue  # its earlier attempt isn't cleaned up yet
            try:
                self._start_runner(attempt)
            except (EvenloadError, OSError) as error:
                self._log.write(f"job {name} can't be started: {error}")
                if is_full_disk(error):
                    self._state.problems["disk"] = str(error)  # no fault of the job: the next turn tries again
                    return
                self._failed[name] = str(error)

    def _start_runner(self, attempt: AttemptRecord) -> None:
        state, name = self._state, attempt.fence.job
        stored = state.program_of(name)
        if stored is None:
            raise QueueError("its program isn't in the store")
        job = state.store.queue_state.jobs[name]
        shares = job.spec.share_device
        order = attempt_spec(
            state.folder, attempt, stored.program, state.devices, state.settings.log_bytes, shares=shares
        )
        state.runners.launch(attempt, order, learns=stored.learns, measures=stored.measures, done=job.done)
        live = state.runners.live[name]
        live.idle_end_s = stored.program.idle_end_s
        if not (stored.program.image or stored.program.pty):  # a container shows the devices of its start
            self.resizes.begin(live, job)

    def register(self, connection: ClientConnection, *, job: str, attempt: int, fence: int) -> dict[str, Any] | None:
        """Return the reply, None where it follows after a scan; raise a `StaleError` for an old fence."""
        if connection.uid != os.geteuid():
            raise QueueError("the verb runner is only for the daemon's own runners")
        own = Fence(job, attempt, fence)
        self._state.store.check(own)
        identity = identity_of(connection.pid)
        live, record = self._state.runners.live.get(job), self._state.store.attempt(job)
        if identity is None or live is None or live.fence != own or record is None:
            return _REFUSED
        if record.runner is not None:
            return _ADMITTED if asdict(identity) == dict(record.runner) else _REFUSED
        if not self._state.runners.register(job, identity):
            return _REFUSED
        self._pending = [other for other in self._pending if other.fence != own]  # it may have lost its connection
        self._pending.append(_PendingRunner(connection, own, identity, time.monotonic()))
        if self._gpus(record.devices):
            self._scan_soon()
        return None

    def admit(self, record: Record) -> list[_Reply]:
        """Return the replies to runners whose devices were all scanned since they registered: admitted or refused."""
        replies: list[_Reply] = []
        waiting = []
        for at in self._pending:
            attempt = self._state.store.attempt(at.fence.job)
            if attempt is None or attempt.fence != at.fence:
                replies.append((at.connection, _REFUSED))
                continue
            job = self._state.store.queue_state.jobs[at.fence.job]
            if attempt.runner is not None:
                replies.append((at.connection, _ADMITTED))
                continue
            if job.state is not JobState.STARTING:
                replies.append((at.connection, _REFUSED))
                record(events.Yielded(self._state.clock.now_s(), job.id, job.reason, has_saved=False))
                continue
            problem = self._problem(attempt, at.since_s)
            if problem is None:
                waiting.append(at)
                continue
            replies.append((at.connection, _REFUSED if problem else _ADMITTED))
            if problem:
                device, reason = problem
                if device not in self._state.store.queue_state.closed:
                    record(events.DeviceClosed(self._state.clock.now_s(), device, reason))
                record(
                    events.Yielded(
                        self._state.clock.now_s(), job.id, f"{self._label(device)} is {reason}", has_saved=False
                    )
                )
                self._log.write(f"job {job.id} doesn't start: {self._label(device)}: {reason}")
            else:
                facts = asdict(at.identity)
                record(RunnerStarted(self._state.clock.now_s(), job.id, at.fence.attempt, facts), fence=at.fence)
                record(events.JobStarted(self._state.clock.now_s(), job.id), fence=at.fence)
                if (live := self._state.runners.live.get(job.id)) is not None:
                    live.began_s = time.monotonic()
        self._pending = waiting
        return replies

    def _problem(self, attempt: AttemptRecord, since_s: float) -> tuple[str, str] | tuple[()] | None:
        """Return the device that isn't free, and the reason; () where all are free; None where a scan is needed first."""
        gpus = self._gpus(attempt.devices)
        if not gpus:
            return ()
        scan = self._state.scan
        released_s = [self._released_s.get(device, 0.0) for device in gpus]  # perhaps by a job that shared it
        if scan is None or scan.began_s <= max(since_s, *released_s):
            self._scan_soon()
            late = time.monotonic() - since_s > _LOOK_WITHIN_S
            return (gpus[0], f"not seen: NVML hasn't answered for {_LOOK_WITHIN_S:g} s") if late else None
        for device in gpus:
            others = self._beside(device)
            held, allowed_bytes = scan.held.get(device), self._state.settings.ghost_bytes
            if (
                reason := closed_reason(held, allowed_bytes)
                if others is None
                else join_refusal(held, allowed_bytes, others)
            ):
                if self._is_settling(attempt, device, is_shared=others is not None):
                    return None
                return device, reason
        return ()

    def _new_devices_problem(self, job: Job, since_s: float) -> tuple[str, str] | tuple[()] | None:
        """As `_problem`, of the devices that a running job is to get at `since_s`."""
        attempt = self._state.store.attempt(job.id)
        new = tuple(device for device in job.target if device not in job.devices)
        return () if attempt is None else self._problem(replace(attempt, devices=new), since_s)

    def _beside(self, device: str) -> list[int] | None:
        """Return the process ids of the runners of all jobs on a device; None where it isn't shared."""
        names = self._state.store.queue_state.holder.get(device, ())
        if len(names) < 2:
            return None
        pids = self.runner_pids()
        return [pids[name] for name in names if name in pids]

    def _is_settling(self, attempt: AttemptRecord, device: str, *, is_shared: bool) -> bool:
        """Return whether the job (on a shared device, any) released it a moment ago: its memory is still being freed."""
        is_its_own = is_shared or self._last_holder.get(device) == attempt.fence.job
        return is_its_own and time.monotonic() - self._released_s.get(device, 0.0) < _BACK_WITHIN_S

    def runner_pids(self) -> dict[str, int]:
        live = self._state.runners.live
        return {name: one.identity.pid for name, one in live.items() if one.identity is not None}

    def _gpus(self, devices: Iterable[str]) -> list[str]:
        found = self._state.devices
        return [device for device in devices if device in found and found[device].is_gpu]

    def _label(self, device: str) -> str:
        found = self._state.devices.get(device)
        return device if found is None else found.label

    def unseen(self) -> list[str]:
        """Return the GPUs that were not scanned since a job released them."""
        scan = self._state.scan
        seen_s = -1.0 if scan is None else scan.began_s
        unseen = [
            name
            for name, found in self._state.devices.items()
            if found.is_gpu and seen_s <= self._released_s.get(name, 0.0)
        ]
        if unseen:
            self._scan_soon()
        return unseen

    def request_stops(self, to_kill: set[str]) -> None:
        queue_state = self._state.store.queue_state
        for name in to_kill & self._state.runners.live.keys():
            reason = queue_state.jobs[name].reason if name in queue_state.jobs else "it ended"
            if self._request(name, RunnerRequest("kill", reason)):
                to_kill.discard(name)
        to_kill &= self._state.runners.live.keys()
        self.next_request_s = None
        for name, live in self._state.runners.live.items():
            job = queue_state.jobs.get(name)
            if job is None or job.state not in (JobState.PREEMPTING, JobState.RESIZING) or live.requested:
                continue
            if job.resizes_in_place:
                self.next_request_s = min(self.resizes.request(live, job), self.next_request_s or math.inf)
                continue
            if job.ending is None and live.report is None and time.monotonic() < live.began_s + _LEAST_RUN_S:
                next_request_s = live.began_s + _LEAST_RUN_S  # without its handler the signal would end it unsaved
                self.next_request_s = min(next_request_s, self.next_request_s or next_request_s)
                continue
            self._request(name, RunnerRequest("stop", job.reason or "requested by the queue"))

    def _request(self, name: str, request: RunnerRequest) -> bool:
        """Pass a request to a runner; return False where the disk has no room for it, so that the next turn tries again."""
        try:
            self._state.runners.request(name, request)
        except OSError as error:
            self._state.problems["disk"] = str(error)
            return False
        return True

    def note_reports(self, record: Record) -> None:
        """Read the programs' reports, and their memory on devices that they may share.

        Recorded are an attempt's first report, its first with a speed, then one a minute.
        """
        self._peaks.measure(record)
        self._idle.measure(record)
        self.resizes.note_abilities(record)
        for live in self._state.runners.live.values():
            self._note_start(live, record)
        for live in self._state.runners.read_reports():
            now_s = time.monotonic()
            has_speed = live.report is not None and live.report.steps_per_s > 0
            if not live.recorded_s or has_speed > live.has_speed or now_s - live.recorded_s >= _REPORT_EVERY_S:
                self._record_report(live, record)
                live.recorded_s, live.has_speed = now_s, has_speed

    def _note_start(self, live: LiveAttempt, record: Record) -> None:
        """Record when an attempt's program began, by its runner's note: its bill has nothing of what came before."""
        attempt = self._state.store.attempt(live.fence.job)
        if live.identity is None or attempt is None or attempt.fence != live.fence:
            return
        since_boot_s, clock = began_since_boot_s(live.folder), self._state.clock
        began_s = None if since_boot_s is None else clock.at(live.identity.boot_id, since_boot_s)
        if began_s is not None and attempt.began_s < (began_s := min(began_s, clock.now_s())):
            record(ProgramStarted(clock.now_s(), live.fence.job, live.fence.attempt, began_s))

    def _record_report(self, live: LiveAttempt, record: Record) -> None:
        job = self._state.store.queue_state.jobs.get(live.fence.job)
        reported = None if job is None else self._learning.reported(live, job)
        if job is None or reported is None:
            return
        (job,) = record(reported)
        if live.learns and not job.spec.preemptible:
            live.learns = False
            self._uncommitted.append(live)
            (job,) = record(events.SpecChanged(self._state.clock.now_s(), job.id, replace(job.spec, preemptible=True)))
        if live.first is not None and live.measures and (measured := self._learning.began(live, job)) is not None:
            record(measured)
        live.measures = live.measures and live.first is None

    def end_gone(self, record: Record) -> list[EndedAttempt]:
        """Record the ends of attempts whose runners have ended, and return them; call `forget` once that is on disk."""
        found = self._state.runners.collect()
        if found:
            self._state.runners.read_reports()
        recorded = []
        for gone in found:
            live = gone.live
            attempt = self._state.store.attempt(live.fence.job)
            recorded.append(gone)
            if attempt is None or attempt.runner_fence != live.fence:
                continue
            self._note_start(live, record)
            self._record_report(live, record)
            event = self._event_of(gone, self._ended_s(gone, attempt.began_s))
            is_success = isinstance(event, events.Ended) and event.is_success
            self._peaks.ended(live, gone.result, is_success, record)
            for job in record(event):
                if job.id == live.fence.job and job.state in ENDED:
                    self._learn_from(job, record)
            self._note_release(attempt.fence.job, attempt.devices)
        for name, reason in list(self._failed.items()):
            if self._state.store.attempt(name) is not None and name not in self._state.runners.live:
                record(events.Lost(self._state.clock.now_s(), name, reason))
            del self._failed[name]
        return recorded

    def _event_of(self, gone: EndedAttempt, ended_s: float) -> events.QueueEvent:
        """Return how an attempt ended."""
        live, result, now_s = gone.live, gone.result, self._state.clock.now_s()
        event: events.QueueEvent = events.Lost(now_s, live.fence.job, gone.reason)
        if result is not None:
            event = ending(live.fence.job, now_s, result, live.report, live.done_before)
            if isinstance(event, events.Yielded):
                self._learning.stopped(live, result, ended_s)
        job_now = self._state.store.queue_state.jobs[live.fence.job]
        if isinstance(event, events.Yielded) and job_now.ending is not None:  # why it was to end says more than how
            event = replace(event, reason="")
        if isinstance(event, events.Yielded | events.Ended | events.Lost):
            event = replace(event, ended_s=ended_s)
        if not may_report(live.folder) and (result is None or result.code is not None):
            event = final(event, job_now)
        return event

    def _learn_from(self, job: Job, record: Record) -> None:
        """Record what an ended job changes in what is expected of the others."""
        jobs, now_s = self._state.store.queue_state.jobs, self._state.clock.now_s()
        for change in self._state.memory_history.learn(job, jobs, now_s):
            record(change)
        for change in self._state.run_estimates.learn(job, jobs, now_s):
            record(change)

    def _ended_s(self, gone: EndedAttempt, began_s: float) -> float:
        """Return when an attempt's program ended, by the queue's clock; `began_s` if it never began: nothing is billed."""
        clock, result = self._state.clock, gone.result
        if result is not None and result.code is None:
            return began_s
        if result is None and gone.live.was_gone:  # no more is known than that it still ran then
            return max(self._state.alive_s, gone.live.reported_s)
        ended_s = None if result is None else clock.at(result.boot, result.ended_since_boot_s)
        return clock.now_s() if ended_s is None else min(ended_s, clock.now_s())

    def follow_resizes(self, record: Record) -> None:
        """Record what running programs reply to changes of their devices."""
        for job, given_back in self.resizes.follow(record):
            self._note_release(job, given_back)

    def _note_release(self, job: str, devices: Iterable[str]) -> None:
        for device in self._gpus(devices):
            self._released_s[device] = time.monotonic()
            self._last_holder[device] = job

    def roll_back(self) -> None:
        """Have what was recorded since the last commit recorded again."""
        for live in self._uncommitted:
            live.learns, live.recorded_s = True, 0.0
        self._uncommitted.clear()

    def forget(self, ended: Iterable[EndedAttempt]) -> None:
        self._uncommitted.clear()
        for gone in ended:
            self._state.runners.forget(gone.live)
            if gone.live.fence.job not in self._state.store.queue_state.jobs:
                self._learning.forget(gone.live.fence.job)
