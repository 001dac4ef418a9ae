"""What a message asks for, checked and made into the queue's own values. Who asks is never taken from the message."""

from __future__ import annotations

import math
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler.core import events
from evenload.scheduler.core.values import JobSpec
from evenload.scheduler.daemon.external_processes import user_name
from evenload.scheduler.daemon.queue_file import QueueFile
from evenload.scheduler.messages import CHANGEABLE, LARGEST_PAGE
from evenload.scheduler.program import JobProgram
from evenload.scheduler.store import rows

LEARNED = "preemptible_is_learned"
"""Beside a program: whether its job can be preempted is found out when it first reports."""

MEASURED = "restart_is_measured"
"""Beside a program: what a stop and resume costs is measured, as its owner gave nothing."""

_LONGEST_NAME = 200
_MOST_NAMES = 1000


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the kernel says."""

    pid: int
    uid: int
    name: str
    is_admin: bool


def caller_of(pid: int, uid: int, settings: QueueFile) -> Caller:
    """The caller at the other end of a connection."""
    return Caller(pid, uid, user_name(uid), uid in (0, os.geteuid()) or uid in settings.admins)


def spec_from(row: Any, user: str) -> JobSpec:
    """What a job asks for.

    Raises:
        ConfigError: a field is unknown, or holds what can't be.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"spec={row!r:.100}: expected an object")
    if "user" in row:
        raise ConfigError("spec.user: whose job it is, the queue knows from the connection; leave it out")
    return _spec({**row, "user": user})


def changed_spec(spec: JobSpec, changes: Mapping[str, Any]) -> JobSpec:
    """A job's wishes with some of them changed.

    Raises:
        ConfigError: there is nothing to change, it can't be changed, or not to that.
    """
    if not changes:
        raise ConfigError(f"nothing to change is named; there are {', '.join(CHANGEABLE)}")
    if unknown := changes.keys() - set(CHANGEABLE):
        raise ConfigError(f"{', '.join(sorted(unknown))} can't be changed; what can: {', '.join(CHANGEABLE)}")
    before = events.as_row(events.Submitted(0.0, "", spec))["spec"]
    if isinstance(changes.get("needs"), Mapping):
        changes = {**changes, "needs": {**before.get("needs", {}), **changes["needs"]}}
    return _spec({**before, **changes})


def _spec(row: Mapping[str, Any]) -> JobSpec:
    try:
        event = events.from_row({"kind": "Submitted", "time_s": 0.0, "job": "", "spec": row})
        rows.check(event)
    except ConfigError:
        raise
    except (QueueError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"spec: {error}") from error
    spec: JobSpec = event.spec  # type: ignore[union-attr]  # of the kind that is asked for above
    check_name("name", spec.name, may_be_empty=True)
    check_name("array", spec.array, may_be_empty=True)
    for part in (spec.needs.kinds, tuple(after.job for after in spec.after)):
        if len(part) > _MOST_NAMES:
            raise ConfigError(f"spec with {len(part)} names in one list: expected at most {_MOST_NAMES}")
        for name in part:
            check_name("spec", name)
    return spec


def program_from(row: Any, caller: Caller) -> JobProgram:
    """What a job runs, and that it can run here.

    Raises:
        ConfigError: a field is unknown, or holds what can't be.
        QueueError: this queue can't run the caller's programs.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"program={row!r:.100}: expected an object")
    known = {field.name for field in fields(JobProgram)} - {"uid"}
    if unknown := row.keys() - known:
        raise ConfigError(f"program.{sorted(unknown)[0]}: there is no such field; there are {', '.join(sorted(known))}")
    command = _texts("program.command", row.get("command"))
    if not command or not command[0]:
        raise ConfigError("program.command is empty: expected a command and its arguments")
    program = JobProgram(
        command=command,
        folder=_folder("program.folder", row.get("folder")),
        uid=caller.uid,
        snapshot=_folder("program.snapshot", row["snapshot"]) if row.get("snapshot") else "",
        environment=_table("program.environment", row.get("environment", {})),
        grace_s=_seconds("program.grace_s", row.get("grace_s", JobProgram.__dataclass_fields__["grace_s"].default)),
        requeue=_flag("program.requeue", row.get("requeue", False)),
        notify=_texts("program.notify", row.get("notify", ())),
        backend=row.get("backend", "local"),
        options=_table("program.options", row.get("options", {})),
    )
    for name in program.environment:
        if not name or "=" in name:
            raise ConfigError(f"program.environment: a variable named {name!r}")
    if program.backend != "local":
        raise ConfigError(
            f"program.backend={program.backend!r:.50}: this daemon runs local jobs; others are sent by submit"
        )
    if program.options:
        raise ConfigError(f"program.options: the local backend has none; found {', '.join(program.options)[:100]}")
    if os.geteuid() not in (0, caller.uid):
        raise QueueError(
            f"this queue belongs to {user_name(os.geteuid())} and isn't run by root, so it can't run jobs of "
            f"{caller.name}; use a queue of your own: it sees what others do on the devices, and waits"
        )
    if os.geteuid() != caller.uid:
        try:
            pwd.getpwuid(caller.uid)
        except KeyError:
            raise QueueError(
                f"user {caller.uid} has no entry in the system's list of users: no job can run as it"
            ) from None
    return program


def check_name(what: str, name: Any, *, may_be_empty: bool = False) -> str:
    """A name that can be shown in a terminal.

    Raises:
        ConfigError: it is none, too long, or holds control characters.
    """
    if not isinstance(name, str) or (not name and not may_be_empty):
        raise ConfigError(f"{what}={name!r:.100}: expected a name")
    if len(name) > _LONGEST_NAME:
        raise ConfigError(f"{what} of {len(name)} characters: expected at most {_LONGEST_NAME}")
    if not name.isprintable():
        raise ConfigError(f"{what}={name!r}: it holds characters that can't be printed")
    return name


def job_names(value: Any) -> tuple[str, ...]:
    """The jobs that a message names.

    Raises:
        ConfigError: none, too many, or no names.
    """
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"jobs={value!r:.100}: expected a list of ids")
    if len(given) > LARGEST_PAGE:
        raise ConfigError(f"{len(given)} jobs in one message: expected at most {LARGEST_PAGE}")
    return tuple(dict.fromkeys(given))


def only(message: Mapping[str, Any], *known: str) -> None:
    """Refuses fields that the verb doesn't have: what is not understood has no effect, and that would be silent.

    Raises:
        ConfigError: there is one.
    """
    for name in message:
        if name not in known and name not in ("verb", "id"):
            raise ConfigError(f"{name}: {message.get('verb')} has no such field; it has {', '.join(known) or 'none'}")


def _texts(what: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) and "\0" not in part for part in value):
        raise ConfigError(f"{what}={value!r:.100}: expected a list of texts")
    return tuple(value)


def _table(what: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(part, str) and "\0" not in part for pair in value.items() for part in pair
    ):
        raise ConfigError(f"{what}: expected an object of texts")
    return dict(value)


def _folder(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ConfigError(f"{what}={value!r:.100}: expected an absolute path")
    return value


def _seconds(what: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ConfigError(f"{what}={value!r:.50}: expected a number of seconds, at least 0")
    return float(value)


def _flag(what: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{what}={value!r:.50}: expected true or false")
    return value
