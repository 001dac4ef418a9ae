"""Arguments that the queue's commands share: the queue, and the jobs to act on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenload.errors import QueueError
from evenload.scheduler import paths

if TYPE_CHECKING:
    from evenload.scheduler.client import Client

Queue = Annotated[
    Path | None,
    typer.Option(
        "--queue", metavar="DIR", help="Folder of the queue. Default: the machine's queue if there is one, else yours."
    ),
]
NOT_ENDED = ("PENDING", "STARTING", "RUNNING", "RESIZING", "PREEMPTING")


def folder_of(queue: Path | None) -> Path:
    """Return the queue's folder, absolute."""
    return (paths.default_folder() if queue is None else queue).absolute()


def ids_of(texts: Sequence[str], folder: Path) -> list[str]:
    """Return the ids that the user's texts stand for; see `scheduler.job_lookup.ids_of`."""
    from evenload.scheduler import job_lookup

    return job_lookup.ids_of(texts, folder)


def targets(texts: Sequence[str], folder: Path, client: Client, states: Sequence[str]) -> Iterable[str]:
    """Yield the jobs to act on: of a range or an array those in one of the states; a single job in any state.

    Raises:
        QueueError: no job of a range or an array is in these states.
    """
    for text in texts:
        ids = ids_of([text], folder)
        if len(ids) == 1:
            yield ids[0]
            continue
        found = [job for job in ids if client.call("job", job=job)["job"]["state"] in states]
        if not found:
            raise QueueError(f"nothing to do: none of the {len(ids)} jobs of {text} is {' or '.join(states)}")
        yield from found
