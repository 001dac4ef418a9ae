"""Events of a queue as plain values of JSON, and back, under the names that logs have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler import validation
from evenload.scheduler.core import events
from evenload.stored_names import REMOVED_SETTINGS, STORED_EVENTS


def stored_kind(kind: type[Any]) -> str:
    """Return the name under which logs store this kind of event."""
    return STORED_EVENTS.get(kind.__name__, kind.__name__)


_BASES = (events.QueueEvent, events.JobEvent)
KINDS: dict[str, type[events.QueueEvent]] = {
    stored_kind(kind): kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, events.QueueEvent) and kind not in _BASES
}
"""Stored name → class, of all kinds of events."""


def as_row(event: events.QueueEvent) -> dict[str, Any]:
    """Return the event as plain values of JSON, with its kind; what has its default is left out."""
    return {"kind": stored_kind(type(event)), **validation.plain(event)}


def from_row(row: Mapping[str, Any]) -> events.QueueEvent:
    """Return the event of a row that `as_row` made; `QueueError` for an unknown kind, or a field that doesn't fit."""
    kind = KINDS.get(str(row.get("kind")))
    if kind is None:
        raise QueueError(f"an event of kind {row.get('kind')!r}: this version knows {', '.join(KINDS)}")
    values = {name: value for name, value in row.items() if name != "kind"}
    if kind is events.SettingsSet and isinstance(settings := values.get("settings"), Mapping):
        values["settings"] = {name: value for name, value in settings.items() if name not in REMOVED_SETTINGS}
    try:
        return validation.build(kind, values, "")
    except ConfigError as error:
        raise QueueError(f"event {row['kind']}: {error}") from error
