"""The interface of all backends: build a request, submit it, describe jobs, cancel a job, locate its output.

A request is built before it is sent, as a value whose text is everything that will be sent: `--dry-run` prints it and tests
compare it. Nothing is decided in between. (The design follows torchx's `schedulers/api.py`.)
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from evenload.errors import ConfigError, QueueError
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.job_file import JobFile

_WAIT_POLL_S = 1.0
_SILENT_S = 60.0
"""A wait for a job bears a backend that does not answer for so long, such as in a restart of Slurm's controller."""


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """Everything that will be sent to a backend."""

    backend: str
    name: str
    """The job's name, for messages."""
    text: str
    """A script, a table or a manifest, exactly as it is sent."""
    send: tuple[str, ...] = ()
    """The command that takes `text` on its standard input; empty if a library sends it."""
    folder: str = ""
    """Folder for the job's output and state, created on submission; empty if the backend has none."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class JobStatus:
    """State of a job as its backend reports it."""

    id: str
    state: JobState
    native: str
    """The state as the backend names it."""
    reason: str = ""
    """Reason for waiting, or for the end."""
    hosts: tuple[str, ...] = ()
    attempt: int = 0
    """Number of times the job was started; 0 if unknown."""
    step: int | None = None
    """Steps done, as the program last reported."""
    total: int | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    """Further values to display."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


def is_element_of(name: str, job: str) -> bool:
    """Return True if `name` is the job, or an element `JOB_INDEX` of the array."""
    return job in (name, name.partition("_")[0])


class SchedulerBackend(ABC):
    """A scheduler that runs jobs."""

    name: str
    """The value of `--backend`."""
    lays_out_snapshots = False
    """True if the backend lays out a job's snapshot itself when the job starts."""

    def check(self, job: JobFile, *, is_dry_run: bool) -> tuple[JobFile, tuple[str, ...]]:
        """Check the job against what the running scheduler has; with `is_dry_run`, start nothing.

        Returns:
            The job with job names replaced by ids, and warnings.

        Raises:
            ConfigError: the job could never start.
            QueueError: the scheduler can't be reached.
        """
        return job, ()

    @abstractmethod
    def build_request(self, job: JobFile, snapshot: str = "") -> BackendRequest:
        """Build the request without contacting anything; the same job always gives the same text.

        `snapshot` is the folder of the copy of the working tree to run in; empty to run in the job's own folder.

        Raises:
            ConfigError: the backend does not support what the job requests, or an option is unknown.
        """

    @abstractmethod
    def submit(self, request: BackendRequest) -> tuple[str, ...]:
        """Send the request; return the job's ids. Slurm and Ray give an array one id; its elements are `ID_INDEX`.

        Raises:
            QueueError: the backend is missing, does not answer, or rejects the job.
        """

    @abstractmethod
    def describe(self, ids: Sequence[str]) -> tuple[JobStatus, ...]:
        """Return the status of these jobs, array elements one by one; unknown jobs are left out.

        Raises:
            QueueError: the backend is missing or does not answer.
        """

    @abstractmethod
    def cancel(self, job: str, *, now: bool = False) -> None:
        """End a job for good. A running job may save within its grace period; a second call, or `now`, ends it at once.

        Raises:
            QueueError: the job is unknown or another user's, or the backend does not answer.
        """

    def ids_of(self, text: str) -> list[str]:
        """Return the jobs that a user's text stands for; QueueError for none where the backend knows that."""
        return [text]

    def wait(self, ids: Sequence[str]) -> Iterator[JobStatus]:
        """Yield the status of each job, of an array's elements one by one, when it has ended, until all have.

        Raises:
            QueueError: the backend does not know a job, or does not answer for a minute.
        """
        left = list(ids)
        seen: set[str] = set()
        answered_s = time.monotonic()
        while left:
            try:
                found = self.describe(left)
            except QueueError:
                if time.monotonic() - answered_s > _SILENT_S:
                    raise
                time.sleep(_WAIT_POLL_S)
                continue
            answered_s = time.monotonic()
            for job in left:
                if not any(is_element_of(status.id, job) for status in found):
                    raise QueueError(f"{self.name} does not know job {job} any more")
            for status in found:
                if status.has_ended and status.id not in seen:
                    seen.add(status.id)
                    yield status
            left = [job for job in left if any(is_element_of(s.id, job) and not s.has_ended for s in found)]
            if left:
                time.sleep(_WAIT_POLL_S)

    @abstractmethod
    def logs(self, job: str) -> Path:
        """Return the file with the output of all the job's attempts; it may not exist yet.

        Raises:
            QueueError: the job is unknown, or its output is not in a file that can be read from here.
        """


def resolved(job: JobFile, folder: str, variables: Mapping[str, str]) -> JobFile:
    """Return the job with nothing left in it that depends on where it is submitted: on that folder or shell."""
    check_inherited(job, variables)
    inherited = {name: variables[name] for name in job.inherit}
    return replace(job, folder=job.folder or folder, environment={**inherited, **job.environment}, inherit=())


def check_inherited(job: JobFile, variables: Mapping[str, str]) -> None:
    """Raise a `ConfigError` if the shell lacks a variable that the job inherits."""
    if missing := [name for name in job.inherit if name not in variables]:
        raise ConfigError(
            f"{missing[0]} is inherited but not set in this shell: export it, or set a value with NAME=VALUE"
        )


def check_resolved(job: JobFile) -> None:
    """Reject a job that `resolved` has not processed, and text with a null byte, which no program can receive."""
    if not Path(job.folder).is_absolute() or job.inherit:
        raise ConfigError(f"folder={job.folder!r}, inherit={job.inherit}: expected a job as `resolved` returns it")
    for what, values in (
        ("the command's argument", job.command),
        ("the variable's value", job.environment.values()),
        ("the folder", (job.folder,)),
    ):
        for value in values:
            if "\0" in value:
                raise ConfigError(f"{what} {value!r} contains a null byte, which no program can receive; remove it")


def check_options(backend: str, options: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Reject options that the backend does not know; the error lists the known ones with their meaning."""
    for name, value in options.items():
        if name not in known:
            lines = "; ".join(f"{key} ({meaning})" for key, meaning in known.items())
            raise ConfigError(f"option {name}={value!r}: {backend} has no such option; available: {lines}")
