"""``evenload show``: summarize, follow or draw a run, or summarize a job of the queue."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenload.cli.jobs import Queue

if TYPE_CHECKING:
    from evenload.views.queue.job_summary import JobSummary

POLL_S = 0.2
WEB_POLL_S = 1.0
PAGE_FILE = "page.html"


def show(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN|JOB", help="Run folder (project_dir), folder of runs, or number or name of a job."),
    ],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Page that --html writes; by default page.html in the run folder."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    html: Annotated[bool, typer.Option("--html", help="Write one self-contained page for a browser.")] = False,
    web: Annotated[
        bool,
        typer.Option("--web", help="Serve the page to browsers of this machine, and follow the run, until Ctrl-C."),
    ] = False,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port for --web; by default a free one.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace of steps for Perfetto or chrome://tracing.")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Steps of --trace: from A up to, and without, B; by default the last 100."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Follow the run until it ends, its processes are gone, or Ctrl-C.")
    ] = False,
    to: Annotated[
        str | None, typer.Option(metavar="LOGGER", help="Send the missing steps to a logger (wandb, mlflow, ...).")
    ] = None,
    logger_option: Annotated[
        list[str] | None,
        typer.Option(metavar="LOGGER.OPTION=VALUE", help="Option of the logger of --to; may be repeated."),
    ] = None,
    queue: Queue = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show a job of slurm or ray; slurm takes its id.")
    ] = None,
) -> None:
    """Show a run (shares and their reasons, use of time) or a job (devices, waits, stops, cost)."""
    from evenload.errors import ConfigError
    from evenload.records.reader import find_run

    if backend is not None and backend != "local":
        _show_backend_job(backend, str(run), json)
        return
    of_runs = live or html or web or bool(logger_option) or any(x is not None for x in (trace, to, file, port, steps))
    if queue is not None or not (run.exists() or of_runs):
        if of_runs:
            raise ConfigError(
                "FILE, --live, --html, --web, --port, --trace, --steps, --to and --logger-option are for runs, not for jobs"
            )
        if _show_queue_job(str(run), queue, json):
            return
    if json + live + html + web + (trace is not None) + (to is not None) > 1:
        raise ConfigError("--json, --live, --html, --web, --trace and --to are ways to show a run; give one of them")
    if logger_option and to is None:
        raise ConfigError("--logger-option needs a logger; name it with --to")
    if file is not None and not html:
        raise ConfigError(f"{file}: only --html writes to a file named like this; a trace is written by --trace FILE")
    if port is not None and not web:
        raise ConfigError("--port needs --web")
    if steps is not None and trace is None:
        raise ConfigError("--steps needs --trace FILE")
    folder, num_runs = find_run(run)
    if num_runs > 1:
        print(f"evenload: {folder} is the newest of {num_runs} runs in {run}", file=sys.stderr)
    if to is not None:
        _send(folder, to, logger_option or [])
    elif live:
        _follow(folder)
    elif html:
        _write_page(folder, file or folder / PAGE_FILE)
    elif web:
        _serve_page(folder, port or 0)
    elif trace is not None:
        _write_trace(folder, trace, steps)
    else:
        _show_run(folder, json)


def _show_run(folder: Path, as_json: bool, is_wanted: Callable[[float], bool] | None = None) -> None:
    from evenload.records.reader import read_events
    from evenload.views.run.summary import describe_lost_end, is_open, summarize_run, summary_to_json

    summary = summarize_run(folder, is_wanted)
    lost_end = describe_lost_end(folder) if is_open(read_events(folder)) else ""
    if as_json:
        import json

        values = {**summary_to_json(summary), "lost_end": lost_end}
        print(json.dumps(values, indent=1, allow_nan=False, ensure_ascii=False, default=str))
        return
    from evenload.views.run.summary_text import format_run_summary

    print(format_run_summary(summary))
    from evenload.training.launch.run_control import members_of

    if members := members_of(folder):
        print(f"\nin progress on {'; '.join(members)}")
    elif lost_end:
        print(f"\n{lost_end}")


def _write_page(folder: Path, path: Path) -> None:
    from evenload.atomic_file import write_atomically
    from evenload.errors import ConfigError
    from evenload.views.run.page import RunPage

    text = RunPage(folder).html()
    try:
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(f"{path} can't be written ({error.strerror}); give another file: --html FILE") from error
    print(f"evenload: wrote {path} ({len(text.encode()) / 1000:.0f} kB); open it in a browser")


def _serve_page(folder: Path, port: int) -> None:
    from evenload.views.run.page import RunPage
    from evenload.views.server import serve_until_interrupt

    page = RunPage(folder)
    serve_until_interrupt(page.title, str(folder), page.update, port, WEB_POLL_S)


def _write_trace(folder: Path, path: Path, steps: str | None) -> None:
    from evenload.views.run.trace import RESOLUTION, StepRange, parse_steps, write_trace

    count = write_trace(folder, path, parse_steps(steps) if steps is not None else StepRange())
    print(f"evenload: wrote {count} steps to {path}; open it at https://ui.perfetto.dev or chrome://tracing")
    print(f"Resolution: {RESOLUTION}")


def _show_queue_job(name: str, queue: Path | None, as_json: bool) -> bool:
    """Show jobs of the queue by name; return False if there is none, since the name may be a run folder's."""
    from evenload.cli.jobs import folder_of, ids_of
    from evenload.errors import QueueError
    from evenload.views.queue import job_summary

    folder = folder_of(queue)
    try:
        ids = ids_of([name], folder)
    except QueueError as error:
        if queue is not None:
            raise
        if "/" in name or not (folder / "queue.sqlite").exists():
            return False
        raise QueueError(f"{name}: there is no such run folder, and {error}") from error
    for number in ids:
        _print_job(job_summary.summarize_job(folder, number), as_json)
    return True


def _print_job(summary: JobSummary, as_json: bool) -> None:
    from evenload.views.queue import job_summary

    if as_json:
        import json

        print(json.dumps(job_summary.as_table(summary), indent=1, ensure_ascii=False, default=str))
        return
    print(job_summary.job_text(summary))
    run = job_summary.run_folder(summary)
    if run is not None:
        print()
        _show_run(run, as_json=False, is_wanted=job_summary.run_records(summary, run))


def _show_backend_job(backend: str, job: str, as_json: bool) -> None:
    from dataclasses import asdict

    from evenload.errors import QueueError
    from evenload.scheduler import backends

    if backend == "ray":
        from evenload.scheduler.backends.ray.backend import BACKEND
        from evenload.views.queue.job_summary import summary_of_rows

        for name in BACKEND.ids_of(job):
            reply, devices = BACKEND.job_rows(name)
            _print_job(summary_of_rows(reply, devices, {}, " --backend ray"), as_json)
        return
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

    from evenload.records.loggers.catalogue import check_loggers
    from evenload.records.loggers.logger_thread import send
    from evenload.records.recorder import CONFIG_FILE
    from evenload.setting_kinds import parse_logger_options

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
    """Show the newest session from its start, then follow it until it ends, or its processes are gone."""
    from evenload.records.reader import read_events
    from evenload.views.run.progress import RunProgress
    from evenload.views.run.summary import GONE_S, describe_lost_end

    opened_s = max((event.time for event in read_events(folder) if event.kind == "open"), default=-float("inf"))
    lost_end = ""
    with RunProgress(folder, sys.stdout, since_s=opened_s) as progress, contextlib.suppress(KeyboardInterrupt):
        progress.poll()
        while not progress.ended and not lost_end:
            time.sleep(POLL_S)
            lost_end = describe_lost_end(folder) if time.time() - progress.newest_s > GONE_S else ""
            progress.poll()
    if lost_end and not progress.ended:
        print(f"evenload: {lost_end}")
        raise typer.Exit(1)
