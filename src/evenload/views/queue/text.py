"""A queue as plain tables; `panel` renders the same tables in colour."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.time_text import span as span
from evenload.views.queue.view import MAX_WAITING, QueueView

STATES = {
    JobState.PENDING: "waiting",
    JobState.STARTING: "starting",
    JobState.RUNNING: "running",
    JobState.RESIZING: "resizing",
    JobState.PREEMPTING: "stopping",
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}
"""State → its name for display."""
_ENDED = {str(state) for state in ENDED}
_FRESH_S = 5.0
"""A daemon that worked so recently is taken to run."""


@dataclass(frozen=True, slots=True)
class TextTable:
    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    note: str = ""
    """Shown below the rows."""


def head(view: QueueView) -> str:
    """Return a one-line summary: devices in use and jobs by state."""
    parts = [f"queue {view.place} ({view.folder})" if view.place else f"queue {view.folder}"]
    if view.is_live:
        busy = sum(1 for row in view.devices if row["job"])
        away = sum(1 for row in view.devices if row["closed"] and not row["job"])
        parts.append(f"{busy} of {len(view.devices)} devices busy{f', {away} closed' if away else ''}")
    counts: dict[str, int] = {}
    for state, num in view.counts.items():
        name = STATES[JobState(state)]
        name = name if name in ("waiting", "succeeded", "failed", "cancelled") else "running"
        counts[name] = counts.get(name, 0) + num
    texts = [
        f"{counts[name]:,} {name}"
        for name in ("running", "waiting", "succeeded", "failed", "cancelled")
        if counts.get(name)
    ]
    whose = "" if view.user is None else f" of user {clean(view.user)}"
    parts.append(f"{', '.join(texts)}{whose}" if texts else f"no jobs{whose} yet")
    return " · ".join(parts)


def notes(view: QueueView) -> list[str]:
    """Return problems and limitations to point out."""
    found = [f"problem: {problem}" for problem in view.problems]
    if not view.is_live:
        found.append(f"{_age(view)}; wait reasons and device usage are not available. evenload queue start starts it")
    return found


def _age(view: QueueView) -> str:
    if view.age_s is None:
        return "the daemon is not running: this is what it recorded last, and jobs may have ended since"
    if view.age_s < _FRESH_S:  # a daemon with so many jobs that the list was read from its file
        return f"read from the queue's file, as of {span(view.age_s)} ago"
    at = moment(view.now_s - view.age_s)
    return (
        f"the daemon is not running: this is the state of {at}, {span(view.age_s)} ago, and jobs may have ended since"
    )


def tables(view: QueueView) -> list[TextTable]:
    """Return the tables of devices, recently ended, running and waiting jobs."""
    names = {row["id"]: row["label"] for row in view.devices}
    running: list[Mapping[str, Any]] = []
    waiting: list[Mapping[str, Any]] = []
    ended: list[Mapping[str, Any]] = []
    for job in view.jobs:
        state = job["state"]
        (ended if state in _ENDED else waiting if state == JobState.PENDING else running).append(job)
    found = []
    if view.devices:
        found.append(_device_table(view))
    if ended:
        rows = [_ended_row(job, view.now_s) for job in ended]
        found.append(TextTable("recently ended", ("job", "name", "user", "state", "when", "took", "why"), rows))
    if running:
        rows = [_running_row(job, view.now_s, names) for job in running]
        columns = ("job", "name", "user", "state", "devices", "progress", "speed", "left", "why")
        found.append(TextTable("running", columns, rows))
    if waiting:
        found.append(_waiting_table(waiting, view))
    return found


def text(view: QueueView) -> Iterable[str]:
    yield head(view)
    yield from notes(view)
    for table in tables(view):
        yield ""
        if table.title:
            yield table.title
        yield from aligned([table.columns, *table.rows])
        if table.note:
            yield table.note


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as aligned lines, without columns that are empty in all rows but the first."""
    if not rows:
        return []
    kept = [index for index in range(len(rows[0])) if len(rows) == 1 or any(row[index] for row in rows[1:])]
    widths = [max(_width(row[index]) for row in rows) for index in kept]
    return [
        "  ".join(
            row[index] + " " * (width - _width(row[index])) for index, width in zip(kept, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def _width(text: str) -> int:
    """Return the columns that a text takes in a terminal: two for a Chinese character, none for an accent of its own."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def listed_lines(view: QueueView) -> Iterable[str]:
    """Return a header and a line for each job, like `full_list.all_lines` for a queue whose file can't be read."""
    rows: list[tuple[str, ...]] = [("job", "name", "user", "state", "devices", "submitted", "progress", "why")]
    for job in view.jobs:
        rows.append(
            (
                job["id"], clean(job["name"]), job["user"], STATES[JobState(job["state"])], _requested(job),
                moment(job["submitted_s"]), progress(job), clean(job["reason"]),
            )
        )  # fmt: skip
    return (f"{line}\n" for line in aligned(rows))


def progress(job: Mapping[str, Any]) -> str:
    """Return `412/1000 41 %`, or the part that is known."""
    done, total = job["done"], job["total"]
    if total:
        return f"{done:g}/{total:g} {100 * min(1.0, done / total):.0f} %"
    return f"{done:g}" if done else ""


def moment(time_s: float) -> str:
    """Return a time as `2026-03-14 15:09`, local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))


def clean(text: str) -> str:
    """Replace control characters, which could move a terminal's cursor: names and reasons come from other users."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def _device_table(view: QueueView) -> TextTable:
    names = {job["id"]: job["name"] for job in view.jobs}
    rows = []
    for device in view.devices:
        memory = f"{device['memory_bytes'] / 1e9:.0f} GB" if device["memory_bytes"] else ""
        kept = [_reserved(row, view.now_s) for row in view.reservations if device["id"] in row["devices"]]
        held = "; ".join((_holder(device, names), *filter(None, kept)))
        rows.append((clean(device["label"]), clean(device["kind"]), memory, held))
    return TextTable("", ("device", "kind", "memory", "held by"), _together(rows))


def _together(rows: Sequence[tuple[str, str, str, str]]) -> list[tuple[str, str, str, str]]:
    """Merge equal idle devices into one row: a machine may have a hundred cores."""
    found: list[tuple[str, str, str, str]] = []
    idle: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        idle.setdefault(row[1:], []).append(row[0])
    for row in rows:
        labels = idle[row[1:]]
        if row[3] != "free" or len(labels) < 3:
            found.append(row)
        elif labels[0] == row[0]:
            found.append((f"{labels[0]} … {labels[-1]}", row[1], row[2], f"{len(labels)} free"))
    return found


def _reserved(row: Mapping[str, Any], now_s: float) -> str:
    if not now_s < row["end_s"] or row["start_s"] > now_s + 86400:
        return ""
    from_ = f"from {moment(row['start_s'])} " if row["start_s"] > now_s else ""
    every = f", every {row['every']}" if row.get("every") else ""
    return f"reserved {from_}for {clean(', '.join(row['users'])) or 'nobody'} until {moment(row['end_s'])}{every}"


def _holder(device: Mapping[str, Any], names: Mapping[str, str]) -> str:
    parts = []
    if jobs := device["jobs"]:
        listed = [f"{job}{f' ({clean(name)})' if (name := names.get(job, '')) else ''}" for job in jobs]
        parts.append(f"job{'s' if len(jobs) > 1 else ''} {', '.join(listed)}")
    if device["excess_bytes"]:
        parts.append(f"the memory is overcommitted by {device['excess_bytes'] / 1e9:.1f} GB")
    for process in device["external"]:
        used = f", {process['used_bytes'] / 1e9:.1f} GB" if process["used_bytes"] else ""
        command = clean(process["command"])[:60]
        parts.append(f"{process['user']}'s {command} (pid {process['pid']}{used}), outside the queue")
    if device["ghost_bytes"]:
        parts.append(f"{device['ghost_bytes'] / 1e9:.1f} GB used by no process")
    if device["closed"] and not device["external"] and not device["ghost_bytes"]:
        parts.append(f"closed: {clean(device['closed'])}")
    return "; ".join(parts) or "free"


def _running_row(job: Mapping[str, Any], now_s: float, names: Mapping[str, str]) -> tuple[str, ...]:
    speed = f"{job['rate_per_s']:.3g}/s" if job["rate_per_s"] else ""
    eta_s = job.get("eta_s")
    if eta_s is None and job["total"] and job["rate_per_s"] and job.get("reported_s"):  # a row of the file
        eta_s = job["reported_s"] + (job["total"] - job["done"]) / job["rate_per_s"]
    devices = [clean(names.get(device, device)) for device in job["devices"]]
    return (
        job["id"], clean(job["name"]), job["user"], STATES[JobState(job["state"])], short_list(devices), progress(job),
        speed, _done_in(job, eta_s, now_s), idle(job, names) or clean(job["reason"])[:120] or _shared(job),
    )  # fmt: skip


def idle(job: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return the devices of a job that have been idle for long, and for how long; empty for none."""
    idle_s: Mapping[str, float] = job.get("idle_s") or {}
    listed = short_list([clean(names.get(device, device)) for device in idle_s])
    return f"idle for {span(min(idle_s.values()))}: {listed}" if idle_s else ""


def _done_in(job: Mapping[str, Any], eta_s: float | None, now_s: float, before: str = "") -> str:
    """Return when a job is expected to end; where that follows from earlier runs, it says so."""
    if eta_s is None:
        return ""
    is_estimate = bool(job.get("estimate_source")) and not (job["total"] and job["rate_per_s"])
    return f"{before}{span(eta_s - now_s)}" + (f" (estimated from {job['estimate_source']})" if is_estimate else "")


def _shared(job: Mapping[str, Any]) -> str:
    parts = []
    if others := job.get("shares"):
        parts.append(f"shares with {', '.join(others)}")
    if job.get("peak_bytes"):
        parts.append(f"uses {gigabytes(job['peak_bytes'])}")
    return ", ".join(parts)


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2g} GB" if num_bytes < 10e9 else f"{num_bytes / 1e9:.0f} GB"


def short_list(names: Sequence[str]) -> str:
    """Return `gpu0,gpu1`, or `gpu0,gpu1,… 8 in total` for a long list."""
    return ",".join(names) if len(names) <= 4 else f"{','.join(names[:2])},… {len(names)} in total"


def _waiting_table(waiting: Sequence[Mapping[str, Any]], view: QueueView) -> TextTable:
    shown = sorted(waiting, key=lambda job: (job.get("position") or math.inf, job["number"]))[:MAX_WAITING]
    rows = []
    for job in shown:
        start_s, eta_s = job.get("start_s"), job.get("eta_s")
        rows.append(
            (
                job["id"], clean(job["name"]), job["user"], str(job["priority"] or ""), str(job.get("position") or ""),
                _requested(job),
                f"in {span(start_s - view.now_s)}" if start_s is not None else "",
                _done_in(job, eta_s, view.now_s, "in "),
                progress(job), clean(job["reason"])[:160],
            )
        )  # fmt: skip
    more = view.counts.get(JobState.PENDING, 0) - len(shown)
    return TextTable(
        "waiting, in the order of the line"
        if any(job.get("position") for job in shown)
        else "waiting, in the order of submission",
        ("job", "name", "user", "priority", "position", "devices", "starts", "done", "progress", "why"),
        rows,
        f"... and {more:,} more (--all lists all jobs)" if more > 0 else "",
    )


def _ended_row(job: Mapping[str, Any], now_s: float) -> tuple[str, ...]:
    took = span(job["held_s"]) if job.get("held_s") else ""
    return (
        job["id"], clean(job["name"]), job["user"], STATES[JobState(job["state"])],
        f"{span(now_s - job['since_s'])} ago", took, clean(job["reason"])[:160],
    )  # fmt: skip


def _requested(job: Mapping[str, Any]) -> str:
    least, most = job["min_devices"], job["max_devices"]
    kinds = "|".join(job.get("kinds") or ())
    return f"{least if least == most else f'{least}:{most}'}{f' {clean(kinds)}' if kinds else ''}"
