"""``evenload ps``: the queue: who has which device, how far jobs are, why the others wait."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from evenload.cli.jobs import Queue, folder_of
from evenload.errors import ConfigError, QueueError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from evenload.views.queue.view import QueueView, Wanted

_REFRESH_S = 2.0


def ps(
    all_: Annotated[bool, typer.Option("--all", "-a", help="A line for each job there ever was.")] = False,
    user: Annotated[str | None, typer.Option(help="This user's jobs only.")] = None,
    state: Annotated[
        str | None, typer.Option(help="Only those: waiting, running, ended, failed, ...; several with commas.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again until Ctrl-C.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    clean: Annotated[
        bool,
        typer.Option("--clean", help="Remove the snapshots of jobs that have ended, also with what jobs left there."),
    ] = False,
    queue: Queue = None,
) -> None:
    """Show the queue: devices, jobs that run and how far they are, jobs that wait and why."""
    from evenload.views.queue.view import Wanted, look, parse_states

    folder = folder_of(queue)
    if watch + json + clean > 1 or (all_ and (watch or clean)):
        raise ConfigError("--watch, --clean, and --json or --all are three things to do; give one of them")
    if clean:
        _clean(folder)
        return
    wanted = Wanted(user, parse_states(state) if state is not None else ())
    if all_:
        for block in _all(folder, wanted, json):
            sys.stdout.write(block)
        return
    if watch:
        _watch(folder, wanted)
        return
    view = look(folder, wanted)
    if json:
        from evenload.views.queue.as_json import json_of

        sys.stdout.write(json_of(view))
        return
    _show(view)


def _all(folder: Path, wanted: Wanted, as_json: bool) -> Iterable[str]:
    """A line for each job, from the queue's file where it can be read; else as the daemon tells them."""
    from evenload.views.queue.view import is_readable

    if is_readable(folder / "queue.sqlite"):
        from evenload.views.queue.full_list import all_json, all_lines

        return (all_json if as_json else all_lines)(folder, wanted.states, wanted.user)
    from evenload.views.queue.text import all_told
    from evenload.views.queue.view import ask_for_all

    view = ask_for_all(folder, wanted)
    if as_json:
        from evenload.views.queue.as_json import json_of

        return [json_of(view)]
    return all_told(view)


def _show(view: QueueView) -> None:
    if sys.stdout.isatty():
        from rich.console import Console

        from evenload.views.queue.panel import panel

        Console().print(panel(view))
        return
    from evenload.views.queue.text import text

    sys.stdout.write("\n".join(text(view)) + "\n")


def _watch(folder: Path, wanted: Wanted) -> None:
    """Again and again: in place on a terminal, one below the other elsewhere."""
    from evenload.views.queue.view import look

    try:
        if not sys.stdout.isatty():
            while True:
                _show(look(folder, wanted))
                sys.stdout.flush()
                time.sleep(_REFRESH_S)
        from rich.live import Live

        from evenload.views.queue.panel import panel

        with Live(screen=True, auto_refresh=False) as live:
            while True:
                live.update(panel(look(folder, wanted)), refresh=True)
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        pass


def _clean(folder: Path) -> None:
    from evenload.cli.submitted import have_ended
    from evenload.scheduler import snapshots
    from evenload.scheduler.client import connect
    from evenload.scheduler.submit import check

    store = check.store_of(folder)
    try:
        with connect(folder, start=False) as line:
            done = snapshots.clean(
                store, have_ended(line, folder), older_than_s=0.0, now_s=time.time(), with_new_files=True
            )
    except QueueError as error:
        raise QueueError(f"which jobs have ended can't be asked: {error}") from error
    print(f"{done.num_removed} snapshots are removed from {store}")
