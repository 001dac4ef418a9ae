"""``evenload cancel``: end jobs: those that run save first; a second time, or with ``--now``, they end at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from evenload.cli.jobs import Queue, folder_of, targets
from evenload.errors import EvenloadError

ACTIVE = ("PENDING", "STARTING", "RUNNING", "RESIZING", "PREEMPTING")


def cancel(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Numbers, ranges such as 12-21, or names.")],
    now: Annotated[bool, typer.Option("--now", help="End them at once, without saving.")] = False,
    backend: Annotated[str | None, typer.Option(help="Jobs of slurm or ray, by their numbers there.")] = None,
    queue: Queue = None,
) -> None:
    """End jobs. One that runs is asked to save and stop; asked again, it ends at once."""
    if backend is not None and backend != "local":
        _cancel_there(backend, jobs)
        return
    from evenload.scheduler.client import connect

    folder = folder_of(queue)
    failed = False
    with connect(folder, start=False) as line:
        for job in targets(jobs, folder, line, ACTIVE):
            try:
                (row,) = line.call("cancel", jobs=[job], now=now)["jobs"]
                print(f"job {job}: {_told(row['state'], now)}", flush=True)
            except EvenloadError as error:
                failed = True
                print(f"evenload: error: {error}", file=sys.stderr)
    if failed:
        raise typer.Exit(2)


def _told(state: str, now: bool) -> str:
    if state == "CANCELLED":
        return "cancelled"
    return "is ended at once" if now else "is asked to save and stop; again, or with --now, it ends at once"


def _cancel_there(backend: str, jobs: list[str]) -> None:
    from evenload.scheduler import backends

    where = backends.get(backend)
    for job in jobs:
        where.cancel(job)
        print(f"job {job} of {backend}: is asked to end")
