"""`evenload cancel`: end jobs. Running jobs save first; a second time, or with `--now`, they end at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from evenload.cli.jobs import NOT_ENDED, Queue, act_on_jobs

if TYPE_CHECKING:
    from evenload.scheduler.client import Client


def cancel(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Job numbers, ranges such as 12-21, or names.")],
    now: Annotated[bool, typer.Option("--now", help="End the jobs at once, without saving.")] = False,
    backend: Annotated[str | None, typer.Option(help="Cancel jobs of slurm or ray; slurm takes their ids.")] = None,
    queue: Queue = None,
) -> None:
    """End jobs. A running job is asked to save and stop; cancelled again, it ends at once."""
    if backend is not None and backend != "local":
        from evenload.scheduler import backends

        scheduler = backends.get(backend)
        for job in jobs:
            scheduler.cancel(job, now=now)
            print(f"job {job} of {backend}: {'ending now' if now else 'stop requested'}")
        return

    def act(client: Client, ids: list[str]) -> Iterable[tuple[str, str]]:
        asked = "asked to save and stop; cancel again, or with --now, to end it at once"
        reply = client.call("cancel", jobs=ids, now=now)
        for row in reply["jobs"]:
            running = "ending now" if row["id"] in reply.get("killed", ()) else asked
            yield row["id"], "cancelled" if row["state"] == "CANCELLED" else running

    act_on_jobs(jobs, queue, NOT_ENDED, act)
