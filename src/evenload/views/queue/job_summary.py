"""Summary of one job of a queue: what it requested, its attempts and how each ended, what it cost."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.errors import QueueError
from evenload.scheduler import validation
from evenload.scheduler.client import connect
from evenload.scheduler.core import events
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.job_lookup import has_readable_file, row_of_attempt, row_of_job, spec_by_wall_clock, stored_job
from evenload.scheduler.job_syntax import bytes_text, duration_text
from evenload.scheduler.paths import option_for
from evenload.views.queue.job_run import folder_of_run, of_job
from evenload.views.queue.text import aligned, clean, gigabytes, idle, moment, progress, short_list, span

_ENDED = {str(state) for state in ENDED}
_ENDINGS = {
    "Yielded": "saved and stopped",
    "NotSaved": "stopped, not saved",
    "Resized": "went on without a stop",
    "Ended": "ended",
    "Lost": "lost",
}


@dataclass(frozen=True, slots=True)
class JobSummary:
    job: Mapping[str, Any]
    """As `messages.JobRow`."""
    spec: Mapping[str, Any]
    program: Mapping[str, Any]
    """Without the environment unless the caller owns the job."""
    attempts: Sequence[Mapping[str, Any]]
    """As `messages.AttemptRow`."""
    devices: Mapping[str, Mapping[str, Any]]
    """Id → `messages.DeviceRow`, of the devices that still exist."""
    lost: Mapping[int, float]
    """Attempt → steps that were lost and repeated later; only if the queue's file can be read."""
    now_s: float
    money: float = 0.0
    """Price of the devices it held, at present prices."""
    listens: Sequence[str] = ()
    """Addresses on which its processes listen now."""
    queue_option: str = ""
    """That names its queue in a command line to type; see `scheduler.paths.option_for`."""


def summarize_job(folder: Path, job: str) -> JobSummary:
    """Raise `QueueError` if there is no such job, or neither the daemon nor the queue's file can be read."""
    devices: dict[str, Mapping[str, Any]] = {}
    try:
        client = connect(folder, start=False)
    except QueueError:
        if not has_readable_file(folder):
            raise
        row = _stored(folder, job)
    else:
        with client:
            row = client.call("job", job=job, listens=True)
            devices = {device["id"]: device for device in client.call("status")["devices"]}
    return summary_of_rows(row, devices, _lost(folder, job), option_for(folder))


def summary_of_rows(
    row: Mapping[str, Any],
    devices: Mapping[str, Mapping[str, Any]],
    lost: Mapping[int, float],
    queue_option: str,
) -> JobSummary:
    """Return the summary of a job from a queue's reply to ``job`` (`scheduler.messages`)."""
    return JobSummary(
        row["job"],
        row.get("spec", {}),
        row["program"],
        row["attempts"],
        devices,
        lost,
        time.time(),
        row.get("cost", 0.0),
        row.get("listens", ()),
        queue_option,
    )


def device_hours(summary: JobSummary) -> float:
    return sum(_device_s(summary, attempt) for attempt in summary.attempts) / 3600


def cost(summary: JobSummary) -> tuple[float, float]:
    """Return (money, kWh) by the devices' prices and power; 0 if these are not set."""
    energy = 0.0
    for attempt in summary.attempts:
        hours = _held_s(summary, attempt) / 3600
        for name in attempt["devices"]:
            device = summary.devices.get(name, {})
            energy += hours * device.get("power_w", 0.0) / 1000
    return summary.money, energy


def as_table(summary: JobSummary) -> dict[str, Any]:
    """Return plain values for JSON, without the job's variables, which may be secret."""
    money, energy = cost(summary)
    return {
        "job": dict(summary.job),
        "spec": dict(summary.spec),
        "program": {name: value for name, value in summary.program.items() if name != "environment"},
        "attempts": [dict(attempt) for attempt in summary.attempts],
        "lost_work": {str(attempt): work for attempt, work in summary.lost.items()},
        "listens": list(summary.listens),
        "device_hours": device_hours(summary),
        "cost": money,
        "energy_kwh": energy,
        "run": str(run_folder(summary) or ""),
    }


def job_text(summary: JobSummary) -> str:
    rows = [[name, value] for name, value in _facts(summary) if value]
    parts = [_head(summary), "\n".join(aligned(rows)), _attempts(summary)]
    return "\n\n".join(part for part in parts if part)


def run_folder(summary: JobSummary) -> Path | None:
    """Return the folder of the job's run; None where there is none, or several may be."""
    return folder_of_run(summary.job["id"], summary.program, summary.attempts, summary.now_s)


def run_records(summary: JobSummary, run: Path) -> Callable[[float], bool]:
    """Return whether a record of the run, written at a time, belongs to this job."""
    return of_job(run, summary.job["id"], summary.attempts, summary.now_s)


def _head(summary: JobSummary) -> str:
    job = summary.job
    name = f" ({clean(job['name'])})" if job["name"] else ""
    state = JobState(job["state"])
    text = f"job {job['id']}{name} of {job['user']}: {state.lower()}"
    if state in ENDED:
        text += f" {span(summary.now_s - job['since_s'])} ago"
    elif state is JobState.PENDING:
        text += f" for {span(summary.now_s - job['since_s'])}"
        if job.get("start_s") is not None:
            text += f", starts in about {span(job['start_s'] - summary.now_s)}"
    if job.get("eta_s") is not None and state not in ENDED:
        text += f", done in about {span(job['eta_s'] - summary.now_s)}"
    return f"{text}{': ' + clean(job['reason']) if job['reason'] else ''}"


def _facts(summary: JobSummary) -> Iterator[tuple[str, str]]:
    job, program = summary.job, summary.program
    yield "command", clean(shlex.join(program.get("command", ())))
    yield "folder", clean(str(program.get("folder", "")))
    yield "snapshot", _snapshot(program)
    yield "requested", _requested(job, summary.spec)
    yield "estimate", _estimate(job)
    yield "begins", _begin(summary)
    yield "deadline", _deadline(summary)
    yield "memory", f"{gigabytes(job['peak_bytes'])} of its device at peak" if job.get("peak_bytes") else ""
    yield "listens on", ", ".join(summary.listens)
    yield "idle", idle(job, {name: str(device["label"]) for name, device in summary.devices.items()})
    yield "shares with", f"job {', '.join(job['shares'])}" if job.get("shares") else ""
    speed = f", {job['rate_per_s']:.3g}/s" if job["rate_per_s"] else ""
    yield "progress", f"{progress(job)}{speed}" if progress(job) else ""
    yield "submitted", moment(job["submitted_s"])
    end_s = job["since_s"] if job["state"] in _ENDED else summary.now_s
    waited_s = max(0.0, end_s - job["submitted_s"] - job["held_s"])
    yield "waited", f"{span(waited_s)} in total" if waited_s >= 1 else "not at all"
    yield "used", _used(summary)
    if summary.lost:
        steps = sum(summary.lost.values())
        yield (
            "lost work",
            f"{steps:g} steps by {len([w for w in summary.lost.values() if w])} of {len(summary.lost)} stops",
        )
    command = f"evenload logs{summary.queue_option} {job['id']}"
    on_nodes = command if "log" in job else ""
    yield "output", f"{job['log']} ({command})" if job.get("log") else on_nodes
    run = run_folder(summary)
    yield "run", f"{run} (evenload show {shlex.quote(str(run))})" if run is not None else ""


def _estimate(job: Mapping[str, Any]) -> str:
    """Return the estimated run time and its source; empty without one."""
    seconds = job.get("estimate_s")
    if seconds is None:
        return ""
    source = job.get("estimate_source")
    return f"runs for about {span(seconds)}, estimated {f'from {source}' if source else 'by its owner'}"


def _begin(summary: JobSummary) -> str:
    """Return before when a waiting job doesn't start; empty for others."""
    begin_s = summary.spec.get("not_before_s")
    if begin_s is None or summary.job["state"] != "PENDING" or begin_s <= summary.now_s:
        return ""
    return f"not before {moment(begin_s)}"


def _deadline(summary: JobSummary) -> str:
    """Return when the job is to have ended, and how its expected or real end compares; empty without a deadline."""
    job = summary.job
    deadline_s, has_ended = job.get("deadline_s"), job["state"] in _ENDED
    if deadline_s is None:
        return ""
    end_s = job["since_s"] if has_ended else job.get("eta_s")
    if end_s is None:
        return moment(deadline_s)
    by = f"{span(abs(deadline_s - end_s))} {'before' if end_s <= deadline_s else 'after'} it"
    return f"{moment(deadline_s)}, {'ended' if has_ended else 'expected to end'} {by}"


def _snapshot(program: Mapping[str, Any]) -> str:
    folder = program.get("snapshot")
    if not folder:
        return ""
    from evenload.scheduler.snapshots import new_files

    made = new_files(str(folder), limit=6)
    more = (
        f"; files the job created there: {', '.join(map(clean, made[:5]))}{', ...' if len(made) > 5 else ''}"
        if made
        else ""
    )
    return f"{folder}{more}"


def _requested(job: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    least, most = job["min_devices"], job["max_devices"]
    parts = [f"{least if least == most else f'{least}:{most}'} device{'s' if most > 1 else ''}"]
    needs = spec.get("needs", {})
    if kinds := job.get("kinds"):
        parts[0] += f" of kind {' or '.join(map(clean, kinds))}"
    if needs.get("memory_bytes"):
        parts[0] += f" with {bytes_text(needs['memory_bytes'])}"
    if job["priority"]:
        parts.append(f"priority {job['priority']}")
    for name, limit in (("soft", spec.get("soft_limit_s")), ("hard", spec.get("hard_limit_s"))):
        if limit:
            parts.append(f"{name} limit {duration_text(limit)}")
    if spec.get("after"):
        parts.append("after " + ", ".join(f"{row['job']}:{row.get('condition', 'ok')}" for row in spec["after"]))
    if job.get("array"):
        parts.append(f"of array {job['array']}")
    if spec.get("share_device"):
        parts.append("may share its device")
    return ", ".join(parts)


def _used(summary: JobSummary) -> str:
    if not summary.attempts:
        return ""
    held_s = sum(_held_s(summary, attempt) for attempt in summary.attempts)
    text = f"{span(held_s)} on devices, {device_hours(summary):.3g} device-hours"
    money, energy = cost(summary)
    return f"{text}{f', cost {money:.2f}' if money else ''}{f', {energy:.3g} kWh' if energy else ''}"


def _attempts(summary: JobSummary) -> str:
    if not summary.attempts:
        return ""
    rows = [["attempt", "began", "for", "devices", "ended"]]
    for attempt in summary.attempts:
        names = [clean(str(summary.devices.get(name, {}).get("label", name))) for name in attempt["devices"]]
        how = "running" if attempt["ended_s"] is None else _ENDINGS.get(attempt["ending"], attempt["ending"])
        why = f": {clean(attempt['reason'])}" if attempt["reason"] else ""
        lost = summary.lost.get(attempt["attempt"])
        again = f"; {lost:g} steps repeated" if lost else ""
        rows.append(
            [
                str(attempt["attempt"]), moment(attempt["began_s"]), span(_held_s(summary, attempt)), short_list(names),
                f"{how}{why}{again}",
            ]
        )  # fmt: skip
    return "\n".join(aligned(rows))


def _held_s(summary: JobSummary, attempt: Mapping[str, Any]) -> float:
    end_s = attempt["ended_s"]
    return float(max(0.0, (summary.now_s if end_s is None else end_s) - attempt["began_s"]))


def _device_s(summary: JobSummary, attempt: Mapping[str, Any]) -> float:
    return _held_s(summary, attempt) * len(attempt["devices"])


def _lost(folder: Path, job: str) -> dict[int, float]:
    """Attempt → work it reported beyond the point where the next attempt resumed."""
    if not has_readable_file(folder):
        return {}
    from evenload.scheduler.store.reader import Reader

    lost: dict[int, float] = {}
    attempt, done, has_ended, is_first = 0, 0.0, True, True
    last = 0  # the attempt that reported last: one in between may have ended before it could
    with Reader(folder) as reader:
        for logged in reader.log(job=job):
            entry = logged.entry
            if isinstance(entry, events.Placed):
                attempt, has_ended, is_first = entry.attempt, False, True
            elif isinstance(entry, events.JobStarted) and has_ended:  # resized: it goes on without a new place in line
                attempt, has_ended, is_first = attempt + 1, False, True
            elif isinstance(entry, events.Resized):
                attempt = entry.attempt
            elif isinstance(entry, events.Yielded | events.Lost) and attempt:
                lost.setdefault(attempt, 0.0)
                has_ended = True
            elif isinstance(entry, events.Reported):
                if is_first and last:
                    resumed_at = entry.done if entry.resumed_at is None else entry.resumed_at
                    lost[last] = lost.get(last, 0.0) + max(0.0, done - resumed_at)
                done, last, is_first = entry.done, attempt, False
    return lost


def _stored(folder: Path, job: str) -> dict[str, Any]:
    """Read the job from the queue's file, in the form of the daemon's answer."""
    from evenload.scheduler.store.reader import Reader

    found = stored_job(folder, job)
    with Reader(folder) as reader:
        clock, prices = reader.clock(), reader.prices()
        cost = prices.cost_of(reader.attempts(job), clock.now_s())
        attempts = [row_of_attempt(attempt, clock.ahead_s) for attempt in reader.attempts(job)]
        program = reader.program(job) or {}
    return {
        "job": row_of_job(folder, found, clock),
        "spec": validation.plain(spec_by_wall_clock(found.spec, clock.ahead_s)),
        "program": program,
        "attempts": attempts,
        "cost": cost,
    }
