"""The detached actor that runs the queue on Ray: it decides like the local queue, and requests devices for jobs it starts.

Ray has no priorities between jobs: a pending request is served when something is free. So no request of ours waits there: a
job holds nothing in Ray until the queue gives it devices, and a preempted job is asked to save and stop. One thread does all
the work, several times a second; calls from outside are passed to it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from evenload.scheduler.backends.interface import JobStatus
from evenload.scheduler.backends.ray.devices import bundles_of, devices_of, host_names
from evenload.scheduler.backends.ray.gang import GROUPS, GangProgram, GangUpdate, RayGang
from evenload.scheduler.backends.ray.output import OutputFile, output_files
from evenload.scheduler.backends.ray.queue import RayQueue
from evenload.scheduler.backends.ray.rows import job_rows, queue_rows
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState, Verb
from evenload.scheduler.job_file import job_from
from evenload.scheduler.messages import DeviceRow

NAME, NAMESPACE = "queue", "evenload"
_POLL_S = 0.2
_NODES_POLL_S = 2.0
_CLOSED_S = 60.0
"""Time for which a device that Ray did not provide is left unused."""

_T = TypeVar("_T")


class RayQueueActor:
    """The queue and its running jobs."""

    def __init__(self, root: str) -> None:
        """Open the queue in `root` on this node."""
        import ray

        self._ray: Any = ray
        self._root = Path(root)
        self._gangs: dict[str, RayGang] = {}
        self._closed_until_s: dict[str, float] = {}
        self._nodes_s = -_NODES_POLL_S
        self._thread = ThreadPoolExecutor(1, "evenload queue")
        self._queue = self._in_thread(lambda: RayQueue(self._root))
        self._remove_groups()
        threading.Thread(target=self._run, name="evenload queue polls", daemon=True).start()

    def submit(self, table: Mapping[str, Any], user: str) -> str:
        def submit() -> str:
            self._update_nodes()
            return self._queue.submit(job_from(table), user)

        return self._in_thread(submit)

    def cancel(self, job: str, user: str, now: bool = False) -> None:
        """Cancel a job, or those of an array, a range or a name; a second call ends it at once, as does `now`."""

        def cancel() -> None:
            for name in self._queue.cancel(job, user):
                if name in self._gangs:
                    self._gangs[name].stop(f"cancelled by {user}")
                    if now:
                        self._gangs[name].stop(f"cancelled by {user}")

        self._in_thread(cancel)

    def hold(self, job: str, user: str, is_held: bool) -> list[str]:
        return self._in_thread(lambda: self._queue.hold(job, user, is_held=is_held))

    def change(self, job: str, user: str, changes: Mapping[str, Any]) -> list[str]:
        return self._in_thread(lambda: self._queue.change(job, user, changes))

    def describe(self, ids: Sequence[str]) -> list[JobStatus]:
        return self._in_thread(lambda: self._queue.describe(ids))

    def rows(self, user: str | None, states: Sequence[JobState], num_ended: int | None) -> dict[str, Any]:
        return self._in_thread(lambda: queue_rows(self._queue, user, states, num_ended))

    def job_rows(self, job: str) -> tuple[dict[str, Any], dict[str, DeviceRow]]:
        return self._in_thread(lambda: job_rows(self._queue, job))

    def ids_of(self, text: str) -> list[str]:
        return self._in_thread(lambda: self._queue.ids_of(text))

    def outputs(self, job: str) -> list[OutputFile]:
        """Return the files with a job's output, one for each attempt, in their order."""
        return self._in_thread(lambda: output_files(self._queue, job))

    def _in_thread(self, work: Callable[[], _T]) -> _T:
        return self._thread.submit(work).result()

    def _remove_groups(self) -> None:
        """Remove the placement groups of an actor that died; they would hold their devices for ever."""
        for row in self._ray.util.placement_group_table().values():
            if row["name"].startswith(GROUPS) and row["state"] != "REMOVED":
                with contextlib.suppress(ValueError):  # removed meanwhile
                    self._ray.util.remove_placement_group(self._ray.util.get_placement_group(row["name"]))

    def _run(self) -> None:
        while True:
            try:
                self._in_thread(self._poll)
            except Exception:  # the queue must survive any error; it goes to the actor's log
                traceback.print_exc(file=sys.stderr)
                time.sleep(2.0)
            time.sleep(_POLL_S)

    def _poll(self) -> None:
        if time.monotonic() - self._nodes_s > _NODES_POLL_S:
            self._update_nodes()
        for job, gang in list(self._gangs.items()):
            self._update(job, gang, gang.poll())
        for command in self._queue.decide():
            self._carry_out(command)
        self._queue.commit()

    def _update_nodes(self) -> None:
        self._nodes_s = time.monotonic()
        nodes = self._ray.nodes()
        self._queue.update_devices(devices_of(nodes), host_names(nodes))
        for device, until_s in list(self._closed_until_s.items()):
            if time.monotonic() > until_s:
                del self._closed_until_s[device]
                if device in self._queue.queue_state.closed:
                    self._queue.record(events.DeviceOpened(self._queue.now_s, device))

    def _update(self, name: str, gang: RayGang, update: GangUpdate) -> None:
        now_s = self._queue.now_s
        job = self._queue.queue_state.jobs[name]
        if update.has_begun and job.state is JobState.STARTING:
            self._queue.record(events.JobStarted(now_s, name))
            self._queue.note_start(name)
        if update.report is not None:
            self._queue.update_progress(name, update.report)
        if update.blocked:
            for device in job.devices:
                if device not in self._queue.queue_state.closed:
                    self._queue.record(events.DeviceClosed(now_s, device, update.blocked))
                    self._closed_until_s[device] = time.monotonic() + _CLOSED_S
        if not (update.outcome or update.lost or update.blocked):
            return
        gang.close()
        del self._gangs[name]
        if update.lost:
            self._queue.end(events.Lost(now_s, name, update.lost))
        elif update.outcome is None or update.outcome.verb is Verb.YIELD:
            reason = update.blocked or (update.outcome.reason if update.outcome else "")
            self._queue.note_stop(name)
            self._queue.end(events.Yielded(now_s, name, reason))
            resized = self._queue.queue_state.jobs.get(name)
            if resized is not None and resized.state is JobState.STARTING:
                self._queue.commit()
                self._start(name)
        else:
            is_success = update.outcome.verb is Verb.SUCCEED
            self._queue.record(events.Ended(now_s, name, is_success, update.outcome.reason))
        self._queue.forget(name)

    def _carry_out(self, command: events.Command) -> None:
        if isinstance(command, events.Placed):
            self._start(command.job)
            return
        gang = self._gangs.get(command.job)
        if gang is not None and not isinstance(command, events.Cancelled):
            gang.stop(command.reason or "requested by the queue")

    def _start(self, name: str) -> None:
        job = self._queue.queue_state.jobs[name]
        file, index = self._queue.program(name)
        program = GangProgram(
            job=name,
            attempt=job.attempt,
            command=file.command_of(index),
            folder=file.folder,
            environment=file.environment_of(index),
            grace_s=file.grace_s,
            goes_on=bool(file.saves) or file.requeue or job.done > 0,
            root=self._root,
        )
        devices = [self._queue.queue_state.devices[device] for device in job.devices]
        try:
            self._gangs[name] = RayGang(program, bundles_of(devices))
        except (ValueError, self._ray.exceptions.RayError) as error:
            self._queue.record(events.Lost(self._queue.now_s, name, f"Ray rejected the request: {error}"))
