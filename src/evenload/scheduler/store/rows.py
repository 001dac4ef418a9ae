"""Conversion of the queue's values to text for the tables, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from evenload.errors import ConfigError, QueueError
from evenload.scheduler import validation
from evenload.scheduler.store.event_rows import from_row
from evenload.scheduler.store.ledger import Entry, ProgramStarted, RunnerStarted
from evenload.stored_names import REMOVED_SETTINGS

_T = TypeVar("_T")


def text_of(row: Any, what: str) -> str:
    """Return plain values as JSON; `QueueError` if JSON or SQLite has no way to write them."""
    try:
        text = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise QueueError(f"{what} can't be stored: {error}") from error
    return text


_LIKE = "like"
"""Field of a stored program that names a job submitted with it: the other fields are those that differ from that one's."""


def program_like(name: str, first: Mapping[str, Any], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a program's row as its difference from another job's, so that an array's variables are stored once."""
    variables, known = row.get("environment", {}), first.get("environment", {})
    if known.keys() - variables.keys() or first.keys() - row.keys():
        return row
    changed = {field: value for field, value in row.items() if field not in first or first[field] != value}
    if "environment" in changed:
        changed["environment"] = {key: value for key, value in variables.items() if known.get(key) != value}
    return {_LIKE: name, **changed}


def whole_program(row: dict[str, Any], read: Callable[[str], dict[str, Any] | None]) -> dict[str, Any]:
    """Return the whole row of a program; `read` returns another job's."""
    name = row.pop(_LIKE, None)
    first = None if name is None else read(name)
    if first is None:
        return row
    environment = {**first.get("environment", {}), **row.get("environment", {})}
    return {**first, **row, "environment": environment}


def entry_row(entry: Entry) -> dict[str, Any]:
    """Return an entry as plain values, without its kind; `QueueError` if a field has the wrong type."""
    try:
        validation.check(entry)
    except ConfigError as error:
        raise QueueError(str(error)) from error
    return validation.plain(entry)


def entry_from(kind: str, body: str) -> Entry:
    row = json.loads(body)
    for own in (RunnerStarted, ProgramStarted):
        if kind == own.__name__:
            return own(**row)
    return from_row({"kind": kind, **row})


def value_text(value: Any) -> str:
    """Return a job, device, reservation, limits or settings as text; what has its default is left out."""
    return text_of(validation.plain(value), type(value).__name__)


def value_from(kind: type[_T], text: str) -> _T:
    """Return the value that `value_text` made the text of; `QueueError` if another program damaged it."""
    try:
        values = {name: value for name, value in json.loads(text).items() if name not in REMOVED_SETTINGS}
        return validation.build(kind, values, kind.__name__)
    except ConfigError as error:
        raise QueueError(str(error)) from error
