"""`evenload ps`: show the queue: devices and their jobs, progress, and why jobs wait."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from evenload.cli.jobs import Queue, folder_of
from evenload.errors import ConfigError, QueueError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from evenload.views.queue.view import JobFilter, QueueView

_REFRESH_S = 2.0


def ps(
    all_: Annotated[bool, typer.Option("--all", "-a", help="List every job ever submitted, one per line.")] = False,
    user: Annotated[str | None, typer.Option(help="Only this user's jobs.")] = None,
    state: Annotated[
        str | None,
        typer.Option(help="Only jobs in these states: waiting, running, ended, failed, ...; separate with commas."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh continuously until Ctrl-C.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the queue as JSON.")] = False,
    clean: Annotated[
        bool,
        typer.Option("--clean", help="Remove the snapshots of ended jobs, including files that jobs created there."),
    ] = False,
    backend: Annotated[str | None, typer.Option(help="List the jobs of the queue on ray.")] = None,
    queue: Queue = None,
) -> None:
    """Show the queue: devices, running jobs and their progress, waiting jobs and why they wait."""
    from evenload.views.queue.view import JobFilter, json_of, parse_states, view_of

    if backend not in (None, "local"):
        if backend != "ray":
            raise ConfigError(f"--backend {backend}: only the queue on ray is listed here (squeue, kubectl for others)")
        if clean:
            raise ConfigError("--backend ray with --clean, which is for snapshots of the local queue; leave one out")
    folder = folder_of(queue)
    if watch + json + clean > 1 or (all_ and (watch or clean)):
        raise ConfigError("--watch, --clean, and --json or --all can't be combined; give one of them")
    wanted = JobFilter(user, parse_states(state) if state is not None else ())
    if backend == "ray":
        _show_ray(wanted, all_, watch, json)
    elif clean:
        _clean(folder)
    elif all_:
        sys.stdout.writelines(_all(folder, wanted, json))
    elif watch:
        _watch(lambda: view_of(folder, wanted))
    elif json:
        sys.stdout.write(json_of(view_of(folder, wanted)))
    else:
        _show(view_of(folder, wanted))


def _show_ray(wanted: JobFilter, all_: bool, watch: bool, as_json: bool) -> None:
    """Show the queue on Ray, as that of this machine."""
    from evenload.scheduler.backends.ray.backend import BACKEND
    from evenload.views.queue.text import listed_lines
    from evenload.views.queue.view import NUM_ENDED, json_of, view_of_rows

    def view() -> QueueView:
        return view_of_rows(BACKEND.rows(wanted.user, wanted.states, None if all_ else NUM_ENDED), wanted, "on Ray")

    if watch:
        _watch(view)
    elif as_json:
        sys.stdout.write(json_of(view()))
    elif all_:
        sys.stdout.writelines(listed_lines(view()))
    else:
        _show(view())


def _all(folder: Path, wanted: JobFilter, as_json: bool) -> Iterable[str]:
    """A line for each job: from the queue's file if it can be read, else from the daemon."""
    from evenload.scheduler.job_lookup import has_readable_file

    if has_readable_file(folder):
        from evenload.views.queue.full_list import all_json, all_lines

        return (all_json if as_json else all_lines)(folder, wanted.states, wanted.user)
    from evenload.views.queue.text import listed_lines
    from evenload.views.queue.view import json_of, view_of_all

    view = view_of_all(folder, wanted)
    return [json_of(view)] if as_json else listed_lines(view)


def _show(view: QueueView) -> None:
    if sys.stdout.isatty():
        from rich.console import Console

        from evenload.views.queue.panel import panel

        Console().print(panel(view))
        return
    from evenload.views.queue.text import text

    sys.stdout.write("\n".join(text(view)) + "\n")
    sys.stdout.flush()


def _watch(view: Callable[[], QueueView]) -> None:
    """Refresh in place on a terminal; print one view below the other elsewhere."""
    try:
        if not sys.stdout.isatty():
            while True:
                _show(view())
                time.sleep(_REFRESH_S)
        from rich.live import Live

        from evenload.views.queue.panel import panel

        with Live(screen=True, auto_refresh=False) as live:
            while True:
                live.update(panel(view()), refresh=True)
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        pass


def _clean(folder: Path) -> None:
    from evenload.scheduler import snapshots
    from evenload.scheduler.backends.local import snapshot_folder
    from evenload.scheduler.client import connect
    from evenload.scheduler.submit.submit import jobs_have_ended

    store = snapshot_folder(folder)
    try:
        connect(folder, start=False).close()
    except QueueError as error:
        raise QueueError(f"can't determine which jobs have ended: {error}") from error
    done = snapshots.clean(store, jobs_have_ended(folder), older_than_s=0.0, now_s=time.time(), with_new_files=True)
    print(f"removed {done.num_removed} snapshots from {store}")
