"""Values as text for the tables, and back; and whether an entry holds what its fields are declared to hold.

The core's own rows (`core.events.as_row`) carry whatever the core can carry; the rest of a `Job` is plain.
"""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache
from typing import Any

from evenload.errors import QueueError
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Device, Job, Limits, Reservation, Settings
from evenload.scheduler.store.ledger import Entry, RunnerStarted

_LARGEST_INT = 2**63 - 1
_RUNNER_STARTED = RunnerStarted.__name__


def text_of(row: Any, what: str) -> str:
    """JSON of plain values.

    Raises:
        QueueError: JSON or SQLite has no way to write it.
    """
    try:
        text = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise QueueError(f"{what} can't be stored: {error}") from error
    return text


def entry_row(entry: Entry) -> dict[str, Any]:
    """An entry as plain values, its kind left out.

    Raises:
        QueueError: a field holds what it isn't declared to hold, or a number that isn't one.
    """
    if isinstance(entry, RunnerStarted):
        _check_scalar("time_s", "float", entry.time_s)
        return {"time_s": entry.time_s, "job": entry.job, "attempt": entry.attempt, "facts": dict(entry.facts)}
    check(entry)
    return {name: value for name, value in events.as_row(entry).items() if name != "kind"}


def entry_from(kind: str, body: str) -> Entry:
    """The entry that `entry_row` made the text of."""
    row = json.loads(body)
    return RunnerStarted(**row) if kind == _RUNNER_STARTED else events.from_row({"kind": kind, **row})


def check(value: Any) -> None:
    """Whether the fields of a frozen value, and of those inside, hold what they are declared to hold.

    What comes from a socket may hold anything, and would only be found out when a whole batch is written.

    Raises:
        QueueError: naming the field.
    """
    for name, written, _ in _fields(value.__class__):
        part = getattr(value, name)
        if dataclasses.is_dataclass(part):
            check(part)
        elif isinstance(part, tuple | frozenset):
            inner = written.partition("[")[2].removesuffix("]").partition(",")[0].partition(" ")[0]
            for element in part:
                if dataclasses.is_dataclass(element):
                    check(element)
                else:
                    _check_scalar(name, inner, element)
        else:
            _check_scalar(name, written, part, may_be_infinite=isinstance(value, Settings))


def _check_scalar(name: str, written: str, value: Any, *, may_be_infinite: bool = False) -> None:
    kind = written.removesuffix(" | None")
    fits = {
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST_INT,
        "float": isinstance(value, int | float)
        and not isinstance(value, bool)
        and (math.isfinite(value) or (may_be_infinite and not math.isnan(value))),
        "JobState": isinstance(value, JobState),
    }.get(kind, False)
    if not fits and not (value is None and written.endswith("None")):
        raise QueueError(f"{name}={value!r:.100}: expected {written}")


@cache
def _fields(kind: type[Any]) -> tuple[tuple[str, str, Any], ...]:
    return tuple(
        (f.name, str(f.type), f.default if f.default_factory is dataclasses.MISSING else f.default_factory())
        for f in dataclasses.fields(kind)
    )


def job_text(job: Job) -> str:
    """All of a job; what has its default is left out."""
    row = {name: getattr(job, name) for name, _, default in _fields(Job) if getattr(job, name) != default}
    return text_of({**row, "spec": _part(events.Submitted(0.0, "", job.spec), "spec")}, f"job {job.id}")


def job_from(text: str) -> Job:
    """The job that `job_text` was made of."""
    row = json.loads(text)
    for name, written, _ in _fields(Job):
        if name not in row:
            continue
        if name == "spec":
            row[name] = _part_from("Submitted", "spec", row[name], job="")
        elif "JobState" in written:
            row[name] = JobState(row[name])
        elif isinstance(row[name], list):
            row[name] = tuple(row[name])
    return Job(**row)


def device_text(device: Device) -> str:
    """A device as text."""
    return text_of(_part(events.DeviceAdded(0.0, device), "device"), f"device {device.id}")


def device_from(text: str) -> Device:
    """The device of a text."""
    device: Device = _part_from("DeviceAdded", "device", json.loads(text))
    return device


def limits_text(limits: Limits) -> str:
    """A user's limits as text."""
    return text_of(_part(events.LimitsSet(0.0, "", limits), "limits"), "limits")


def limits_from(text: str) -> Limits:
    """The limits of a text."""
    limits: Limits = _part_from("LimitsSet", "limits", json.loads(text), user="")
    return limits


def reservation_text(reservation: Reservation) -> str:
    """A reservation as text."""
    return text_of(_part(events.ReservationSet(0.0, reservation), "reservation"), f"reservation {reservation.id}")


def reservation_from(text: str) -> Reservation:
    """The reservation of a text."""
    reservation: Reservation = _part_from("ReservationSet", "reservation", json.loads(text))
    return reservation


def settings_text(settings: Settings) -> str:
    """The settings as text."""
    return text_of(_part(events.SettingsSet(0.0, settings), "settings"), "settings")


def settings_from(text: str) -> Settings:
    """The settings of a text."""
    settings: Settings = _part_from("SettingsSet", "settings", json.loads(text))
    return settings


def _part(event: events.Event, name: str) -> Any:
    """A value inside an event, as the core's rows write it."""
    return events.as_row(event)[name]


def _part_from(kind: str, name: str, part: Any, **rest: Any) -> Any:
    """The value that `_part` was made of."""
    return getattr(events.from_row({"kind": kind, "time_s": 0.0, name: part, **rest}), name)
