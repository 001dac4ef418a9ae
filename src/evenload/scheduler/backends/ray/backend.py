"""The backend `ray`: submit a job file to the queue inside a Ray cluster, and read the status of its jobs.

The queue is an actor (`ray.controller`) that the first submission starts and that lives as long as the cluster. Ray has no
users: anyone who can reach the cluster can do anything there, so the queue trusts the owner named by the client.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler.backends.interface import (
    BackendRequest,
    JobStatus,
    SchedulerBackend,
    check_options,
    check_resolved,
)
from evenload.scheduler.backends.ray.controller import NAME, NAMESPACE, RayQueueActor
from evenload.scheduler.backends.ray.output import JobOutput
from evenload.scheduler.core.states import JobState
from evenload.scheduler.job_file import JobFile, as_table, job_from

OPTIONS = {
    "address": "address of the cluster, such as 10.0.0.1:6379; default: RAY_ADDRESS, else the cluster on this machine",
    "root": "folder for output and state on each node; default: ~/.local/state/evenload/ray",
}
"""Keys of a job file's `[ray]` table."""

_TIMEOUT_S = 120.0
_REACH_S = 10.0
_RESTART_S = 30.0
"""Time that Ray may take to restart the queue's actor."""


class RayBackend(SchedulerBackend):
    """Ray; `address` and `root` are the defaults of jobs that do not set them."""

    name = "ray"

    def __init__(self, address: str = "", root: Path | None = None) -> None:
        self._address = address
        self._root = root

    @property
    def root(self) -> Path:
        """The default folder for output and state, under the same path on each node."""
        return self._root or Path.home() / ".local" / "state" / "evenload" / "ray"

    def build_request(self, job: JobFile, snapshot: str = "") -> BackendRequest:
        """Build the job file's table, which the queue on Ray reads."""
        job = replace(job, folder=snapshot or job.folder)
        check_resolved(job)
        options = job.options.get("ray", {})
        check_options("ray", options, OPTIONS)
        if job.nodes is not None and job.nodes > 1:
            raise ConfigError(
                f"nodes = {job.nodes}: on Ray the queue chooses the nodes, one if the devices fit; remove it"
            )
        if job.share_device:
            raise ConfigError("share_device: the queue on Ray allocates whole devices; remove it")
        if job.notify:
            raise ConfigError(f"notify = {job.notify[0]!r}: the queue on Ray sends no notifications; remove it")
        text = json.dumps(as_table(job), indent=2, sort_keys=True, ensure_ascii=False)
        return BackendRequest("ray", job.name, text, (), options.get("root", str(self.root)))

    def submit(self, request: BackendRequest) -> tuple[str, ...]:
        table = json.loads(request.text)
        address = job_from(table).options.get("ray", {}).get("address", self._address)
        queue = self._queue(address, Path(request.folder))
        return (str(self._call(queue.submit, table, getpass.getuser())),)

    def describe(self, ids: Sequence[str]) -> tuple[JobStatus, ...]:
        return tuple(self._call(self._queue(self._address).describe, list(ids), retry_s=_RESTART_S))

    def cancel(self, job: str, *, now: bool = False) -> None:
        self._call(self._queue(self._address).cancel, job, getpass.getuser(), now)

    def hold(self, job: str, *, is_held: bool) -> list[str]:
        """Hold jobs back, or let them go; return their ids."""
        return list(self._call(self._queue(self._address).hold, job, getpass.getuser(), is_held))

    def change(self, job: str, changes: Mapping[str, Any]) -> list[str]:
        """Change fields of `JobSpec`; return the ids of the jobs."""
        return list(self._call(self._queue(self._address).change, job, getpass.getuser(), changes))

    def rows(self, user: str | None, states: Sequence[JobState], num_ended: int | None) -> dict[str, Any]:
        """Return the queue for display; see `rows.queue_rows`."""
        return dict(self._call(self._queue(self._address).rows, user, states, num_ended, retry_s=_RESTART_S))

    def job_rows(self, job: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return what the queue knows of a job, and its devices by id; see `rows.job_rows`."""
        row, devices = self._call(self._queue(self._address).job_rows, job, retry_s=_RESTART_S)
        return row, devices

    def logs(self, job: str) -> Path:
        raise QueueError(f"the output of job {job} is on the nodes where it ran; evenload logs --backend ray reads it")

    def ids_of(self, text: str) -> list[str]:
        """Return the jobs that a text stands for: an id, an array's id, a range of ids, or a name."""
        return list(self._call(self._queue(self._address).ids_of, text, retry_s=_RESTART_S))

    def output(self, job: str) -> JobOutput:
        """Return a reader of the output of all attempts, wherever these ran."""
        queue = self._queue(self._address)
        return JobOutput(_connected(self._address), lambda: self._call(queue.outputs, job, retry_s=_RESTART_S))

    def start_queue(self, address: str) -> Path:
        """Start the queue in the cluster at an address where there is none; return its default folder."""
        self._call(self._queue(address, self.root).describe, ["none"], retry_s=_RESTART_S)
        return self.root

    def _queue(self, address: str, root: Path | None = None) -> Any:
        """The queue's actor; with `root`, it is started if there is none."""
        ray = _connected(address)
        with contextlib.suppress(ValueError):
            return ray.get_actor(NAME, namespace=NAMESPACE)
        if root is None:
            raise QueueError("no queue runs in this Ray cluster; the first `evenload submit --backend ray` starts it")
        return (
            ray.remote(RayQueueActor)
            .options(
                name=NAME,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=8,
            )
            .remote(str(root))
        )

    def _call(self, method: Any, *arguments: Any, retry_s: float = 0.0) -> Any:
        """Call the queue; retry for `retry_s` while Ray restarts it (only for calls that are safe to repeat)."""
        import ray

        end_s = time.monotonic() + retry_s
        while True:
            try:
                return ray.get(method.remote(*arguments), timeout=_TIMEOUT_S)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause if isinstance(error.cause, QueueError | ConfigError) else None
                raise cause or QueueError(f"the queue on Ray failed: {error}") from error
            except ray.exceptions.RayError as error:
                if time.monotonic() < end_s and isinstance(error, ray.exceptions.RayActorError):
                    time.sleep(0.5)
                    continue
                raise QueueError(
                    f"the queue on Ray does not answer, so it is unknown whether the call took effect: {error}; "
                    f"check the cluster with `ray status`"
                ) from error


BACKEND = RayBackend()


def _check_reachable(address: str) -> None:
    """Raise a `QueueError` if nothing listens at HOST:PORT; Ray itself would try for minutes, with warnings."""
    host, _, port = address.rpartition(":")
    if not host or "://" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, UnicodeError) as error:
        raise QueueError(
            f"no Ray cluster at {address}: {error}; give the address that `evenload queue --ray` printed, in RAY_ADDRESS"
        ) from error


def _connected(address: str) -> Any:
    """Connect to the cluster; return the `ray` module."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("backend ray: Ray is not installed; pip install 'evenload[ray]'") from error
    if not ray.is_initialized():
        _check_reachable(address or os.environ.get("RAY_ADDRESS", ""))
        try:
            ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = address or "RAY_ADDRESS, or on this machine"
            raise QueueError(f"no Ray cluster at {where}: {error}; start one with `ray start --head`") from error
    return ray
