"""Audit of a queue: its tables must follow from its log."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenload.scheduler.store.schema import check_version
from evenload.scheduler.store.tables import History, fold_history, read_history
from evenload.scheduler.store.writer import DATABASE


def audit(folder: Path) -> list[str]:
    """Fold the whole log of a queue; return the differences from the tables, and the errors that SQLite finds in the file."""
    connection = sqlite3.connect(f"{(folder / DATABASE).absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    try:
        check_version(connection)
        connection.execute("BEGIN")  # log and tables of one moment
        broken = [row[0] for row in connection.execute("PRAGMA integrity_check") if row[0] != "ok"]
        return broken + _differences(_parts(fold_history(connection)), _parts(read_history(connection)))
    finally:
        connection.close()


def _parts(history: History) -> dict[str, Mapping[Any, Any]]:
    """Return the history as mappings, with the order of ordered parts."""
    queue_state, ledger = history.ledger.queue_state, history.ledger
    ordered: dict[str, Mapping[Any, Any]] = {
        "jobs": queue_state.jobs,
        "devices": queue_state.devices,
        "users": queue_state.users,
        "reservations": queue_state.reservations,
    }
    return {
        **ordered,
        **{f"the order of {name}": dict(enumerate(part)) for name, part in ordered.items()},
        "outcomes": queue_state.outcomes,
        "closed devices": queue_state.closed,
        "holders": queue_state.holder,
        "jobs that wait for another": _waiting(history),
        "queue": {"settings": queue_state.settings, "time": queue_state.time_s, "last event": ledger.last},
        "attempts under way": ledger.open,
        "jobs ever": history.changes.jobs,
        "attempts ever": history.changes.attempts,
        "programs": history.programs,
    }


def _waiting(history: History) -> dict[str, list[str]]:
    """Job → those that still wait for it; the queue's state may remember some that have ended since."""
    queue_state = history.ledger.queue_state
    waiting = {
        name: [other for other in others if other in queue_state.jobs]
        for name, others in queue_state.dependents.items()
    }
    return {name: others for name, others in waiting.items() if others}


def _differences(folded: Mapping[str, Mapping[Any, Any]], stored: Mapping[str, Mapping[Any, Any]]) -> list[str]:
    nothing = object()
    return [
        f"{part}, {name}: the log says {folded[part].get(name, 'nothing')}, the tables {stored[part].get(name, 'nothing')}"
        for part in folded
        for name in {**folded[part], **stored[part]}
        if folded[part].get(name, nothing) != stored[part].get(name, nothing)
    ]
