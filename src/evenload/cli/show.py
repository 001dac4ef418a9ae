"""``evenload show``: summarize or follow a run, or summarize a job of the queue."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

POLL_S = 0.2


def show(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN|JOB", help="Run folder (project_dir), folder of runs, or number or name of a job."),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Follow the run until it ends or Ctrl-C.")] = False,
    to: Annotated[
        str | None, typer.Option(metavar="LOGGER", help="Send the missing steps to a logger (wandb, mlflow, ...).")
    ] = None,
    logger_option: Annotated[
        list[str] | None,
        typer.Option(metavar="LOGGER.OPTION=VALUE", help="Option of the logger of --to; may be repeated."),
    ] = None,
    queue: Annotated[Path | None, typer.Option("--queue", metavar="DIR", help="Folder of the job's queue.")] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show a job of slurm or ray by its number there.")
    ] = None,
) -> None:
    """Show a run (shares and their reasons, use of time) or a job (devices, waits, stops, cost)."""
    from evenload.errors import ConfigError
    from evenload.records.reader import find_run

    if backend is not None and backend != "local":
        _show_backend_job(backend, str(run), json)
        return
    if queue is not None or not run.exists():
        if queue is not None and (live or to is not None or logger_option):
            raise ConfigError("--live, --to and --logger-option are for runs; a job is shown without them")
        if _show_queue_job(str(run), queue, json):
            return
    try:
        if json + live + (to is not None) > 1:
            raise ConfigError("--json, --live and --to are three ways to show a run; give one of them")
        if logger_option and to is None:
            raise ConfigError("--logger-option needs a logger; name it with --to")
        folder, num_runs = find_run(run)
        if num_runs > 1:
            print(f"evenload: {folder} is the newest of {num_runs} runs in {run}", file=sys.stderr)
        if to is not None:
            _send(folder, to, logger_option or [])
        elif live:
            _follow(folder)
        else:
            _show_run(folder, json)
    except ConfigError as error:
        print(f"evenload show: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _show_run(folder: Path, as_json: bool) -> None:
    from evenload.views.run.summary import summarize_run, summary_to_json

    summary = summarize_run(folder)
    if as_json:
        import json

        print(json.dumps(summary_to_json(summary), indent=1, allow_nan=False, ensure_ascii=False, default=str))
        return
    from evenload.views.run.summary_text import format_run_summary

    print(format_run_summary(summary))
    from evenload.training.launch.run_control import members_of

    if members := members_of(folder):
        print(f"\nin progress on {'; '.join(members)}")


def _show_queue_job(name: str, queue: Path | None, as_json: bool) -> bool:
    """Show jobs of the queue by name; return False if there is none, since the name may be a run folder's."""
    from evenload.cli.jobs import folder_of, ids_of
    from evenload.errors import QueueError
    from evenload.views.queue import job_summary

    folder = folder_of(queue)
    try:
        ids = ids_of([name], folder)
    except QueueError:
        if queue is not None:
            raise
        return False
    for number in ids:
        summary = job_summary.summarize_job(folder, number)
        if as_json:
            import json

            print(json.dumps(job_summary.as_table(summary), indent=1, ensure_ascii=False, default=str))
            continue
        print(job_summary.job_text(summary))
        run = job_summary.run_folder(summary)
        if run is not None:
            print()
            _show_run(run, as_json=False)
    return True


def _show_backend_job(backend: str, job: str, as_json: bool) -> None:
    from dataclasses import asdict

    from evenload.errors import QueueError
    from evenload.scheduler import backends

    found = backends.get(backend).describe([job])
    if not found:
        raise QueueError(f"{backend} has no job {job}")
    if as_json:
        import json

        print(json.dumps([asdict(row) for row in found], indent=1, default=str))
        return
    for row in found:
        steps = f", step {row.step}{f' of {row.total}' if row.total else ''}" if row.step is not None else ""
        where = f" on {', '.join(row.hosts)}" if row.hosts else ""
        why = f": {row.reason}" if row.reason else ""
        print(f"job {row.id} of {backend}: {row.state.lower()} ({row.native}){where}{steps}{why}")
        for name, value in row.extra.items():
            print(f"  {name}  {value}")


def _send(folder: Path, logger: str, texts: list[str]) -> None:
    """Send a logger the missing steps, by default with its options of the run."""
    import tomllib

    from evenload.config import parse_logger_options
    from evenload.records.loggers.catalogue import check_loggers
    from evenload.records.loggers.logger_thread import send
    from evenload.records.recorder import CONFIG_FILE

    path = folder / CONFIG_FILE
    settings = tomllib.loads(path.read_text()) if path.exists() else {}
    given = parse_logger_options(texts)
    check_loggers((logger,), given)
    options = {**settings.get("logger_options", {}).get(logger, {}), **given.get(logger, {})}
    num_sent = send(logger, folder, options, settings)
    print(
        f"evenload: sent {num_sent} points of {folder} to {logger}" if num_sent else f"evenload: {logger} is up to date"
    )


def _follow(folder: Path) -> None:
    """Show the newest session from its start, then follow it."""
    from evenload.records.reader import read_events
    from evenload.views.run.progress import RunProgress

    opened_s = max((event.time for event in read_events(folder) if event.kind == "open"), default=-float("inf"))
    with RunProgress(folder, sys.stdout, since_s=opened_s) as progress:
        try:
            progress.poll()
            while not progress.ended:
                time.sleep(POLL_S)
                progress.poll()
        except KeyboardInterrupt:
            pass
