"""Rows of replies, made of the queue's values; `scheduler.messages` declares their fields."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import Any

from evenload.scheduler import validation
from evenload.scheduler.core.sharing import excess_bytes
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job, JobSpec
from evenload.scheduler.daemon.idle import long_idle_s
from evenload.scheduler.daemon.maintenance import shifted
from evenload.scheduler.daemon.runners import LiveAttempt
from evenload.scheduler.daemon.state import DaemonState
from evenload.scheduler.forecast.forecast import Forecast
from evenload.scheduler.job_lookup import add_forecast, row_of_device, row_of_job, spec_by_wall_clock
from evenload.scheduler.messages import DeviceRow, ExternalProcessRow, JobRow, StatusRow
from evenload.scheduler.store.reader import JobLine
from evenload.version import __version__


def job_row(state: DaemonState, job: Job, forecast: Forecast | None = None) -> JobRow:
    live = state.runners.live.get(job.id)
    report = live.report if live is not None else None
    row = row_of_job(state.folder, job, state.clock)
    row["shares"] = _beside(state, job)
    ahead_s, end_s = state.clock.ahead_s, _end_s(job, live, forecast)
    row["eta_s"] = None if end_s is None else end_s + ahead_s
    if forecast is not None:
        add_forecast(row, job, forecast, ahead_s)
    if report is not None:
        row["done"], row["rate_per_s"] = float(report.step), report.steps_per_s
        row["total"] = job.total if report.total is None else float(report.total)
    if live is not None:
        row["peak_bytes"] = max(job.peak_bytes, live.peak_bytes)
        row["idle_s"] = long_idle_s(state, live)
    return row


def spec_row(state: DaemonState, spec: JobSpec) -> dict[str, Any]:
    """Return a job's spec, with times of the wall clock."""
    row: dict[str, Any] = validation.plain(spec_by_wall_clock(spec, state.clock.ahead_s))
    return row


def _beside(state: DaemonState, job: Job) -> list[str]:
    holder = state.store.queue_state.holder
    return [name for device in job.devices for name in holder.get(device, ()) if name != job.id]


def _end_s(job: Job, live: LiveAttempt | None, forecast: Forecast | None) -> float | None:
    """Return the end by the program's last report, which is newer than the store; else by the forecast."""
    report = None if live is None else live.report
    if (
        live is not None
        and job.state is JobState.RUNNING
        and report is not None
        and report.total is not None
        and report.steps_per_s > 0
    ):
        return live.reported_s + max(0, report.total - report.step) / report.steps_per_s
    return None if forecast is None else forecast.end_s


def ended_row(state: DaemonState, line: JobLine) -> JobRow:
    job = state.reader.job(line.id)
    if job is None:
        raise LookupError(line.id)
    return {**job_row(state, job), "devices": json.loads(line.devices)}


def status_row(state: DaemonState) -> StatusRow:
    queue_state = state.store.queue_state
    return {
        "pid": os.getpid(),
        "version": __version__,
        "uid": os.geteuid(),
        "since_s": state.since_s,
        "folder": str(state.folder),
        "devices": [_device_row(state, name) for name in queue_state.devices],
        "settings": asdict(queue_state.settings),
        "counts": {str(name): num for name, num in state.reader.counts().items()},
        "users": [user_row(state, name) for name in queue_state.users],
        "groups": [group_row(state, name) for name in state.settings.groups],
        "reservations": [reservation_row(state, name) for name in queue_state.reservations],
        "last": state.store.last,
        "problems": list(state.problems.values()),
    }


def user_row(state: DaemonState, name: str) -> dict[str, Any]:
    queue_state = state.store.queue_state
    user = queue_state.users[name]
    return {
        "user": name,
        "num_devices": user.num_devices,
        "usage_device_s": user.usage_until(state.clock.now_s(), queue_state.settings.half_life_s),
        "month_device_hours": state.budgets.used_hours.get(name, 0.0),
        **asdict(user.limits),
    }


def group_row(state: DaemonState, name: str) -> dict[str, Any]:
    group = state.settings.groups[name]
    return {
        "group": name,
        "users": list(group.users),
        "month_device_hours": state.budgets.hours_of(group.users),
        "budget_device_hours": group.budget_device_hours,
    }


def reservation_row(state: DaemonState, name: str) -> dict[str, Any]:
    ahead_s, reservation = state.clock.ahead_s, state.store.queue_state.reservations[name]
    row = validation.plain(shifted(reservation, ahead_s))
    return {"users": [], **row}


def _device_row(state: DaemonState, name: str) -> DeviceRow:
    queue_state = state.store.queue_state
    device, found, held = queue_state.devices[name], state.devices.get(name), state.held(name)
    jobs = queue_state.holder.get(name, ())
    external: list[ExternalProcessRow] = []
    if held is not None:
        for holder in held.external:
            if name in queue_state.holder and not holder.command:
                continue  # in a container the driver's process ids can't be distinguished from the job's own
            external.append(
                {
                    "pid": holder.pid,
                    "user": holder.user,
                    "command": holder.command,
                    "used_bytes": holder.used_bytes or 0,
                    "since_s": state.external_since_s.get((name, holder.pid), time.time()),
                }
            )
    row = row_of_device(queue_state, name, name if found is None else found.label)
    row["external"] = external
    if len(jobs) > 1:
        row["excess_bytes"] = excess_bytes([queue_state.jobs[job] for job in jobs], device.memory_bytes)
    if held is not None:
        row["ghost_bytes"], row["used_bytes"] = held.ghost_bytes(state.settings.ghost_bytes), held.used_bytes
    return row
