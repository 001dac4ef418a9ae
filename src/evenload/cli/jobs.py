"""What the queue's commands have in common: which queue, which jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenload.errors import ConfigError, QueueError
from evenload.scheduler import paths

if TYPE_CHECKING:
    from evenload.scheduler.client import Client

Queue = Annotated[
    Path | None,
    typer.Option(
        "--queue", metavar="DIR", help="The queue's folder; the machine's own queue, else yours, if not given."
    ),
]
MAX_RANGE = 1_000


def folder_of(queue: Path | None) -> Path:
    """The queue's folder, absolute."""
    return (paths.default_folder() if queue is None else queue).absolute()


def ids_of(texts: Sequence[str], folder: Path) -> list[str]:
    """The jobs that a person names: ``12``, ``12-21``, or a job's or an array's name.

    Raises:
        ConfigError: a range that is none.
        QueueError: there is no job of that name.
    """
    ids: dict[str, None] = {}
    for text in texts:
        ids.update(dict.fromkeys(_ids(text, folder)))
    return list(ids)


def targets(texts: Sequence[str], folder: Path, line: Client, states: Sequence[str]) -> Iterable[str]:
    """The jobs to act on. Of a range or an array those in one of the states; a job named by itself, whatever it is.

    Raises:
        QueueError: a range or an array has none in these states.
    """
    for text in texts:
        ids = list(_ids(text, folder))
        if len(ids) == 1:
            yield ids[0]
            continue
        found = [job for job in ids if line.call("job", job=job)["job"]["state"] in states]
        if not found:
            raise QueueError(f"nothing to do: none of the {len(ids)} jobs of {text} is {' or '.join(states)}")
        yield from found


def _ids(text: str, folder: Path) -> Iterable[str]:
    if re.fullmatch(r"[1-9]\d{0,17}", text):
        return [text]
    if found := re.fullmatch(r"([1-9]\d{0,17})-([1-9]\d{0,17})", text):
        first, last = int(found[1]), int(found[2])
        if not first <= last < first + MAX_RANGE:
            raise ConfigError(f"jobs {text}: expected FIRST-LAST, at most {MAX_RANGE} of them")
        return map(str, range(first, last + 1))
    from evenload.scheduler.submit.check import matching
    from evenload.views.queue.view import newest_jobs

    return matching(text, newest_jobs(folder))


def row_of(folder: Path, job: str) -> Mapping[str, Any]:
    """How a job is: as the daemon tells it, or else the queue's file.

    Raises:
        QueueError: there is no such job, or nobody can be asked.
    """
    from evenload.scheduler.client import connect

    try:
        line = connect(folder, start=False)
    except QueueError:
        row = _stored_row(folder, job)
        if row is None:
            raise
        return row
    with line:
        found: Mapping[str, Any] = line.call("job", job=job)["job"]
        return found


def _stored_row(folder: Path, job: str) -> Mapping[str, Any] | None:
    """The job in the queue's file; None where that can't be read."""
    import os

    if not os.access(folder / "queue.sqlite", os.R_OK):
        return None
    from evenload.scheduler.store.reader import Reader

    with Reader(folder) as reader:
        found = reader.job(job)
    if found is None:
        raise QueueError(f"there is no job {job} in the queue {folder}; evenload ps --all lists all")
    return {"id": found.id, "state": str(found.state), "reason": found.reason, "name": found.spec.name}
