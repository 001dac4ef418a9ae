"""What each backend can do: write a request, send it, say how its jobs are, cancel one, find its output.

A request is written before it is sent, as a value whose text is everything that will be sent: ``--dry-run`` prints it and a
test compares it. Nothing is decided between the two. (The shape is torchx's; see its ``schedulers/api.py``.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from evenload.errors import ConfigError
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.job_file import JobFile


@dataclass(frozen=True, slots=True)
class Request:
    """What will be sent to a backend, whole."""

    backend: str
    name: str
    """Of the job, for people."""
    text: str
    """A script, a table, a manifest: as it is sent."""
    send: tuple[str, ...] = ()
    """The command that takes `text` on its standard input; empty where a library sends it."""
    folder: str = ""
    """Where the job's output and state will be; made before it is sent. Empty where the backend has none."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Described:
    """How a job is, as far as its backend knows."""

    id: str
    state: JobState
    native: str
    """The state in the backend's own words."""
    reason: str = ""
    """Why it waits, or how it ended."""
    hosts: tuple[str, ...] = ()
    attempt: int = 0
    """How often it was started; 0 where that isn't known."""
    step: int | None = None
    """Steps done, as its program last told."""
    total: int | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    """What else there is to know, for people."""

    @property
    def has_ended(self) -> bool:
        """Whether it stays as it is for ever."""
        return self.state in ENDED


class Backend(Protocol):
    """One place where jobs can run."""

    @property
    def name(self) -> str:
        """As ``--backend`` gives it."""

    def materialise(self, job: JobFile) -> Request:
        """Writes the request; asks nobody and changes nothing, so the same file always gives the same text.

        Args:
            job: as `settled` returns it.

        Raises:
            ConfigError: the backend can't do what is asked for, or knows no such option.
        """

    def submit(self, request: Request) -> str:
        """Sends the request; the id of the job there. The elements of an array are ``ID_INDEX``.

        Raises:
            QueueError: the backend isn't here, doesn't answer, or refuses.
        """

    def describe(self, ids: Sequence[str]) -> tuple[Described, ...]:
        """How these jobs are, an array's elements one by one; one that nobody knows is left out.

        Raises:
            QueueError: the backend isn't here or doesn't answer.
        """

    def cancel(self, job: str) -> None:
        """Ends a job for good. One that runs may save first, within its grace; asked again it ends at once.

        Raises:
            QueueError: there is no such job, it is another's, or the backend doesn't answer.
        """

    def logs(self, job: str) -> Path:
        """The file that the job's output is in, of all its attempts; it may not be there yet.

        Raises:
            QueueError: there is no such job, or its output isn't in a file that can be read from here.
        """


def settled(job: JobFile, folder: str, variables: Mapping[str, str]) -> JobFile:
    """The same job, with nothing in it that depends on where it is submitted from.

    Args:
        job: as the file and the options say.
        folder: absolute; where it is submitted.
        variables: of the submitting shell.

    Raises:
        ConfigError: a variable that it takes from the shell isn't set there.
    """
    if missing := [name for name in job.inherit if name not in variables]:
        raise ConfigError(f"inherit names {missing[0]}, which isn't set here; export it, or take it out of inherit")
    inherited = {name: variables[name] for name in job.inherit}
    return replace(job, folder=job.folder or folder, environment={**inherited, **job.environment}, inherit=())


def check_settled(job: JobFile) -> None:
    """Refuses a job that `settled` hasn't seen, and what no program can be given.

    Raises:
        ConfigError: its folder isn't absolute, variables are still to be looked up, or a text holds a zero byte.
    """
    if not Path(job.folder).is_absolute() or job.inherit:
        raise ConfigError(f"folder={job.folder!r}, inherit={job.inherit}: expected a job as `settled` returns it")
    for what, values in (
        ("the command's word", job.command),
        ("a variable's value", job.environment.values()),
        ("the folder", (job.folder,)),
    ):
        for value in values:
            if "\0" in value:
                raise ConfigError(f"{what} {value!r} holds a zero byte, which no program can be given; take it out")


def check_options(backend: str, options: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Refuses what a backend doesn't know: an option without effect is an error.

    Raises:
        ConfigError: a name is unknown; all known ones are told, with what they mean.
    """
    for name, value in options.items():
        if name not in known:
            lines = "; ".join(f"{key} ({meaning})" for key, meaning in known.items())
            raise ConfigError(f"option {name}={value!r}: {backend} has no such option; there are {lines}")
