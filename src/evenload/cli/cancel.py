"""`evenload cancel`: end jobs. Running jobs save first; a second time, or with `--now`, they end at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from evenload.cli.jobs import NOT_ENDED, Queue, folder_of, targets
from evenload.errors import EvenloadError


def cancel(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Job numbers, ranges such as 12-21, or names.")],
    now: Annotated[bool, typer.Option("--now", help="End the jobs at once, without saving.")] = False,
    backend: Annotated[str | None, typer.Option(help="Cancel jobs of slurm or ray, by their ids there.")] = None,
    queue: Queue = None,
) -> None:
    """End jobs. A running job is asked to save and stop; cancelled again, it ends at once."""
    if backend is not None and backend != "local":
        from evenload.scheduler import backends

        scheduler = backends.get(backend)
        for job in jobs:
            scheduler.cancel(job)
            print(f"job {job} of {backend}: stop requested")
        return
    from evenload.scheduler.client import connect

    folder = folder_of(queue)
    failed = False
    with connect(folder, start=False) as client:
        for job in targets(jobs, folder, client, NOT_ENDED):
            try:
                (row,) = client.call("cancel", jobs=[job], now=now)["jobs"]
                print(f"job {job}: {_result(row['state'], now)}", flush=True)
            except EvenloadError as error:
                failed = True
                print(f"evenload: error: {error}", file=sys.stderr)
    if failed:
        raise typer.Exit(2)


def _result(state: str, now: bool) -> str:
    if state == "CANCELLED":
        return "cancelled"
    return "ending now" if now else "asked to save and stop; cancel again, or with --now, to end it at once"
