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
        "--queue",
        metavar="DIR",
        readable=False,  # other users may reach a shared queue, and not list its folder
        help="Folder of the queue. Default: the machine's queue if there is one, else yours.",
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
    texts: Sequence[str],
    queue: Path | None,
    states: Sequence[str],
    act: Callable[[Client, list[str]], Iterable[tuple[str, str]]],
    *,
    at_once: bool = True,
) -> None:
    """Call `act` on the jobs of each text and print the lines (job, text) it returns; exit with code 2 if one fails.

    With `at_once`, all jobs of an array or a range are one call (a thousand calls would take half a minute), and one call
    each where the queue refuses that.
    """
    from evenload.scheduler.client import connect

    folder, failed = folder_of(queue), False
    with connect(folder, start=False) as client:
        for text in texts:
            ids = _targets(text, folder, client, states)
            parts = [ids] if at_once else [[job] for job in ids]
            while parts:
                part = parts.pop(0)
                try:
                    print("\n".join(f"job {job}: {line}" for job, line in act(client, part)), flush=True)
                except EvenloadError as error:
                    if len(part) > 1:
                        parts = [[job] for job in part]
                        continue
                    failed = True
                    print(f"evenload: error: {error}", file=sys.stderr)
    if failed:
        raise typer.Exit(2)


def _targets(text: str, folder: Path, client: Client, states: Sequence[str]) -> list[str]:
    """Return the jobs to act on: of a range or an array those in one of the states; a single job in any state."""
    from evenload.scheduler.core.states import JobState
    from evenload.scheduler.job_lookup import listed_jobs
    from evenload.views.queue.text import STATES

    ids = ids_of([text], folder)
    if len(ids) == 1:
        return ids
    in_states = {row["id"] for row in listed_jobs(client, states=list(states))}
    found = [job for job in ids if job in in_states]
    if not found:
        names = " or ".join(STATES[JobState(state)] for state in states)
        raise QueueError(f"nothing to do: none of the {len(ids)} jobs of {text} is {names}")
    return found
