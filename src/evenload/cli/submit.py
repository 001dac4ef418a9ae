"""`evenload submit`: submit a command or a job file to the queue or another scheduler."""

from __future__ import annotations

import json as writer
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from evenload.cli.jobs import Queue, folder_of
from evenload.errors import ConfigError, QueueError
from evenload.scheduler import backends
from evenload.scheduler.backends import JobStatus, SchedulerBackend
from evenload.scheduler.backends.local import LocalBackend
from evenload.scheduler.core.states import JobState
from evenload.scheduler.job_file import KEYS, as_table, job_from, merged
from evenload.scheduler.paths import option_for
from evenload.scheduler.snapshots import TreeSnapshot
from evenload.scheduler.submit.submit import SubmittedJob
from evenload.scheduler.submit.submit import submit as submit_job

CONTEXT_SETTINGS = {"allow_interspersed_args": False}


class SubmitCommand(TyperCommand):
    """Parse options up to the command, whose own options are left alone; after a job file, options continue up to `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move a job file behind the options that follow it."""
        index = self._first_word(args)
        if index < len(args) and args[index].endswith(".toml") and "--" not in args[:index]:
            rest = args[index + 1 :]
            end = rest.index("--") if "--" in rest else len(rest)
            args = [*args[:index], *rest[:end], "--", args[index], *rest[end + 1 :]]
        return super().parse_args(ctx, args)

    def _first_word(self, args: list[str]) -> int:
        takes_value = {
            name: not getattr(param, "is_flag", False)
            for param in self.params
            for name in (*getattr(param, "opts", ()), *getattr(param, "secondary_opts", ()))
        }
        index = 0
        while index < len(args) and args[index].startswith("-") and args[index] != "--":
            index += 2 if takes_value.get(args[index], False) else 1
        return index


COMMAND_CLASS = SubmitCommand


def submit(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="JOB.toml or -- COMMAND", help="A command or a job file.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option("-d", "--devices", metavar="N or MIN:MAX", help="Number of devices. Default: 1.")
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Acceptable kinds of device: a100,h100.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Minimum memory of each device: 20G.")] = None,
    one_kind: Annotated[bool, typer.Option("--one-kind", help="Require all devices to be of one kind.")] = False,
    nodes: Annotated[int | None, typer.Option(help="Number of machines.")] = None,
    priority: Annotated[int | None, typer.Option(help="Higher goes first; below 0 uses only idle devices.")] = None,
    time: Annotated[
        str | None, typer.Option(metavar="SOFT[:HARD]", help="After SOFT it yields to others; after HARD it is ended.")
    ] = None,
    estimate: Annotated[str | None, typer.Option(metavar="TIME", help="Expected run time, such as 90m.")] = None,
    begin: Annotated[str | None, typer.Option(metavar="TIME", help="Not to start before 8h, or 22:00.")] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="To have ended in 8h, or at 09:00; needs policy cost.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Total number of steps, if not reported.")] = None,
    saves: Annotated[
        bool | None, typer.Option("--saves/--no-saves", help="It saves and stops on request. Default: detected.")
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB[:ok|any|failed]", help="Start after JOB succeeded, ended or failed."),
    ] = None,
    array: Annotated[
        str | None, typer.Option(metavar="0-9[%4]", help="A job for each {index}, with %4 four at once.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="Set a variable; NAME alone inherits it.")
    ] = None,
    folder: Annotated[str | None, typer.Option(metavar="DIR", help="Folder to run in. Default: this one.")] = None,
    image: Annotated[str | None, typer.Option(help="Run in this container image, by podman or apptainer.")] = None,
    snapshot: Annotated[
        bool | None,
        typer.Option(
            "--snapshot/--no-snapshot", help="Run in a copy of the working tree. Default: if it is under git."
        ),
    ] = None,
    link: Annotated[list[str] | None, typer.Option(metavar="DIR", help="Folder that the snapshot links to.")] = None,
    grace: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time to save and stop, at most 1d. Default: 60s.")
    ] = None,
    idle_end: Annotated[
        str | None, typer.Option(metavar="TIME", help="End it once its devices have been idle for TIME.")
    ] = None,
    requeue: Annotated[bool, typer.Option("--requeue", help="Allow a restart from the beginning.")] = False,
    retries: Annotated[int | None, typer.Option(help="Number of retries if the job fails.")] = None,
    notify: Annotated[
        list[str] | None,
        typer.Option(metavar="TARGET", help="At its end: command:COMMAND, webhook:URL or mail:ADDRESS."),
    ] = None,
    share_device: Annotated[bool, typer.Option("--share-device", help="Allow other such jobs on its device.")] = False,
    name: Annotated[str | None, typer.Option(help="Name of the job.")] = None,
    backend: Annotated[str | None, typer.Option(help="local, slurm, ray or kubernetes.")] = None,
    backend_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Option of the backend; repeatable.")
    ] = None,
    queue: Queue = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the request; submit nothing.")] = False,
    pty: Annotated[bool, typer.Option("--pty", help="Run it in this terminal; exit with its code.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the job; exit with its exit code.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the jobs' ids as JSON.")] = False,
) -> None:
    """Submit a command or a job file; print its job number and how to watch it."""
    command = list(arguments or ())
    if command and command[0].endswith((".yaml", ".yml", ".json")):
        raise ConfigError(
            f"{command[0]}: job files are TOML, such as job.toml with the lines command = 'evenload run train.py' and devices = 2"
        )
    path = Path(command.pop(0)) if command and command[0].endswith(".toml") else None
    given = _given_options(context.params) | _environment(env or [])
    given |= _backend_options(backend, backend_option or [])
    if command and path is None:
        given["command"] = (command, "the command")
    values, sources = merged(given, path)
    if path is not None and command:
        values["command"] = _longer(values.get("command"), command)
    job = job_from(values, sources)
    if pty:
        if wait or json:
            raise ConfigError(
                f"--pty with {'--wait' if wait else '--json'}: it waits itself, and prints what the job prints"
            )
        from evenload.scheduler.submit.interactive import interactive_job

        job = interactive_job(job, dict(os.environ))
    if wait and job.backend == "kubernetes":
        raise ConfigError("--wait with --backend kubernetes: Evenload only writes its jobs; use kubectl wait")
    queue_folder = folder_of(queue)
    is_first = job.backend == "local" and not (queue_folder / "queue.sqlite").exists()
    submitted = submit_job(job, queue=queue_folder, here=Path.cwd(), variables=dict(os.environ), is_dry_run=dry_run)
    if dry_run:
        _print_dry_run(submitted, queue_folder, json)
        return
    _print_submitted(submitted, queue_folder, json)
    if is_first and not json:
        _offer_service(queue_folder)
    if pty:
        raise typer.Exit(_interact(submitted.ids[0], queue_folder))
    if wait:
        raise typer.Exit(_wait(submitted.ids, backends.get(job.backend, queue_folder)))


def _given_options(params: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the keys of a job file that options set: for each its value, and how it was written."""
    given: dict[str, tuple[Any, str]] = {}
    for key in KEYS:
        value = params.get("link" if key == "links" else key)
        if value in (None, (), []) or (value is False and key not in ("saves", "snapshot")):
            continue
        option = f"--{'link' if key == 'links' else key.replace('_', '-')}"
        if isinstance(value, bool):
            given[key] = (value, option if value else f"--no-{key}")
        elif key == "kind":
            given[key] = (",".join(value), f"--kind {','.join(value)}")
        elif key == "folder":
            given[key] = (str(Path(value).expanduser().absolute()), f"--folder {value}")
        elif isinstance(value, list | tuple):
            given[key] = (list(value), " ".join(f"{option} {text}" for text in value))
        else:
            given[key] = (value, f"{option} {value}")
    return given


def _offer_service(queue: Path) -> None:
    from evenload.scheduler.user_service import is_offered

    if is_offered(queue):
        print(
            f"to have this queue go on after a reboot of the machine: evenload queue service{option_for(queue)}",
            flush=True,
        )


def _print_dry_run(submitted: SubmittedJob, queue: Path, as_json: bool) -> None:
    checked = submitted.checked
    decision = f"{'yes' if checked.takes_snapshot else 'no'} ({checked.snapshot_reason})"
    if checked.job.backend != "local":
        print(submitted.request, end="")
        if checked.takes_snapshot:
            print(f"evenload: snapshot: {decision}", file=sys.stderr)
        return
    if as_json:
        print(submitted.request)
        return
    import tomli_w

    num = len(checked.job.array)
    notes = [
        f"queue: {queue}",
        f"jobs: {num}, an array" if num else "jobs: 1",
        f"snapshot: {decision}",
        f"variables from this shell: {', '.join(checked.environment) or 'none'}",
        *submitted.warnings,
    ]
    print("".join(f"# {note}\n" for note in notes) + tomli_w.dumps(as_table(checked.job)), end="")


def _print_submitted(submitted: SubmittedJob, queue: Path, as_json: bool) -> None:
    job, ids, snapshot = submitted.checked.job, submitted.ids, submitted.snapshot
    if as_json:
        values: dict[str, Any] = {"backend": job.backend, "job": ids[0]}
        if job.backend == "local":
            values = {"jobs": list(ids), "queue": str(queue), "snapshot": "" if snapshot is None else snapshot.folder}
        print(writer.dumps(values), flush=True)
        return
    first, name = ids[0], f" ({job.name})" if job.name else ""
    if job.backend != "local":
        print(f"job {first}{name} submitted to {job.backend}; evenload show --backend {job.backend} {first}")
    elif len(ids) > 1:
        print(f"jobs {first}-{ids[-1]}{name} queued: an array of {len(ids)}")
    else:
        print(f"job {first}{name} queued{_position(queue, first)}")
    if job.deadline and (late := LocalBackend(queue).deadline_note(first)):
        print(f"deadline: {late}")
    if snapshot is not None:
        print(_snapshot_line(snapshot))
    elif job.backend == "local" and job.snapshot is None:
        print(f"no snapshot: {submitted.checked.snapshot_reason}; edits made before the job starts will affect it")
    if job.backend == "local":
        option = option_for(queue)
        print(f"watch: evenload ps{option} · evenload logs{option} -f {first} · evenload cancel{option} {first}")
    sys.stdout.flush()


def _position(queue: Path, job: str) -> str:
    from evenload.views.queue.text import span

    found = LocalBackend(queue).position(job)
    if found is None:
        return ", starting now"
    if isinstance(found, str):
        return f" and cancelled: {found}"
    position, start_s = found
    text = "" if position is None else f", position {position} of the waiting jobs"
    return text if start_s is None or start_s <= 1 else f"{text}, expected to start in {span(start_s)}"


def _snapshot_line(snapshot: TreeSnapshot) -> str:
    text = f"snapshot: {snapshot.num_files} files, {snapshot.size_bytes / 1e6:.1f} MB"
    if snapshot.linked:
        text += f"; linked to the originals: {_first_of(snapshot.linked)}"
    if snapshot.outside:
        text += f"; links that point outside the tree: {_first_of(snapshot.outside)}"
    return f"{text}. The job runs in {snapshot.folder}"


def _first_of(names: Sequence[str], num: int = 6) -> str:
    listed = names if len(names) <= num else [*names[: num - 1], f"and {len(names) - num + 1} more"]
    return ", ".join(listed)


def _interact(job: str, queue: Path) -> int:
    from evenload.scheduler.submit.interactive import run_interactively

    if not run_interactively(queue, job):
        print(f"evenload: job {job} is cancelled", file=sys.stderr)
        return 130
    return _wait([job], LocalBackend(queue))


def _wait(ids: Sequence[str], backend: SchedulerBackend) -> int:
    """Wait until all jobs have ended; return the exit code of the first that did not succeed."""
    left, code = list(ids), 0
    try:
        for status in backend.wait(ids):
            left = [job for job in left if job != status.id]
            reason = f": {status.reason}" if status.reason else ""
            print(f"job {status.id} {status.state.lower()}{reason}", file=sys.stderr, flush=True)
            code = code or _exit_code_of(status)
    except KeyboardInterrupt:
        print(f"evenload: stopped waiting; these jobs remain in the queue: {', '.join(left)}", file=sys.stderr)
        return 130
    except QueueError as error:
        raise QueueError(f"stopped waiting for job {', '.join(left)}: {error}") from error
    return code


def _exit_code_of(status: JobStatus) -> int:
    """The program's own exit code if the reason contains it; as in a shell, 128 + n for signal n."""
    if status.state is JobState.SUCCEEDED:
        return 0
    if found := re.search(r"exit code (\d+)", status.reason):
        return int(found[1]) if 0 < int(found[1]) < 256 else 1
    if (found := re.search(r"killed by (SIG\w+)", status.reason)) and found[1] in signal.Signals.__members__:
        return 128 + signal.Signals[found[1]]
    return 1


def _longer(command: Any, more: list[str]) -> list[str]:
    from evenload.scheduler.job_syntax import read_words

    if command is None:
        return more
    try:
        return [*read_words(command), *more]
    except ValueError as error:
        raise ConfigError(f"command = {command!r}: expected {error}") from None


def _environment(texts: list[str]) -> dict[str, tuple[Any, str]]:
    values: dict[str, str] = {}
    names: list[str] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if name in values or name in names:
            raise ConfigError(f"--env {text}: {name} is set twice; set it once")
        if equals:
            values[name] = value
        else:
            names.append(name)
    found: dict[str, tuple[Any, str]] = {}
    if values:
        found["environment"] = (values, " ".join(f"--env {name}" for name in values))
    if names:
        found["inherit"] = (names, " ".join(f"--env {name}" for name in names))
    return found


def _backend_options(backend: str | None, texts: list[str]) -> dict[str, tuple[Any, str]]:
    options: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or name in options:
            raise ConfigError(f"--backend-option {text}: expected NAME=VALUE, each name once")
        options[name] = value
    if not options:
        return {}
    if backend is None:
        raise ConfigError(f"--backend-option {texts[0]} requires --backend")
    return {backend: (options, f"--backend-option {' '.join(texts)}")}
