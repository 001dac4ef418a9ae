"""`submit`: check a job, copy its working tree, and hand it to the backend that it names."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenload.errors import EvenloadError
from evenload.scheduler import backends, snapshots
from evenload.scheduler.backends import BackendRequest
from evenload.scheduler.backends.local import snapshot_folder
from evenload.scheduler.job_file import JobFile
from evenload.scheduler.snapshots import TreeSnapshot
from evenload.scheduler.submit.check import CheckedJob, check_job

SNAPSHOT_MAX_AGE_S = 7 * 86400.0
"""Snapshots of ended jobs are removed this long after their last use, by the next submission."""


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A job that was submitted, or would be in a dry run."""

    checked: CheckedJob
    request: BackendRequest
    """The request that was sent, or would be."""
    ids: tuple[str, ...] = ()
    """Empty in a dry run."""
    snapshot: TreeSnapshot | None = None
    warnings: tuple[str, ...] = ()


def submit(
    job: JobFile, *, queue: Path, here: Path, variables: Mapping[str, str], is_dry_run: bool = False
) -> SubmittedJob:
    """Submit a job from the folder `here` of a shell; with `is_dry_run`, check it and build the request, but send nothing.

    Raises:
        ConfigError: the request is invalid; nothing is queued.
        QueueError: the scheduler rejects the job, or can't be reached.
    """
    checked = check_job(job, here, variables)
    backend = backends.get(job.backend, queue)
    final, warnings = backend.check(checked.resolved(), is_dry_run=is_dry_run)
    request = backend.build_request(final)  # raises for what is not supported, before anything is copied
    if is_dry_run:
        return SubmittedJob(checked, request, warnings=warnings)
    store = snapshot_folder(queue if job.backend == "local" else None)
    snapshot = None
    if checked.takes_snapshot:
        snapshot = snapshots.take(Path(checked.job.folder), store, links=job.links)
        if not backend.lays_out_snapshots:
            snapshots.lay_out(snapshot.folder)
        request = backend.build_request(final, snapshot.folder)
    ids = backend.submit(request)
    if snapshot is not None:
        snapshots.note_jobs(snapshot.folder, queue if job.backend == "local" else Path(job.backend), ids)
    if job.backend == "local":
        with contextlib.suppress(EvenloadError, OSError):  # the next submission tries again
            snapshots.clean(store, jobs_have_ended(queue), older_than_s=SNAPSHOT_MAX_AGE_S, now_s=time.time())
    return SubmittedJob(checked, request, ids, snapshot, warnings)


def jobs_have_ended(queue: Path) -> Callable[[Path, Sequence[str]], bool]:
    """Return a function that reports whether all these jobs of a queue or a backend have ended; False if unknown."""

    def have_ended(owner: Path, jobs: Sequence[str]) -> bool:
        is_remote = str(owner) in backends.NAMES
        if not is_remote and owner != queue:
            return False  # another queue's
        try:
            backend = backends.get(str(owner) if is_remote else "local", queue)
            return all(status.has_ended for status in backend.describe(jobs))
        except EvenloadError:
            if is_remote:
                return False
            raise

    return have_ended
