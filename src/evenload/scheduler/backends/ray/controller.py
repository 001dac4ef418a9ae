"""The detached actor that runs the queue on Ray: it decides by the core, and gives devices only to jobs that the core starts.

Ray has no priority between jobs; a request that waits in Ray is served when something is free. So nothing of ours waits
there: a job holds nothing of Ray until the core gives it devices, and one that must give way is asked to save and stop.
One thread looks at everything several times a second; calls from outside take the same lock.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenload.errors import QueueError
from evenload.scheduler.backends.interface import Described
from evenload.scheduler.backends.ray.devices import bundles_of, devices_of
from evenload.scheduler.backends.ray.gang import GROUPS, Gang, News, Work, log_file
from evenload.scheduler.backends.ray.queue import RayQueue
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState, Verb
from evenload.scheduler.core.values import settings_from
from evenload.scheduler.job_file import INDEX_VARIABLE, job_from

NAME, NAMESPACE = "queue", "evenload"
_POLL_S = 0.2
_NODES_EVERY_S = 2.0
_SHUT_S = 60.0
"""A device that Ray didn't give is left alone so long."""


class Controller:
    """The queue and the gangs that run."""

    def __init__(self, root: str) -> None:
        """Takes up the queue that lies in `root` on this node."""
        import ray

        self._ray: Any = ray
        self._root = Path(root)
        self._queue = RayQueue(self._root, time.time)
        self._gangs: dict[str, Gang] = {}
        self._shut_until_s: dict[str, float] = {}
        self._nodes_s = -_NODES_EVERY_S
        self._lock = threading.Lock()
        self._remove_groups()
        threading.Thread(target=self._run, name="evenload queue", daemon=True).start()

    def submit(self, table: Mapping[str, Any], user: str) -> str:
        """Takes a job file's table; the id."""
        with self._lock:
            self._see_nodes()
            return self._queue.submit(job_from(table), user)

    def cancel(self, job: str, user: str) -> None:
        """Cancels a job; asked again it ends at once."""
        with self._lock:
            for name in self._queue.cancel(job, user):
                if name in self._gangs:
                    self._gangs[name].stop(f"cancelled by {user}")

    def describe(self, ids: Sequence[str]) -> list[Described]:
        """How jobs are."""
        with self._lock:
            return self._queue.describe(ids)

    def log(self, job: str) -> str:
        """The path of a job's output, on the first of its nodes."""
        if not self.describe([job]):
            raise QueueError(f"there is no job {job}")
        return str(log_file(self._root, job))

    def set_settings(self, values: Mapping[str, Any]) -> None:
        """How it decides from now on; see `Settings`."""
        with self._lock:
            self._queue.apply(events.SettingsSet(time.time(), settings_from(values)))

    def close(self) -> None:
        """Ends all programs at once; the log stays."""
        with self._lock:
            for gang in self._gangs.values():
                gang.close()
            self._gangs.clear()

    def _remove_groups(self) -> None:
        """A controller that died leaves placement groups, which would hold their devices for ever."""
        for row in self._ray.util.placement_group_table().values():
            if row["name"].startswith(GROUPS) and row["state"] != "REMOVED":
                with contextlib.suppress(ValueError):  # gone meanwhile
                    self._ray.util.remove_placement_group(self._ray.util.get_placement_group(row["name"]))

    def _run(self) -> None:
        while True:
            try:
                with self._lock:
                    self._turn()
            except Exception:  # a queue that stops at the first surprise helps nobody; it is told in the actor's log
                traceback.print_exc(file=sys.stderr)
                time.sleep(2.0)
            time.sleep(_POLL_S)

    def _turn(self) -> None:
        if time.monotonic() - self._nodes_s > _NODES_EVERY_S:
            self._see_nodes()
        for job, gang in list(self._gangs.items()):
            self._see(job, gang, gang.look())
        for command in self._queue.decide():
            self._carry_out(command)

    def _see_nodes(self) -> None:
        self._nodes_s = time.monotonic()
        self._queue.see_devices(devices_of(self._ray.nodes()))
        for device, until_s in list(self._shut_until_s.items()):
            if time.monotonic() > until_s:
                del self._shut_until_s[device]
                if device in self._queue.queue_state.closed:
                    self._queue.apply(events.DeviceOpened(time.time(), device))

    def _see(self, job: str, gang: Gang, news: News) -> None:
        now_s = time.time()
        held = self._queue.queue_state.jobs[job]
        if news.has_begun and held.state is JobState.STARTING:
            self._queue.apply(events.JobStarted(now_s, job))
        if news.report is not None:
            self._queue.see_report(job, news.report)
        if news.blocked:
            for device in held.devices:
                if device not in self._queue.queue_state.closed:
                    self._queue.apply(events.DeviceClosed(now_s, device, news.blocked))
                    self._shut_until_s[device] = time.monotonic() + _SHUT_S
        if not (news.outcome or news.lost or news.blocked):
            return
        gang.close()
        del self._gangs[job]
        if news.lost:
            self._queue.apply(events.Lost(now_s, job, news.lost))
        elif news.outcome is None or news.outcome.verb is Verb.YIELD:
            reason = news.blocked or (news.outcome.reason if news.outcome else "")
            self._queue.apply(events.Yielded(now_s, job, reason))
            if (again := self._queue.queue_state.jobs.get(job)) is not None and again.state is JobState.STARTING:
                self._start(job)  # it was resized
        else:
            is_success = news.outcome.verb is Verb.SUCCEED
            self._queue.apply(events.Ended(now_s, job, is_success, news.outcome.reason))

    def _carry_out(self, command: events.Command) -> None:
        if isinstance(command, events.Placed):
            self._start(command.job)
            return
        gang = self._gangs.get(command.job)
        if gang is not None and not isinstance(command, events.Cancelled):
            gang.stop(command.reason or "asked by the queue")

    def _start(self, name: str) -> None:
        job = self._queue.queue_state.jobs[name]
        file, index = self._queue.files[name]
        environment = dict(file.environment) | ({} if index is None else {INDEX_VARIABLE: str(index)})
        work = Work(
            job=name,
            attempt=job.attempt,
            command=file.command_of(index),
            folder=file.folder,
            environment=environment,
            grace_s=file.grace_s,
            goes_on=bool(file.saves) or file.requeue or job.done > 0,
            root=self._root,
        )
        devices = [self._queue.queue_state.devices[device] for device in job.devices]
        try:
            self._gangs[name] = Gang(work, bundles_of(devices))
        except (ValueError, self._ray.exceptions.RayError) as error:
            self._queue.apply(events.Lost(time.time(), name, f"Ray refuses: {error}"))
