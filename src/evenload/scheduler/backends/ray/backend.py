"""The backend ``ray``: hands a job file to the queue that lives in a Ray cluster, and asks it how its jobs are.

The queue is an actor of ours (`ray_controller`), started at the first submit; it stays until the cluster ends. Ray knows
no users: whoever reaches the cluster can do there as they like, and the owner told to the queue is taken on trust.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler.backends.interface import Described, Request, check_options, check_settled
from evenload.scheduler.backends.ray.controller import NAME, NAMESPACE, Controller
from evenload.scheduler.job_file import JobFile, as_table, job_from

OPTIONS = {
    "address": "of the cluster, such as 10.0.0.1:6379; else RAY_ADDRESS, else the one on this machine",
    "root": "the folder of output and state on each node; else ~/.local/state/evenload/ray",
}
"""What a job file's ``[ray]`` table may hold."""

_TIMEOUT_S = 120.0
_RESTART_S = 30.0
"""What Ray may take to start the queue's actor again."""


class RayCluster:
    """Ray as a backend; `address` and `root` hold where a job's own options say nothing."""

    name = "ray"

    def __init__(self, address: str = "", root: Path | None = None) -> None:
        self._address = address
        self._root = root

    @property
    def root(self) -> Path:
        """Output and state, on each node under the same path."""
        return self._root or Path.home() / ".local" / "state" / "evenload" / "ray"

    def materialise(self, job: JobFile) -> Request:
        """The job file as the queue on Ray will read it."""
        check_settled(job)
        options = job.options.get("ray", {})
        check_options("ray", options, OPTIONS)
        if job.nodes is not None and job.nodes > 1:
            raise ConfigError(
                f"nodes = {job.nodes}: on Ray the queue takes devices as they come, on one node if they fit; leave it out"
            )
        if job.share_device:
            raise ConfigError("share_device: the queue on Ray gives whole devices; leave it out")
        if job.notify:
            raise ConfigError(f"notify = {job.notify[0]!r}: the queue on Ray notifies nobody; leave it out")
        text = json.dumps(as_table(job), indent=2, sort_keys=True, ensure_ascii=False)
        return Request("ray", job.name, text, (), options.get("root", str(self.root)))

    def submit(self, request: Request) -> str:
        """Hands the job to the queue, which is started where there is none."""
        table = json.loads(request.text)
        address = job_from(table).options.get("ray", {}).get("address", self._address)
        queue = self._queue(address, Path(request.folder))
        return str(self._ask(queue.submit, table, getpass.getuser()))

    def describe(self, ids: Sequence[str]) -> tuple[Described, ...]:
        """How these jobs are."""
        return tuple(self._ask(self._queue(self._address).describe, list(ids), again_s=_RESTART_S))

    def cancel(self, job: str) -> None:
        """Ends a job: one that runs may save first."""
        self._ask(self._queue(self._address).cancel, job, getpass.getuser())

    def logs(self, job: str) -> Path:
        """The file of its output, on the first of its nodes; those of other nodes lie beside it on theirs."""
        return Path(self._ask(self._queue(self._address).log, job, again_s=_RESTART_S))

    def _queue(self, address: str, root: Path | None = None) -> Any:
        """The queue's actor; with `root` it is started where there is none."""
        ray = _connected(address)
        with contextlib.suppress(ValueError):
            return ray.get_actor(NAME, namespace=NAMESPACE)
        if root is None:
            raise QueueError(
                "there is no queue in this Ray cluster; the first `evenload submit --backend ray` starts it"
            )
        return (
            ray.remote(Controller)
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

    def _ask(self, method: Any, *arguments: Any, again_s: float = 0.0) -> Any:
        """Calls the queue; while Ray starts it anew it is asked again for so long, where asking twice is no harm."""
        import ray

        end_s = time.monotonic() + again_s
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
                    f"the queue on Ray doesn't answer, and whether it did what it was asked for is not known: {error}; "
                    f"`ray status` tells how the cluster is"
                ) from error


BACKEND = RayCluster()


def _connected(address: str) -> Any:
    """Ray, connected to the cluster.

    Raises:
        ConfigError: Ray isn't installed.
        QueueError: there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("backend ray: Ray isn't installed here; pip install 'evenload[ray]'") from error
    if not ray.is_initialized():
        try:
            ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = address or "RAY_ADDRESS, or on this machine"
            raise QueueError(f"there is no Ray cluster at {where}: {error}; `ray start --head` starts one") from error
    return ray
