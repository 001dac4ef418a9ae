"""Arguments that the queue's commands share: the queue, and the jobs to act on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenload.errors import EvenloadError, QueueError
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
    return (paths.default_folder() if queue is None else queue).absolute()


def ids_of(texts: Sequence[str], folder: Path) -> list[str]:
    """Return the ids that the user's texts stand for; see `scheduler.job_lookup.ids_of`."""
    from evenload.scheduler import job_lookup

    return job_lookup.ids_of(texts, folder)


def act_on_jobs(
    texts: Sequence[str], queue: Path | None, states: Sequence[str], act: Callable[[Client, str], str]
) -> None:
    """Call `act` on each of the jobs and print what it returns; exit with code 2 if one fails."""
    from evenload.scheduler.client import connect

    folder, failed = folder_of(queue), False
    with connect(folder, start=False) as client:
        for job in _targets(texts, folder, client, states):
            try:
                print(f"job {job}: {act(client, job)}", flush=True)
            except EvenloadError as error:
                failed = True
                print(f"evenload: error: {error}", file=sys.stderr)
    if failed:
        raise typer.Exit(2)


def _targets(texts: Sequence[str], folder: Path, client: Client, states: Sequence[str]) -> Iterable[str]:
    """Yield the jobs to act on: of a range or an array those in one of the states; a single job in any state."""
    for text in texts:
        ids = ids_of([text], folder)
        if len(ids) == 1:
            yield ids[0]
            continue
        found = [job for job in ids if client.call("job", job=job)["job"]["state"] in states]
        if not found:
            raise QueueError(f"nothing to do: none of the {len(ids)} jobs of {text} is {' or '.join(states)}")
        yield from found
