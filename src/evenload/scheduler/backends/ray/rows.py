"""The queue on Ray for display: rows of the same form as those of this machine's queue (`scheduler.messages`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenload.errors import QueueError
from evenload.scheduler import validation
from evenload.scheduler.backends.ray.devices import device_label
from evenload.scheduler.backends.ray.queue import RayQueue
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.core.values import Job
from evenload.scheduler.forecast.forecast import Forecast
from evenload.scheduler.job_lookup import add_forecast, row_of_attempt, row_of_device, row_of_job, spec_by_wall_clock
from evenload.scheduler.messages import DeviceRow


def queue_rows(queue: RayQueue, user: str | None, states: Sequence[JobState], num_ended: int | None) -> dict[str, Any]:
    """Return devices, jobs and counts.

    Jobs are those in one of the states, of a user or of all; without states, those that have not ended and the newest
    `num_ended` of those that have (None: all).
    """
    queue.commit()
    reader = queue.reader
    active = [state for state in JobState if state not in ENDED]
    lines = reader.jobs(states=states or active, user=user)
    if not states:
        ended = reader.jobs(states=tuple(ENDED), user=user, limit=num_ended, newest_first=True)
        lines = sorted([*ended, *lines], key=lambda line: line.number)
    forecasts = queue.forecasts()
    found = [(line.number, queue.job(line.id)) for line in lines]
    jobs = [_job_row(queue, job, forecasts) | {"number": number} for number, job in found if job is not None]
    return {
        "folder": str(queue.root),
        "devices": [_device_row(queue, name) for name in queue.queue_state.devices],
        "jobs": jobs,
        "counts": {str(state): num for state, num in reader.counts(user).items()},
    }


def job_rows(queue: RayQueue, name: str) -> tuple[dict[str, Any], dict[str, DeviceRow]]:
    """Return a job in the form of a daemon's reply to ``job``, and the rows of the queue's devices by id."""
    queue.commit()
    job = queue.job(name)
    if job is None:
        raise QueueError(f"no job {name} in this queue")
    ahead_s, attempts = queue.clock.ahead_s, queue.reader.attempts(name)
    file, index = queue.program(name)
    row = {
        "job": _job_row(queue, job, queue.forecasts(name)),
        "spec": validation.plain(spec_by_wall_clock(job.spec, ahead_s)),
        "program": {"command": file.command_of(index), "folder": file.folder},
        "attempts": [row_of_attempt(attempt, ahead_s) for attempt in attempts],
    }
    return row, {device: _device_row(queue, device) for device in queue.queue_state.devices}


def _job_row(queue: RayQueue, job: Job, forecasts: Mapping[str, Forecast]) -> dict[str, Any]:
    row, ahead_s = row_of_job(queue.root, job, queue.clock), queue.clock.ahead_s
    row["log"] = ""  # it is on the nodes
    if (known := forecasts.get(job.id)) is not None:
        add_forecast(row, job, known, ahead_s)
        row["eta_s"] = None if known.end_s is None else known.end_s + ahead_s
    return dict(row)


def _device_row(queue: RayQueue, name: str) -> DeviceRow:
    return row_of_device(queue.queue_state, name, device_label(name, queue.names))
