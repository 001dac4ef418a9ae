"""``evenload change``: hold a job back, let it go, or change what it asked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from evenload.cli.cancel import ACTIVE
from evenload.cli.jobs import Queue, folder_of, targets
from evenload.errors import ConfigError, EvenloadError


def change(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Numbers, ranges such as 12-21, or names.")],
    hold: Annotated[bool, typer.Option("--hold", help="Don't start it until it is released.")] = False,
    release: Annotated[bool, typer.Option("--release", help="Let it start again.")] = False,
    priority: Annotated[int | None, typer.Option(help="Higher goes first.")] = None,
    time: Annotated[str | None, typer.Option(metavar="SOFT[:HARD]", help="Time limits.")] = None,
    estimate: Annotated[str | None, typer.Option(metavar="TIME", help="How long it will run.")] = None,
    steps: Annotated[int | None, typer.Option(help="All of its steps.")] = None,
    devices: Annotated[str | None, typer.Option("-d", "--devices", metavar="N or MIN:MAX")] = None,
    kind: Annotated[str | None, typer.Option(help="Kinds of devices that may serve.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="At least so much on each device.")] = None,
    retries: Annotated[int | None, typer.Option(help="Try it again so often where it fails.")] = None,
    name: Annotated[str | None, typer.Option()] = None,
    queue: Queue = None,
) -> None:
    """Change jobs that have not ended; devices only of those that wait."""
    from evenload.scheduler.client import connect

    if hold and release:
        raise ConfigError("--hold and --release are opposites; give one of them")
    given = {
        "priority": priority,
        "time": time,
        "estimate": estimate,
        "steps": steps,
        "devices": devices,
        "kind": kind,
        "memory": memory,
        "retries": retries,
        "name": name,
    }
    values = {key: value for key, value in given.items() if value is not None}
    if not values and not hold and not release:
        raise ConfigError("nothing to change: give --priority, --hold, --release, --time, ...; --help lists all")
    fields = _fields(values)
    folder = folder_of(queue)
    failed = False
    with connect(folder, start=False) as line:
        for job in targets(jobs, folder, line, ("PENDING",) if hold or release else ACTIVE):
            try:
                if fields:
                    line.call("change", job=job, **fields)
                if hold or release:
                    line.call("hold" if hold else "release", jobs=[job])
                words = [*([] if not (hold or release) else ["held" if hold else "released"]), *values]
                print(f"job {job}: {', '.join(words)} {'changed' if values else ''}".rstrip())
            except EvenloadError as error:
                failed = True
                print(f"evenload: error: {error}", file=sys.stderr)
    if failed:
        raise typer.Exit(2)


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is changed, as fields of `JobSpec`; of its needs only those that are named."""
    from evenload.scheduler.job_file import job_from

    job = job_from({"command": ["true"], **values}, {key: f"--{key} {value}" for key, value in values.items()})
    found: dict[str, Any] = {}
    plain = {
        "priority": ("priority", job.priority),
        "estimate": ("estimate_s", job.estimate_s),
        "steps": ("total", job.steps),
        "retries": ("retries", job.retries),
        "name": ("name", job.name),
    }
    found |= dict(field for key, field in plain.items() if key in values)
    if "time" in values:
        found |= {"soft_limit_s": job.soft_limit_s, "hard_limit_s": job.hard_limit_s}
    needs: dict[str, Any] = {}
    if "devices" in values:
        needs |= {"min_devices": job.min_devices, "max_devices": job.max_devices}
    if "kind" in values:
        needs["kinds"] = list(job.kinds)
    if "memory" in values:
        needs["memory_bytes"] = job.memory_bytes
    return {**found, **({"needs": needs} if needs else {})}
