"""`evenload change`: hold or release jobs, change what they request, or the devices of a running run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenload.cli.jobs import NOT_ENDED, Queue, act_on_jobs
from evenload.errors import ConfigError

if TYPE_CHECKING:
    from evenload.scheduler.client import Client


def change(
    context: typer.Context,
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB...|RUN", help="Job numbers, ranges such as 12-21, or names; or a run folder."),
    ],
    hold: Annotated[bool, typer.Option("--hold", help="Do not start the jobs until they are released.")] = False,
    release: Annotated[bool, typer.Option("--release", help="Allow held jobs to start again.")] = False,
    priority: Annotated[int | None, typer.Option(help="Higher goes first.")] = None,
    time: Annotated[str | None, typer.Option(metavar="SOFT[:HARD]", help="Time limits.")] = None,
    estimate: Annotated[str | None, typer.Option(metavar="TIME", help="Expected run time.")] = None,
    begin: Annotated[str | None, typer.Option(metavar="TIME", help="Not to start before 8h, or 22:00.")] = None,
    deadline: Annotated[str | None, typer.Option(metavar="TIME", help="To have ended in 8h, or at 09:00.")] = None,
    steps: Annotated[int | None, typer.Option(help="Total number of steps.")] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "-d",
            "--devices",
            metavar="N or MIN:MAX|DEVICES",
            help="Number of devices of a job; of a run the devices, as for evenload run.",
        ),
    ] = None,
    kind: Annotated[str | None, typer.Option(help="Acceptable kinds of devices.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Minimum memory of each device.")] = None,
    retries: Annotated[int | None, typer.Option(help="Number of times to retry the job if it fails.")] = None,
    name: Annotated[str | None, typer.Option(help="New name of the job.")] = None,
    backend: Annotated[str | None, typer.Option(help="Change jobs of the queue on ray.")] = None,
    queue: Queue = None,
) -> None:
    """Change jobs that have not ended, or the devices of a run in progress, at the end of a step and without a restart.

    The devices of a job can be changed only while it waits.
    """
    if hold and release:
        raise ConfigError("--hold and --release contradict each other; give one of them")
    keys = (
        "priority",
        "time",
        "estimate",
        "begin",
        "deadline",
        "steps",
        "devices",
        "kind",
        "memory",
        "retries",
        "name",
    )
    values = {key: context.params[key] for key in keys if context.params[key] is not None}
    if not values and not hold and not release:
        raise ConfigError("nothing to change: give --priority, --hold, --release, --time, ...; --help lists all")
    from evenload.records.reader import is_run

    runs = [text for text in jobs if is_run(Path(text))]
    if not_runs := [text for text in jobs if "/" in text and text not in runs]:
        raise ConfigError(
            f"{not_runs[0]}: there is no run in this folder, or it has not begun; give the project_dir of a run"
        )
    if runs:
        _change_runs(runs, jobs, values, hold or release)
        return
    if devices is not None and not re.fullmatch(r"\d+(:\d+)?", devices):
        raise ConfigError(
            f"-d {devices} names the devices of a run, and {jobs[0]!r} is no run folder: give the project_dir of a run that has "
            "begun; for a job, -d takes their number, N or MIN:MAX"
        )
    fields = _fields(values)
    if backend not in (None, "local"):
        if backend != "ray":
            raise ConfigError(f"--backend {backend}: only jobs of the queue on ray can be changed here")
        _change_on_ray(jobs, fields, values, hold, release)
        return

    def act(client: Client, ids: list[str]) -> Iterable[tuple[str, str]]:
        if fields:
            client.call("change", job=ids[0], **fields)
        if hold or release:
            client.call("hold" if hold else "release", jobs=ids)
        return [(job, _what_changed(fields, values, hold, release)) for job in ids]

    act_on_jobs(jobs, queue, ("PENDING",) if hold or release else NOT_ENDED, act, at_once=not fields)


def _change_on_ray(
    jobs: Sequence[str], fields: Mapping[str, Any], values: Mapping[str, Any], hold: bool, release: bool
) -> None:
    from evenload.scheduler.backends.ray.backend import BACKEND

    for text in jobs:
        ids = BACKEND.change(text, fields) if fields else []
        if hold or release:
            ids = BACKEND.hold(text, is_held=hold)
        for job in ids:
            print(f"job {job} of ray: {_what_changed(fields, values, hold, release)}", flush=True)


def _what_changed(fields: Mapping[str, Any], values: Mapping[str, Any], hold: bool, release: bool) -> str:
    from evenload.views.queue.text import moment

    words = [*(["held" if hold else "released"] if hold or release else []), *values]
    begins = f"; not to start before {moment(fields['not_before_s'])}" if "not_before_s" in fields else ""
    return f"{', '.join(words)}{' changed' if values else ''}{begins}"


def _change_runs(runs: Sequence[str], texts: Sequence[str], values: Mapping[str, Any], holds: bool) -> None:
    from evenload.training.launch.run_control import change_devices_of

    if others := [text for text in texts if text not in runs]:
        raise ConfigError(f"{runs[0]} is a run folder, {others[0]} a job; change them with two commands")
    if holds or set(values) != {"devices"}:
        raise ConfigError(f"{runs[0]} is a run folder: of a run in progress only the devices can change: -d 0,1,cpu")
    for run in runs:
        for line in change_devices_of(Path(run), values["devices"]):
            print(f"{run}: {line}", flush=True)
        print(f"{run}: done", flush=True)


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The changes as fields of `JobSpec`."""
    import time

    from evenload.scheduler.job_file import KEYS, job_from
    from evenload.scheduler.job_syntax import delays_of, moment_s

    job = job_from({"command": ["true"], **values}, {key: f"--{key} {value}" for key, value in values.items()})
    found: dict[str, Any] = {}
    for key in values:
        if (name := {"begin": "not_before_s", "deadline": "deadline_s"}.get(key)) is not None:
            found[name] = moment_s(getattr(job, key), time.time())
            found["delays"] = [*found.get("delays", ()), *delays_of(**{name: getattr(job, key)})]
            continue
        fields = {"total" if name == "steps" else name: getattr(job, name) for name in KEYS[key][1]}
        if key in ("devices", "kind", "memory"):
            found["needs"] = {**found.get("needs", {}), **fields}
        else:
            found |= fields
    return found
