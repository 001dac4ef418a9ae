"""The page of a queue for a browser: devices over time, running and waiting jobs with their reasons, users, history."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from evenload.errors import QueueError
from evenload.scheduler.core.states import JobState
from evenload.scheduler.job_lookup import has_readable_file
from evenload.scheduler.store.reader import AttemptLine, Reader
from evenload.views.page import TimeAxis, card, figure, legend, table
from evenload.views.queue.text import STATES, TextTable, clean, head, moment, notes, span, tables
from evenload.views.queue.view import JobFilter, QueueView, view_of

WINDOW_S = 86_400.0
_LEAST_WINDOW_S = 600.0
_MAX_ATTEMPTS = 2000
_MAX_HISTORY = 100
_MAX_DEVICES = 128
_MANY_DEVICES = 12
_WIDTH = 1000.0
_PALETTE = tuple(f"var(--c{index})" for index in range(8))
_NUMBERS = frozenset(("job", "memory", "speed", "left", "position", "priority", "took", "device-hours", "attempt"))


class QueuePage:
    """The page of one queue, read anew at each call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shown: Mapping[str, str] | None = None

    @property
    def title(self) -> str:
        return f"Queue {self.folder} - Evenload"

    def update(self) -> Mapping[str, str] | None:
        """Return the sections of the page; None if they are those of the last call."""
        try:
            sections = self._sections()
        except QueueError as error:
            sections = {**(self._shown or {}), "notes": f'<p class="chip bad">{escape(str(error))}</p>'}
        if sections == self._shown:
            return None
        self._shown = sections
        return sections

    def _sections(self) -> dict[str, str]:
        view = view_of(self.folder, JobFilter())
        attempts = _attempts(self.folder, view.now_s - WINDOW_S) if has_readable_file(self.folder) else []
        colours = _colours(view, attempts)
        shown = {found.title.partition(",")[0] or "devices": found for found in tables(view)}
        warnings = "".join(f'<p class="note">{escape(note)}</p>' for note in notes(view))
        return {
            "head": f'<h1>{escape(str(view.folder))}</h1><p class="facts">{escape(head(view).partition(" · ")[2])}</p>',
            "notes": warnings,
            "answer": _cards(view, attempts),
            "plots": _devices_over_time(view, attempts, colours),
            "running": _table(shown.get("running")),
            "waiting": _table(shown.get("waiting")),
            "users": _users(view, attempts, colours),
            "devices": _table(shown.get("devices")),
            "history": _history(attempts, view.now_s),
        }


def _attempts(folder: Path, since_s: float) -> list[AttemptLine]:
    """Return the attempts that were under way since a time, the newest last, their times by the wall clock."""
    with Reader(folder) as reader:
        ahead_s = reader.clock().ahead_s
        found = reader.attempts_since(since_s - ahead_s, _MAX_ATTEMPTS)
    return [
        row._replace(began_s=row.began_s + ahead_s, ended_s=None if row.ended_s is None else row.ended_s + ahead_s)
        for row in reversed(found)
    ]


def _cards(view: QueueView, attempts: Sequence[AttemptLine]) -> str:
    busy = sum(1 for device in view.devices if device["job"])
    waiting = [job for job in view.jobs if job["state"] == "PENDING"]
    cards = []
    if view.devices:
        away = sum(1 for device in view.devices if device["closed"] and not device["job"])
        note = f"{away} closed" if away else "the others are free" if busy < len(view.devices) else "none is free"
        cards.append(card(f"{busy}<small> of {len(view.devices)}</small>", "devices busy", note, "main"))
        since_s, used_s = _since(view, attempts), 0.0
        for row in attempts:
            used_s += len(_ids(row)) * max(0.0, (row.ended_s or view.now_s) - max(since_s, row.began_s))
        whole_s = len(view.devices) * (view.now_s - since_s)
        if attempts and whole_s > 0:
            note = f"of all devices' time in the last {span(view.now_s - since_s)}; shared devices count for each job"
            cards.append(card(f"{used_s / whole_s * 100:.0f} %", "devices held", note))
    oldest = min(waiting, key=lambda job: job["submitted_s"], default=None)
    note = f"job {escape(oldest['id'])} since {span(view.now_s - oldest['submitted_s'])}" if oldest else "nothing waits"
    cards.append(card(f"{view.counts.get('PENDING', 0):,}", "jobs waiting", note))
    users = {job["user"] for job in view.jobs if job["state"] not in ("SUCCEEDED", "FAILED", "CANCELLED")}
    cards.append(card(str(len(users)), "users with jobs", escape(", ".join(sorted(map(clean, users))[:8]))))
    return f'<div class="cards">{"".join(cards)}</div>'


def _devices_over_time(view: QueueView, attempts: Sequence[AttemptLine], colours: Mapping[str, str]) -> str:
    """Draw a row for each device, with the jobs that held it in the colours of their users."""
    if not attempts:
        return ""
    labels = {device["id"]: clean(device["label"]) for device in view.devices}
    gone = {device for row in attempts for device in _ids(row)} - labels.keys()
    labels |= {device: device for device in sorted(gone)}
    since_s = _since(view, attempts)
    axis = TimeAxis(view.now_s - since_s, (view.now_s - since_s) / _WIDTH, began_s=since_s)
    shapes: dict[str, list[str]] = defaultdict(list)
    for row in attempts:
        first = max(0.0, (row.began_s - since_s) / axis.width_s)
        last = ((row.ended_s or view.now_s) - since_s) / axis.width_s
        took = span((row.ended_s or view.now_s) - row.began_s)
        ending = f": {_ending(row)} {row.reason}" if row.ended_s is not None else ", running"
        text = escape(clean(f"job {row.job} {row.name} of {row.user}, {took}{ending}")[:200])
        for device in _ids(row):
            # Half transparent: jobs that share a device show through each other.
            shapes[device].append(
                f'<path d="M{first:.1f} 8H{max(last, first + 0.6):.1f}V92H{first:.1f}z" fill="{colours[row.user]}" '
                f'fill-opacity="0.75" stroke="var(--panel)"><title>{text}</title></path>'
            )
    shown = list(labels)[:_MAX_DEVICES]
    kind = "rank small" if len(shown) > _MANY_DEVICES else "rank"
    rows = [
        figure(escape(labels[device]), shapes[device], axis, kind=kind, has_ticks=index == len(shown) - 1)
        for index, device in enumerate(shown)
    ]
    data = escape(json.dumps({"end": axis.end_s, "width": axis.width_s, "steps": [], "began": since_s}))
    names = {escape(clean(user)): colours[user] for user in dict.fromkeys(row.user for row in attempts)}
    cut = f" Only the newest {_MAX_ATTEMPTS:,} attempts are drawn." if len(attempts) == _MAX_ATTEMPTS else ""
    return (
        f'<div data-axis="{data}"><h2>Devices over time</h2><p class="note">The last {span(axis.end_s)}; a block is an '
        f"attempt of a job, in the colour of its user.{cut} Drag over a row to zoom, double-click to see everything.</p>"
        f'<button id="unzoom">everything</button><div class="panel">{legend(names)}{"".join(rows)}</div></div>'
    )


def _users(view: QueueView, attempts: Sequence[AttemptLine], colours: Mapping[str, str]) -> str:
    """List users by the device-hours that they held in the window, with their jobs."""
    since_s, held_s = _since(view, attempts), defaultdict[str, float](float)
    for row in attempts:
        held_s[row.user] += len(_ids(row)) * max(0.0, (row.ended_s or view.now_s) - max(since_s, row.began_s))
    running, waiting = defaultdict[str, int](int), defaultdict[str, int](int)
    for job in view.jobs:
        if job["state"] == "PENDING":
            waiting[job["user"]] += 1
        elif job["state"] not in ("SUCCEEDED", "FAILED", "CANCELLED"):
            running[job["user"]] += 1
    users = sorted({*held_s, *running, *waiting}, key=lambda user: (-held_s[user], user))
    if not users:
        return ""
    rows = [
        [
            f'<i class="mark" style="background:{colours[user]}"></i> {escape(clean(user))}',
            str(running[user]),
            str(waiting[user]),
            f"{held_s[user] / 3600:.2f}",
        ]
        for user in users
    ]
    head_ = ["user", "running", "waiting", "device-hours"]
    note = f"Device-hours of the last {span(view.now_s - since_s)}."
    return f'<h2>Users</h2><p class="note">{note}</p><div class="panel">{table(head_, rows, (1, 2, 3))}</div>'


def _history(attempts: Sequence[AttemptLine], now_s: float) -> str:
    ended = [row for row in attempts if row.ended_s is not None][-_MAX_HISTORY:]
    if not ended:
        return ""
    rows = [
        [
            escape(row.job),
            escape(clean(row.name)),
            escape(clean(row.user)),
            str(len(_ids(row))),
            moment(row.began_s),
            span((row.ended_s or now_s) - row.began_s),
            f'<span class="tag{" death" if _ending(row) in ("failed", "lost") else ""}">{escape(_ending(row))}</span>',
            escape(clean(row.reason)[:300]),
        ]
        for row in reversed(ended)
    ]
    columns = ["job", "name", "user", "devices", "began", "took", "ending", "reason"]
    return f'<h2>History</h2><div class="panel">{table(columns, rows, (0, 3, 5), "wide")}</div>'


def _table(found: TextTable | None) -> str:
    """Return a table of the terminal's as HTML, without columns that are empty in all rows."""
    if found is None or not found.rows:
        return ""
    kept = [index for index in range(len(found.columns)) if any(row[index] for row in found.rows)]
    columns = [found.columns[index] for index in kept]
    rows = [[escape(row[index]) for index in kept] for row in found.rows]
    numbers = [index for index, name in enumerate(columns) if name in _NUMBERS]
    note = f'<p class="note">{escape(found.note)}</p>' if found.note else ""
    title = (found.title or "devices").capitalize()
    return f'<h2>{title}</h2><div class="panel">{table(columns, rows, numbers, "wide")}{note}</div>'


def _since(view: QueueView, attempts: Sequence[AttemptLine]) -> float:
    """Return where the axis begins: the window, or less in a young queue."""
    first_s = min((row.began_s for row in attempts), default=view.now_s)
    return max(view.now_s - WINDOW_S, min(first_s, view.now_s - _LEAST_WINDOW_S))


def _colours(view: QueueView, attempts: Sequence[AttemptLine]) -> dict[str, str]:
    users = sorted({*(row.user for row in attempts), *(job["user"] for job in view.jobs)})
    return {user: _PALETTE[index % len(_PALETTE)] for index, user in enumerate(users)}


_ENDINGS = {"Yielded": "saved, stopped", "Resized": "went on"}


def _ending(row: AttemptLine) -> str:
    """Name the end of an attempt: that of its job if the attempt was its last."""
    is_last = row.ending == "Ended" and row.state in ("SUCCEEDED", "FAILED", "CANCELLED")
    return STATES[JobState(row.state)] if is_last else _ENDINGS.get(row.ending, row.ending.lower())


def _ids(row: AttemptLine) -> list[str]:
    return list(json.loads(row.devices))
