"""The page of a run for a browser: the answer first, then the timeline, what was lost to what, and the details."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from html import escape
from pathlib import Path

from evenload.records.checkpoints import list_checkpoints
from evenload.records.console import format_number, format_percent, format_seconds
from evenload.records.reader import RecordTail
from evenload.records.recorder import CONFIG_FILE
from evenload.records.summary import summarize_steps
from evenload.views.page import card, details, document, legend, table
from evenload.views.run.accounts import COMPUTING, MEANINGS, RunAccounts, account
from evenload.views.run.history import RunHistory
from evenload.views.run.incidents import GROUPS, QUIET, Incident
from evenload.views.run.page_plots import COLOURS_OF, draw_plots
from evenload.views.run.summary import GONE_S, describe_lost_end
from evenload.views.run.summary_text import format_bytes

MAX_BYTES = 1_000_000
_LIMITS = (600, 300, 150, 60, 20)
"""Rows of a table; the next where the page would be larger than `MAX_BYTES`."""
_MAX_TEXT = 700
_QUIET_S = 30.0
"""Without a record for so long, and for 20 usual steps, the page says so."""
_SECRET = re.compile(r"(?im)^(\s*[\w.\"-]*(?:key|token|secret|passw)[\w\"-]*\s*=\s*).+$")


class RunPage:
    """The page of one run folder, read on from its records at each call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.history = RunHistory()
        self._tail = RecordTail(folder)
        self._state = ""

    @property
    def title(self) -> str:
        return f"{self.folder} - Evenload"

    def update(self) -> Mapping[str, str] | None:
        """Read new records; return the sections of the page, or None if nothing changed."""
        changed = self._tail.is_replaced
        if changed:  # by `--fresh`
            self.history, self._tail = RunHistory(), RecordTail(self.folder)
        for record in self._tail.stream():
            self.history.add(record)
            changed = True
        self.history.settle()
        state = _state(self.folder, self.history, time.time())
        if not changed and state == self._state:
            return None
        self._state = state
        return self._fitting()

    def html(self) -> str:
        """Return the whole page of the records so far; it needs no other file."""
        return document(self.title, self.update() or self._fitting())

    def _fitting(self) -> dict[str, str]:
        sections: dict[str, str] = {}
        for limit in _LIMITS:
            sections = sections_of(self.folder, self.history, self._state, limit)
            if sum(len(html.encode()) for html in sections.values()) < MAX_BYTES - 40_000:  # its style and script
                break
        return sections


def sections_of(folder: Path, history: RunHistory, state: str, limit: int) -> dict[str, str]:
    """Return the sections by identifier; tables have at most ``limit`` rows."""
    accounts = account(history)
    return {
        "head": _head(folder, history, state),
        "answer": _answer(history, accounts),
        "lost": _lost(history, accounts),
        "plots": draw_plots(history),
        "incidents": _incidents(history, limit),
        "decisions": _decisions(history, limit),
        "devices": _devices(history),
        "checkpoints": _checkpoints(folder, limit),
        "settings": _settings(folder),
    }


def _state(folder: Path, history: RunHistory, now_s: float) -> str:
    """Return the run's state as HTML; minutes without a record are named, and processes that are gone."""
    silent_s = now_s - history.last_s
    if not folder.is_dir():
        return '<span class="chip bad">its folder was removed</span>'
    if not history.last_s:
        return '<span class="chip end">no records yet</span>'
    if not history.is_open:
        return '<span class="chip end">ended</span>'
    if silent_s > GONE_S and (text := describe_lost_end(folder)):
        return f'<span class="chip bad">{escape(text)}</span>'
    if silent_s > max(_QUIET_S, 20 * (history.usual_step_s or 0.0)):
        minutes = f"{silent_s // 60:.0f} min" if silent_s < 7200 else f"{silent_s // 3600:.0f} h"
        return f'<span class="chip bad">no record for {minutes if silent_s >= 60 else "30 s"}</span>'
    return '<span class="chip run">training</span>'


def _head(folder: Path, history: RunHistory, state: str) -> str:
    facts = []
    if (last := history.last) is not None:
        facts = [
            history.info.position(last),
            f"{history.num_samples:,} samples",
            f"epoch {last.epoch}",
            f"{len(history.present)} device{'s' if len(history.present) > 1 else ''}",
        ]
    facts += [f"{history.num_sessions} sessions"] if history.num_sessions > 1 else []
    facts += [f"{format_seconds(history.bins.end_s)} in sessions"] if history.last_s else []
    if last is not None and history.is_open and (left := history.info.left(last)):
        facts.append(left)
    if history.began_s is not None:
        began, newest = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in (history.began_s, history.last_s)
        )
        facts += [f"began {began}", f"last record {newest}"]
    shown = " ".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return f'<h1>{escape(str(folder))}{state}</h1><p class="facts">{shown}</p>'


def _answer(history: RunHistory, accounts: RunAccounts) -> str:
    if not history.num_steps:
        return '<p class="note">No step was committed yet.</p>'
    cards = [_efficiency(history, accounts), *_comparison(history)]
    if accounts.goodput_per_s is not None and accounts.throughput_per_s is not None:
        note = f"all {format_seconds(history.bins.end_s)} in sessions count; {format_number(accounts.throughput_per_s)} in steps"
        if accounts.goodput is not None:
            note = f"{format_percent(accounts.goodput)} of what the devices would compute alone while they were there; {note}"
        cards.append(card(f"{format_number(accounts.goodput_per_s)} <small>samples/s</small>", "goodput", note))
    lost = 1 - accounts.parts_s[COMPUTING] / (accounts.device_s or 1.0)
    parts = sorted(((s, name) for name, s in accounts.parts_s.items() if name != COMPUTING and s > 0), reverse=True)
    most = ", ".join(f"{name} {_percent(seconds / accounts.device_s)}" for seconds, name in parts[:3])
    cards.append(card(_percent(lost), "device time not computing", f"to {most}" if most else "nothing lost"))
    if history.last is not None:
        best = f"lowest {format_number(history.best_loss)} (step {history.best_step}), first {format_number(history.first_loss)}"
        cards.append(card(format_number(history.last.loss), "loss", best))
    shown = {
        name: seconds for name, seconds in accounts.parts_s.items() if seconds / (accounts.device_s or 1) >= 0.0005
    }
    bar = "".join(
        f'<i style="width:{seconds / accounts.device_s * 100:.2f}%;background:{COLOURS_OF[name]}" title="{name}"></i>'
        for name, seconds in shown.items()
    )
    names = {f"{name} {_percent(seconds / accounts.device_s)}": COLOURS_OF[name] for name, seconds in shown.items()}
    return f'<div class="cards">{"".join(cards)}</div><div class="bar">{bar}</div>{legend(names)}'


def _efficiency(history: RunHistory, accounts: RunAccounts) -> str:
    recent = [step for step in history.recent if len(step.ranks) == len(history.recent[-1].ranks)]
    late = summarize_steps(recent, history.info.solo_per_s) if recent else None  # none yet in this session
    if accounts.efficiency is not None:
        total = sum(device.solo_per_s or 0.0 for device in history.devices.values())
        note = f"of {format_number(total)} samples/s, the sum of the solo speeds"
        note += (
            f"; {format_percent(late.efficiency)} in the last {len(recent)} steps"
            if late is not None and late.efficiency is not None
            else ""
        )
        return card(_percent(accounts.efficiency), "efficiency", note, "main")
    note = "of a step, a device computes or reads its samples itself; " + (
        f"{format_percent(late.busy)} in the last {len(recent)} steps. " if late is not None and late.busy else ""
    )
    note += "The efficiency is unknown: the solo speeds were not measured"
    return card(_percent(accounts.busy or 0.0), "busy", note, "main")


def _comparison(history: RunHistory) -> list[str]:
    """Compare with equal shares, the best fixed split and the best device: measured, or as the cost model expects."""
    found = history.measurement
    if found is not None and (found.over_best_static or found.over_even):
        rows = [
            (found.over_even, "equal shares"),
            (found.over_best_static, f"the best fixed split ({(found.best_static or '').removeprefix('static:')})"),
            (found.over_best_alone, "the best device alone"),
        ]
        texts = [f"{ratio.value:.2f}× {name} ({ratio.low:.2f} to {ratio.high:.2f})" for ratio, name in rows if ratio]
        if found.efficiency is not None:
            texts.append(f"{format_percent(found.efficiency.value)} of the sum")
        best, name = next((ratio, name.split(" (")[0]) for ratio, name in (rows[1], rows[0]) if ratio is not None)
        value = f"{best.value:.2f}<small>× {name}</small>"
        return [card(value, f"measured in {found.num_rounds} rounds", "; ".join(texts))]
    if history.expected is not None:
        fields = history.expected.fields
        alone = f"; {fields['over_best_alone']:.2f}× the best device alone" if fields.get("over_best_alone") else ""
        note = f"expected at step {history.expected.step} by the cost model{alone}"
        return [card(f"{fields['over_equal']:.2f}<small>× equal shares</small>", "speed-up", note)]
    return []


def _lost(history: RunHistory, accounts: RunAccounts) -> str:
    if not history.num_steps:
        return ""
    rows = []
    for name in sorted(MEANINGS, key=lambda part: -accounts.parts_s[part]):
        seconds = accounts.parts_s[name]
        fraction = seconds / (accounts.device_s or 1.0)
        if name == COMPUTING or fraction < 0.0005:
            continue
        device, most = accounts.worst[name]
        who = escape(_label(device.name, device.rank)) + f" {_percent(most)}" if len(history.devices) > 1 else ""
        meter = f'<span class="meter"><i style="width:{min(1.0, most) * 100:.1f}%;background:{COLOURS_OF[name]}"></i></span>'
        what = f'{name}<br><span class="soft">{MEANINGS[name]}</span>'
        rows.append([what, f"{format_seconds(seconds)}", _percent(fraction), who + meter])
    head = ["time lost to", "device time", "of all", "most on"]
    left = f'<div class="panel"><h2>Where the time went</h2>{table(head, rows, (1, 2))}</div>' if rows else ""
    counts = Counter(found.group for found in history.incidents)
    causes = []
    for group in GROUPS:
        if counts[group]:
            known = [found.seconds for found in history.incidents if found.group == group and found.seconds is not None]
            last = next(found for found in reversed(history.incidents) if found.group == group)
            text = f'{GROUPS[group]}<br><span class="soft">last: {escape(_short(last.message, 160))}</span>'
            causes.append([text, str(counts[group]), _seconds(sum(known)) if known else "-"])
    nothing = '<p class="note">No device was lost, none stalled, left or joined.</p>'
    happened = table(["event", "times", "seconds"], causes, (1, 2)) if causes else nothing
    right = f'<div class="panel"><h2>What happened</h2>{happened}</div>'
    return f'<div class="two">{left}{right}</div>'


def _incidents(history: RunHistory, limit: int) -> str:
    if not history.incidents:
        return ""
    by_group: dict[str, list[Incident]] = {group: [] for group in GROUPS}
    for found in history.incidents:
        by_group[found.group].append(found)
    grave = [found for group, members in by_group.items() if group not in QUIET for found in members]
    grave = sorted(grave, key=lambda found: found.seconds or 0.0)[-limit:]  # the costliest, if not all
    quiet = [found for group in QUIET for found in by_group[group]]
    quiet = sorted(quiet, key=lambda found: found.at_s)[-max(20, limit // 4) :]
    shown = sorted([*grave, *quiet], key=lambda found: found.at_s)
    rows = [
        [
            format_seconds(found.at_s),
            "" if found.step is None else str(found.step),
            f'<span class="tag {found.group}">{escape(found.kind)}</span>',
            escape(found.who),
            "" if found.seconds is None else ("" if found.measured else "≈ ") + _seconds(found.seconds),
            escape(_short(found.message, _MAX_TEXT)),
        ]
        for found in shown
    ]
    left = len(history.incidents) - len(shown)
    note = "Losses, and changes of the devices, each with its reason. ≈: by how much the step was longer than usual."
    note += f" {left:,} more are left out here: the cheapest losses, and the oldest saves and joins." if left else ""
    body = table(["at", "step", "event", "on", "seconds", "reason"], rows, (0, 1, 4), "lines")
    return f'<h2>Losses and changes</h2><p class="note">{note}</p><div class="panel">{body}</div>'


def _decisions(history: RunHistory, limit: int) -> str:
    taken = {(found.kind, found.at_s) for found in history.incidents}
    found = [(at_s, event) for at_s, event in history.events if (event.kind, at_s) not in taken]
    if not found:
        return ""
    rows = [
        [
            format_seconds(at_s),
            "" if event.step is None else str(event.step),
            f'<span class="tag">{escape(event.kind)}</span>',
            escape(_short(event.message, 3 * _MAX_TEXT)),
        ]
        for at_s, event in found[-limit:]
    ]
    title = (
        f"Decisions and notes ({len(found):,})"
        if len(found) <= limit
        else f"The last {limit} of {len(found):,} decisions"
    )
    body = table(["at", "step", "event", "message"], rows, (0, 1), "lines")
    return details("all-decisions", title, f'<div class="panel">{body}</div>')


def _devices(history: RunHistory) -> str:
    if not history.devices:
        return ""
    has_solo = any(device.solo_per_s for device in history.devices.values())
    rows = []
    for key, device in history.devices.items():
        busy = device.busy_s / device.in_steps_s if device.in_steps_s else 0.0
        rows.append(
            [
                escape(_label(device.name, device.rank)),
                "" if key in history.present else "gone",
                str(device.share),
                f"{device.num_samples:,}",
                _percent(min(1.0, busy)),
                format_seconds(device.alive_s),
                *([format_number(device.solo_per_s) if device.solo_per_s else "-"] if has_solo else []),
                format_bytes(device.memory_bytes) if device.memory_bytes else "-",
            ]
        )
    head = [
        "device",
        "",
        "share",
        "samples",
        "busy",
        "in sessions",
        *(["solo samples/s"] if has_solo else []),
        "peak memory",
    ]
    title = "Devices"
    if history.last is not None and history.last.spread is not None:
        title += ": the records hold the seconds of each rank in every tenth step; those between are in proportion"
    return details(
        "all-devices", title, f'<div class="panel">{table(head, rows, range(2, len(head)))}</div>', len(rows) <= 16
    )


def _checkpoints(folder: Path, limit: int) -> str:
    found = list_checkpoints(folder)
    if not found:
        return ""
    rows = [
        [
            str(info.step),
            "-" if info.epoch is None else str(info.epoch),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.time)),
            format_bytes(info.size_bytes),
            f"{escape(info.metric)} {format_number(info.value)}" if info.value is not None else "",
            f"DAMAGED: {escape(info.damage)}"
            if info.damage
            else ", ".join(word for word, holds in (("best", info.is_best), ("last", info.is_last)) if holds),
        ]
        for info in found[-limit:]
    ]
    body = table(["step", "epoch", "written", "size", "metric", ""], rows, (0, 1, 3))
    return details("all-checkpoints", f"Checkpoints ({len(found)})", f'<div class="panel">{body}</div>', True)


def _settings(folder: Path) -> str:
    try:
        text = (folder / CONFIG_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    text = _SECRET.sub(r'\1"(not shown)"', text)[:20_000]
    return details("all-settings", "Settings", f'<div class="panel"><pre>{escape(text)}</pre></div>')


def _label(name: str, rank: int) -> str:
    return f"rank {rank}" + (f", {name}" if name and name != f"rank {rank}" else "")


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.1f} %" if abs(fraction) < 0.0995 else format_percent(fraction)


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return format_seconds(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
