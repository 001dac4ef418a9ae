"""Events of a run that cost time or changed its devices: their group, reason, ranks and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenload.records.values import RunEvent

GROUPS = {
    "death": "Lost devices and processes",
    "stall": "Stalls",
    "memory": "Out of memory",
    "repeated": "Steps computed again",
    "fallback": "Failed saves and fallbacks",
    "recovery": "Recovery",
    "leave": "Devices that left",
    "join": "Devices that joined",
    "skipped": "Steps skipped or attempted twice",
    "slow": "Slow steps without an event",
    "save": "Saves",
    "pause": "Stops and pauses between sessions",
    "cost": "Other events with a cost",
}
"""Groups of incidents and their titles, the gravest first. ``cost`` holds kinds that are unknown here and name seconds."""
QUIET = frozenset({"save", "join", "pause"})
"""Groups that are no loss by themselves."""
_STEMS = {
    "fallback": ("fallback", "torn", "untidy", "damaged", "not_saved", "save_failed", "checkpoint_failed", "unsaved"),
    "stall": ("stall", "deadline", "hung", "unresponsive"),
    "memory": ("memory", "oom"),
    "death": ("lost", "dead", "death", "died", "dies", "kill", "crash", "failed", "cut", "unreachable"),
    "repeated": ("redone", "repeated"),
    "recovery": ("rebuil", "recover", "restart", "caught_up", "catch_up", "membership", "generation"),
    "leave": ("left", "leave", "removed", "stays"),
    "join": ("join", "return", "admit", "added", "came_back"),
    "skipped": ("skipped", "late_gradient"),
    "save": ("checkpoint", "save"),
    "pause": ("stopped",),
}
"""By group, the beginnings of the kinds, or of the words in them, that belong to it; the first match counts."""
_SECONDS = (
    "held_s",
    "seconds",
    "lost_s",
    "took_s",
    "stalled_s",
    "recovery_s",
    "rebuild_s",
    "pause_s",
    "write_s",
    "silent_s",
)
"""Fields that hold what an event cost, the first that is there counts: a save in the background held training for less."""


@dataclass(frozen=True)
class Incident:
    """One event that cost time or changed the devices, placed on the time axis of the page."""

    kind: str
    """As recorded."""
    group: str
    """A key of `GROUPS`."""
    message: str
    """With the reason."""
    who: str
    """Rank, device or host; empty if the event names none."""
    step: int | None
    at_s: float
    """On the axis of `RunHistory`."""
    seconds: float | None
    """None if it is unknown."""
    measured: bool = True
    """False: the seconds are the time by which the step at that moment was longer than usual."""


def group_of(event: RunEvent) -> str | None:
    """Return the group of an event; None for a decision or a note."""
    kind = event.kind.lower()
    if kind in ("open", "close"):
        return None
    for group, stems in _STEMS.items():
        if any(kind.startswith(stem) or f"_{stem}" in kind for stem in stems):
            return group
    return "cost" if cost_s(event.fields) is not None else None


def incident_of(event: RunEvent, group: str, at_s: float) -> Incident:
    reason = str(event.fields.get("reason") or event.fields.get("cause") or "")
    message = event.message or event.kind.replace("_", " ")
    if reason and reason not in message:
        message = f"{message}: {reason}"
    if "held_s" in event.fields and isinstance(written_s := event.fields.get("seconds"), int | float):
        message += f", written in {written_s:.3g} s beside the training"
    return Incident(event.kind, group, message, _who(event.fields), event.step, at_s, cost_s(event.fields))


def cost_s(fields: Mapping[str, Any]) -> float | None:
    """Return the seconds that an event says it cost."""
    for name in _SECONDS:
        value = fields.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
            return float(value)
    return None


def _who(fields: Mapping[str, Any]) -> str:
    parts = []
    for name in ("rank", "ranks"):
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            parts.append(f"rank {value}")
        elif isinstance(value, list | tuple) and value:
            parts.append(f"rank {', '.join(map(str, value))}")
    parts += [str(fields[name]) for name in ("device", "worker", "host") if isinstance(fields.get(name), str)]
    return ", ".join(dict.fromkeys(parts))
