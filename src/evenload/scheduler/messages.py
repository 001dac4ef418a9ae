"""Messages between a queue's clients and its daemon: one JSON object per line over a Unix socket.

A request is ``{"v": 2, "verb": VERB, …fields}``, its reply ``{"v": 2, "ok": true, "result": {…}}`` or
``{"v": 2, "ok": false, "error": {"kind": KIND, "message": …}}``, in the order of the requests. The kernel
identifies the caller by the socket's peer credentials; no field of a message does. Times are seconds since 1970.

========== ============================================================ ===============================================
verb       fields                                                       result
========== ============================================================ ===============================================
submit     spec, program; or jobs=[{spec, program}, …], array=bool,     {job}; or {jobs: [id, …]}
           common={spec, program}: fields and variables of all
cancel     jobs, now=false (with a save; true: killed at once)           {jobs: [JobRow, …], killed: [id, …]}
hold       jobs                                                         {jobs: [JobRow, …]}
release    jobs                                                         {jobs: [JobRow, …]}
change     job, and any of the fields of `CHANGEABLE`                   {job: JobRow}
list       user, states, ended=false, after=0, limit=1000,              {jobs: [JobRow, …], more: bool, counts: {state:
           newest_first=false                                           number}}
job        job, listens=false                                           {job: JobRow, program (to its owner; without
                                                                        environment to others), attempts: [AttemptRow],
                                                                        listens: [address, …] (to its owner), cost: price of
                                                                        the devices it held}
status                                                                  StatusRow
set        settings={name: value}                                       {settings: {…}}
limits     user, and max_devices, max_running, max_queued, share,       {user: UserRow}
           budget_device_hours
reserve    devices, start_s, end_s, users=[], every=""                  {reservation: ReservationRow}
unreserve  reservation                                                  {}
report     by=[month, group, user], month                               {by, rows: [UsageRow, …]} (`store.usage`)
wait       after=number of an event, timeout_s=30                       {last: number}: once there is a later one
stop                                                                    {pid}: the daemon ends, its jobs go on
========== ============================================================ ===============================================

``spec`` holds fields of `core.values.JobSpec` (without ``user``), ``program`` those of `program.JobProgram` (without
``uid``): ``needs`` is an object of the fields of `Needs`, ``after`` a list of ``{"job": …, "condition": …}``. Fields with a
default may be left out. Leave ``preemptible`` out if it isn't known: the job can then be preempted once its program has
reported through `evenload.job`, or from the beginning if ``program.requeue`` is set. Under ``array`` the jobs submitted
together become one array, named by the first one's id. A program gets only these variables and PATH, HOME, USER,
LOGNAME, SHELL and LANG: a client sends what its job needs.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypedDict

from evenload.errors import ConfigError, EvenloadError, QueueError, StaleError

VERSION = 2

LARGEST_REQUEST_BYTES = 1024 * 1024
"""A longer line is refused and its connection closed."""
LARGEST_REPLY_BYTES = 64 * 1024 * 1024
LARGEST_PAGE = 1000
"""Rows in a reply to ``list``, and jobs in one ``submit``."""

CHANGEABLE = (
    "priority", "name", "needs", "estimate_s", "total", "soft_limit_s", "hard_limit_s", "not_before_s",
    "deadline_s", "delays", "array_limit", "retries", "preemptible",
)  # fmt: skip
"""Fields of `JobSpec` that the owner may change later. Only an admin may set a priority above the queue's `max_priority`."""


class JobRow(TypedDict):
    """A job, as ``list`` and ``job`` return it."""

    id: str
    number: int
    """In the order of submission; of the last row, ``after`` of the next page."""
    user: str
    name: str
    state: str
    """PENDING, STARTING, RUNNING, RESIZING, PREEMPTING, SUCCEEDED, FAILED, CANCELLED."""
    priority: int
    min_devices: int
    max_devices: int
    kinds: list[str]
    devices: list[str]
    """Ids of the devices that it holds."""
    submitted_s: float
    since_s: float
    """When it entered its state."""
    first_began_s: float | None
    held_s: float
    """Time for which it has held devices."""
    attempt: int
    """Number of times that it got devices."""
    done: float
    total: float | None
    rate_per_s: float
    """Work per second; 0 if not yet measured."""
    start_s: float | None
    """When a job without devices is expected to start; None if unknown."""
    eta_s: float | None
    """When it is expected to end; None if unknown. Both ignore jobs that are submitted later."""
    estimate_s: float | None
    """Estimated run time on its minimum of devices; None without an estimate."""
    estimate_source: str
    """Earlier runs that it is made of; empty for the owner's own."""
    deadline_s: float | None
    deadline_note: str
    """Reason why its deadline can't be met, or planned for; empty if it can, or without one."""
    position: int | None
    """Place in line, from 1, of a PENDING job that could start; None for any other, or if unknown."""
    reason: str
    """Reason for its state; for a PENDING job, why it waits."""
    array: str
    is_held: bool
    shares: list[str]
    """Other jobs on its device."""
    peak_bytes: int
    """Measured memory peak on a device that it may share; 0 if not measured."""
    idle_s: dict[str, float]
    """Devices of it that have been idle for long, and for how long."""
    log: str
    """Path of its output."""


class AttemptRow(TypedDict):
    attempt: int
    devices: list[str]
    began_s: float
    ended_s: float | None
    ending: str
    reason: str
    pid: int | None
    """Process id of its runner."""


class ExternalProcessRow(TypedDict):
    """A process outside the queue on a device."""

    pid: int
    user: str
    command: str
    used_bytes: int
    since_s: float
    """When it was first seen there."""


class DeviceRow(TypedDict):
    """A device of the queue."""

    id: str
    label: str
    """Name for people: ``gpu0``, ``cpu:0-3``."""
    kind: str
    memory_bytes: int
    speed: float
    price_per_hour: float
    power_w: float
    job: str
    """The job that holds it, or will hold it next; empty for none."""
    jobs: list[str]
    """All such jobs: several if they share it."""
    excess_bytes: int
    """Sum of the sharing jobs' peaks beyond its memory; 0 if they fit."""
    closed: str
    """Reason why nothing may start on it; empty if it is open."""
    external: list[ExternalProcessRow]
    ghost_bytes: int
    """Memory in use that no known process holds."""
    used_bytes: int


class StatusRow(TypedDict):
    """The queue as a whole."""

    pid: int
    version: str
    uid: int
    """User id of the daemon: jobs run as this user unless it is root."""
    since_s: float
    folder: str
    devices: list[DeviceRow]
    settings: dict[str, Any]
    counts: dict[str, int]
    users: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    """Groups of `queue.toml`: users, budget, and the device-hours of this month (0 while no budget is set)."""
    reservations: list[dict[str, Any]]
    last: int
    """Number of the last event, for ``wait``."""
    problems: list[str]
    """Problems that an admin should know."""


def encode(message: dict[str, Any]) -> bytes:
    """Return the message as a line of JSON, which has no infinite numbers: these are sent as words, such as "inf"."""
    row = {"v": VERSION, **message}
    try:
        return json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    except ValueError:
        return json.dumps(_with_words(row), separators=(",", ":")).encode() + b"\n"


def _with_words(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _with_words(part) for name, part in value.items()}
    return [_with_words(part) for part in value] if isinstance(value, list | tuple) else value


def decode(line: bytes) -> dict[str, Any]:
    """Return the message of a line; raise a `ConfigError` if it is no message, or of another version."""
    try:
        message = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"invalid message: {str(error) or 'nested too deeply'}"[:300]) from None
    if not isinstance(message, dict):
        raise ConfigError(f"invalid message: expected a JSON object, found {type(message).__name__}")
    if message.pop("v", None) != VERSION:
        raise ConfigError(
            f"a message of another version than {VERSION}: the daemon and its client are different versions of "
            f"Evenload; end the daemon (SIGTERM; its log has its process id) and retry: its jobs go on"
        )
    return message


def error_row(error: Exception) -> dict[str, Any]:
    """Return the reply that reports an error."""
    kinds = {ConfigError: "config", StaleError: "stale"}
    kind = next((name for known, name in kinds.items() if isinstance(error, known)), "queue")
    return {"ok": False, "error": {"kind": kind, "message": str(error)}}


def error_from(row: Any) -> EvenloadError:
    """Return the error of a reply made by `error_row`."""
    table = row if isinstance(row, dict) else {}
    kind = {"config": ConfigError, "stale": StaleError}.get(str(table.get("kind")), QueueError)
    error: EvenloadError = kind(str(table.get("message", "the daemon gave an error without a message")))
    return error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
