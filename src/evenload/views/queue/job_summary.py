"""The story of one job of a queue: what it asked for, each time it got devices and why it lost them, what it cost."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.errors import QueueError
from evenload.scheduler.client import connect
from evenload.scheduler.core import events
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.job_syntax import bytes_text, duration_text
from evenload.views.queue.text import aligned, clean, gigabytes, moment, progress, short_list, span

_ENDED = {str(state) for state in ENDED}
_ENDINGS = {"Yielded": "saved and stopped", "Ended": "ended", "Lost": "lost"}
_SETTLES_S = 60.0
"""A run's records may still change for so long after its job has ended."""


@dataclass(frozen=True, slots=True)
class JobStory:
    """All that is known of a job."""

    job: Mapping[str, Any]
    """As `messages.JobRow`."""
    spec: Mapping[str, Any]
    program: Mapping[str, Any]
    """Without its environment to all but its owner."""
    attempts: Sequence[Mapping[str, Any]]
    """As `messages.AttemptRow`."""
    devices: Mapping[str, Mapping[str, Any]]
    """Id → `messages.DeviceRow`, as far as they are still there."""
    lost: Mapping[int, float]
    """Attempt → work that was done in it and done again later; only where the queue's file can be read."""
    now_s: float


def tell_job(folder: Path, job: str) -> JobStory:
    """The story of a job.

    Raises:
        QueueError: there is no such job, or nobody can be asked.
    """
    devices: dict[str, Mapping[str, Any]] = {}
    try:
        line = connect(folder, start=False)
    except QueueError:
        told = _stored(folder, job)
    else:
        with line:
            told = line.call("job", job=job)
            devices = {row["id"]: row for row in line.call("status")["devices"]}
    return JobStory(
        told["job"], told.get("spec", {}), told["program"], told["attempts"], devices, _lost(folder, job), time.time()
    )


def device_hours(story: JobStory) -> float:
    """Devices times hours, over all attempts."""
    return sum(_device_s(story, attempt) for attempt in story.attempts) / 3600


def cost(story: JobStory) -> tuple[float, float]:
    """(money, kWh) by the devices' price an hour and power; 0 where they are not set."""
    money = energy = 0.0
    for attempt in story.attempts:
        hours = _held_s(story, attempt) / 3600
        for name in attempt["devices"]:
            device = story.devices.get(name, {})
            money += hours * device.get("price_per_hour", 0.0)
            energy += hours * device.get("power_w", 0.0) / 1000
    return money, energy


def as_table(story: JobStory) -> dict[str, Any]:
    """Plain values for JSON; variables are left out, they may be secrets."""
    money, energy = cost(story)
    return {
        "job": dict(story.job),
        "spec": dict(story.spec),
        "program": {name: value for name, value in story.program.items() if name != "environment"},
        "attempts": [dict(attempt) for attempt in story.attempts],
        "lost_work": {str(attempt): work for attempt, work in story.lost.items()},
        "device_hours": device_hours(story),
        "cost": money,
        "energy_kwh": energy,
        "run": str(run_folder(story) or ""),
    }


def job_text(story: JobStory) -> str:
    """The story for people."""
    rows = [[name, value] for name, value in _facts(story) if value]
    parts = [_head(story), "\n".join(aligned(rows)), _attempts(story)]
    return "\n\n".join(part for part in parts if part)


def run_folder(story: JobStory) -> Path | None:
    """Where the job's own run wrote its records: what its command names, else the newest run of its time below ``runs``."""
    from evenload.records.reader import is_run

    command, place = list(story.program.get("command", ())), _place(story)
    if not place:
        return None
    for index, word in enumerate(command[:-1]):
        if word == "--project-dir":
            folder = Path(place) / command[index + 1]
            return folder if is_run(folder) else None
    began_s = story.job.get("first_began_s")
    runs = Path(place) / "runs"
    if began_s is None or not runs.is_dir():
        return None
    until_s = story.job["since_s"] + _SETTLES_S if story.job["state"] in _ENDED else story.now_s + 1
    found = [(run.stat().st_mtime, run) for run in runs.iterdir() if is_run(run) and run.stat().st_mtime >= began_s]
    found = [(changed_s, run) for changed_s, run in found if changed_s <= until_s]
    return max(found)[1] if len(found) == 1 else None


def _place(story: JobStory) -> str:
    return str(story.program.get("snapshot") or story.program.get("folder") or "")


def _head(story: JobStory) -> str:
    job = story.job
    name = f" ({clean(job['name'])})" if job["name"] else ""
    state = JobState(job["state"])
    told = f"job {job['id']}{name} of {job['user']}: {state.lower()}"
    if state in ENDED:
        told += f" {span(story.now_s - job['since_s'])} ago"
    elif state is JobState.PENDING:
        told += f" for {span(story.now_s - job['since_s'])}"
        if job.get("start_s") is not None:
            told += f", starts in about {span(job['start_s'] - story.now_s)}"
    if job.get("eta_s") is not None and state not in ENDED:
        told += f", done in about {span(job['eta_s'] - story.now_s)}"
    return f"{told}{': ' + clean(job['reason']) if job['reason'] else ''}"


def _facts(story: JobStory) -> Iterator[tuple[str, str]]:
    job, program = story.job, story.program
    yield "command", clean(shlex.join(program.get("command", ())))
    yield "folder", clean(str(program.get("folder", "")))
    yield "snapshot", _snapshot(program)
    yield "asked for", _asked(job, story.spec)
    yield "memory", f"{gigabytes(job['peak_bytes'])} of its device at most" if job.get("peak_bytes") else ""
    yield "shares with", f"job {', '.join(job['shares'])}" if job.get("shares") else ""
    speed = f", {job['rate_per_s']:.3g}/s" if job["rate_per_s"] else ""
    yield "progress", f"{progress(job)}{speed}" if progress(job) else ""
    yield "submitted", moment(job["submitted_s"])
    end_s = job["since_s"] if job["state"] in _ENDED else story.now_s
    waited_s = max(0.0, end_s - job["submitted_s"] - job["held_s"])
    yield "waited", f"{span(waited_s)} in all" if waited_s >= 1 else "not at all"
    yield "used", _used(story)
    if story.lost:
        steps = sum(story.lost.values())
        yield "lost work", f"{steps:g} steps by {len([w for w in story.lost.values() if w])} of {len(story.lost)} stops"
    yield "output", f"{job['log']} (evenload logs {job['id']})" if job.get("log") else ""
    run = run_folder(story)
    yield "run", f"{run} (evenload show {shlex.quote(str(run))})" if run is not None else ""


def _snapshot(program: Mapping[str, Any]) -> str:
    folder = program.get("snapshot")
    if not folder:
        return ""
    from evenload.scheduler.snapshots import new_files

    made = new_files(str(folder), limit=6)
    more = (
        f"; files the job made there: {', '.join(map(clean, made[:5]))}{', ...' if len(made) > 5 else ''}"
        if made
        else ""
    )
    return f"{folder}{more}"


def _asked(job: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
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
        parts.append("may share it")
    return ", ".join(parts)


def _used(story: JobStory) -> str:
    if not story.attempts:
        return ""
    told = f"{span(story.job['held_s'])} on devices, {device_hours(story):.3g} device-hours"
    money, energy = cost(story)
    return f"{told}{f', cost {money:.2f}' if money else ''}{f', {energy:.3g} kWh' if energy else ''}"


def _attempts(story: JobStory) -> str:
    if not story.attempts:
        return ""
    rows = [["attempt", "began", "for", "devices", "ended"]]
    for attempt in story.attempts:
        names = [clean(str(story.devices.get(name, {}).get("label", name))) for name in attempt["devices"]]
        how = "goes on" if attempt["ended_s"] is None else _ENDINGS.get(attempt["ending"], attempt["ending"])
        why = f": {clean(attempt['reason'])}" if attempt["reason"] else ""
        lost = story.lost.get(attempt["attempt"])
        again = f"; {lost:g} steps were done again" if lost else ""
        rows.append(
            [
                str(attempt["attempt"]), moment(attempt["began_s"]), span(_held_s(story, attempt)), short_list(names),
                f"{how}{why}{again}",
            ]
        )  # fmt: skip
    return "\n".join(aligned(rows))


def _held_s(story: JobStory, attempt: Mapping[str, Any]) -> float:
    end_s = attempt["ended_s"]
    return float(max(0.0, (story.now_s if end_s is None else end_s) - attempt["began_s"]))


def _device_s(story: JobStory, attempt: Mapping[str, Any]) -> float:
    return _held_s(story, attempt) * len(attempt["devices"])


def _lost(folder: Path, job: str) -> dict[int, float]:
    """Attempt → work reported in it beyond where the next one went on."""
    if not os.access(folder / "queue.sqlite", os.R_OK):
        return {}
    from evenload.scheduler.store.reader import Reader

    lost: dict[int, float] = {}
    attempt, done, is_first = 0, 0.0, True
    with Reader(folder) as reader:
        for told in reader.log(job=job):
            entry = told.entry
            if isinstance(entry, events.Placed):
                attempt, is_first = entry.attempt, True
            elif isinstance(entry, events.Yielded) and attempt:
                lost.setdefault(attempt, 0.0)
            elif isinstance(entry, events.Reported):
                if is_first and attempt > 1:
                    lost[attempt - 1] = max(0.0, done - entry.done)
                done, is_first = entry.done, False
    return lost


def _stored(folder: Path, job: str) -> dict[str, Any]:
    """What the queue's file tells, in the daemon's form."""
    if not os.access(folder / "queue.sqlite", os.R_OK):
        raise QueueError(f"there is no queue in {folder} that can be read")
    from evenload.scheduler.store.reader import Reader

    with Reader(folder) as reader:
        found = reader.job(job)
        if found is None:
            raise QueueError(f"there is no job {job} in the queue {folder}; evenload ps --all lists all")
        attempts = [
            {
                "attempt": attempt.fence.attempt,
                "devices": list(attempt.devices),
                "began_s": attempt.began_s,
                "ended_s": attempt.ended_s,
                "ending": attempt.ending,
                "reason": attempt.reason,
            }
            for attempt in reader.attempts(job)
        ]
        program = reader.program(job) or {}
    from evenload.scheduler.paths import log_path

    spec = events.as_row(events.Submitted(0.0, "", found.spec))["spec"]
    row = {
        "id": found.id, "user": found.spec.user, "name": found.spec.name, "state": str(found.state),
        "priority": found.spec.priority, "min_devices": found.spec.needs.min_devices,
        "max_devices": found.spec.needs.max_devices, "kinds": list(found.spec.needs.kinds),
        "devices": list(found.devices), "submitted_s": found.submitted_s, "since_s": found.since_s,
        "first_began_s": found.first_began_s, "held_s": found.held_until(time.time()), "attempt": found.attempt,
        "done": found.done, "total": found.total, "rate_per_s": found.rate_per_s, "reason": found.reason,
        "array": found.spec.array, "is_held": found.is_held, "shares": [], "peak_bytes": found.peak_bytes,
        "log": str(log_path(folder, found.id)),
    }  # fmt: skip
    return {"job": row, "spec": spec, "program": program, "attempts": attempts}
