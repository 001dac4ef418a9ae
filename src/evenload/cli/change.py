"""`evenload change`: hold or release jobs, or change what they request."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from evenload.cli.jobs import NOT_ENDED, Queue, folder_of, targets
from evenload.errors import ConfigError, EvenloadError


def change(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Job numbers, ranges such as 12-21, or names.")],
    hold: Annotated[bool, typer.Option("--hold", help="Do not start the jobs until they are released.")] = False,
    release: Annotated[bool, typer.Option("--release", help="Allow held jobs to start again.")] = False,
    priority: Annotated[int | None, typer.Option(help="Higher goes first.")] = None,
    time: Annotated[str | None, typer.Option(metavar="SOFT[:HARD]", help="Time limits.")] = None,
    estimate: Annotated[str | None, typer.Option(metavar="TIME", help="Expected run time.")] = None,
    steps: Annotated[int | None, typer.Option(help="Total number of steps.")] = None,
    devices: Annotated[str | None, typer.Option("-d", "--devices", metavar="N or MIN:MAX")] = None,
    kind: Annotated[str | None, typer.Option(help="Acceptable kinds of devices.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Minimum memory of each device.")] = None,
    retries: Annotated[int | None, typer.Option(help="Number of times to retry the job if it fails.")] = None,
    name: Annotated[str | None, typer.Option()] = None,
    queue: Queue = None,
) -> None:
    """Change jobs that have not ended. Devices can be changed only while a job waits."""
    from evenload.scheduler.client import connect

    if hold and release:
        raise ConfigError("--hold and --release contradict each other; give one of them")
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
    with connect(folder, start=False) as client:
        for job in targets(jobs, folder, client, ("PENDING",) if hold or release else NOT_ENDED):
            try:
                if fields:
                    client.call("change", job=job, **fields)
                if hold or release:
                    client.call("hold" if hold else "release", jobs=[job])
                words = [*([] if not (hold or release) else ["held" if hold else "released"]), *values]
                print(f"job {job}: {', '.join(words)} {'changed' if values else ''}".rstrip())
            except EvenloadError as error:
                failed = True
                print(f"evenload: error: {error}", file=sys.stderr)
    if failed:
        raise typer.Exit(2)


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The changes as fields of `JobSpec`."""
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
