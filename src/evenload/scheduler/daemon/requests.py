"""Requests of clients: their fields, checked, and made into the queue's own values. The caller is never taken from a message."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evenload.errors import ConfigError, QueueError
from evenload.scheduler import validation
from evenload.scheduler.daemon.external_processes import user_name
from evenload.scheduler.daemon.queue_file import QueueFile
from evenload.scheduler.messages import LARGEST_PAGE
from evenload.scheduler.program import JobProgram

LEARNED = "preemptible_is_learned"
"""Stored beside a program: whether its job can be preempted follows from its first report."""

MEASURED = "restart_is_measured"
"""Stored beside a program: the cost of a stop and resume is measured, as its owner gave none."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The user of a connection, as the kernel knows it."""

    pid: int
    uid: int
    name: str
    is_admin: bool


def caller_of(pid: int, uid: int, settings: QueueFile) -> Caller:
    return Caller(pid, uid, user_name(uid), uid in (0, os.geteuid()) or uid in settings.admins)


@dataclass(frozen=True, slots=True)
class JobPart:
    spec: Mapping[str, Any] = field(default_factory=dict)
    program: Any = None

    def within(self, common: JobPart) -> JobPart:
        """Return this job with what all jobs of its message have in common; its own fields and variables take precedence."""
        if not isinstance(common.program, Mapping) or not isinstance(self.program, Mapping | None):
            return JobPart({**common.spec, **self.spec}, common.program if self.program is None else self.program)
        own = self.program or {}
        parts = [row["environment"] for row in (common.program, own) if isinstance(row.get("environment"), Mapping)]
        environment = {name: value for part in parts for name, value in part.items()}
        return JobPart(
            {**common.spec, **self.spec}, {**common.program, **own, **({"environment": environment} if parts else {})}
        )


def job_names(job: str, jobs: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the ids of the jobs that a message names, each once; raise a `ConfigError` for none or too many."""
    given = (jobs,) if isinstance(jobs, str) else jobs or ((job,) if job else ())
    if not given or len(given) > LARGEST_PAGE:
        raise ConfigError(f"{len(given)} jobs in one message: expected 1 to {LARGEST_PAGE}")
    return tuple(dict.fromkeys(given))


def program_from(row: Any, caller: Caller) -> JobProgram:
    """Return what a job runs; raise a `ConfigError` for an invalid field, a `QueueError` where it can't run here."""
    if isinstance(row, Mapping):
        if "uid" in row:
            raise ConfigError("program.uid: the queue takes the owner from the connection; leave it out")
        row = {**row, "uid": caller.uid}
    program = validation.build(JobProgram, row, "program")
    if not program.command or not program.command[0]:
        raise ConfigError("program.command is empty: expected a command and its arguments")
    for name in program.environment:
        if not name or "=" in name or "\0" in name:
            raise ConfigError(f"program.environment: a variable named {name!r:.100}: expected a name without =")
    if program.backend != "local":
        raise ConfigError(
            f"program.backend={program.backend!r:.50}: this daemon runs local jobs; `evenload submit` sends others"
        )
    if program.options:
        raise ConfigError(f"program.options: the local backend has none; found {', '.join(program.options)[:100]}")
    if os.geteuid() not in (0, caller.uid):
        raise QueueError(
            f"this queue belongs to {user_name(os.geteuid())} and isn't run by root, so it can't run jobs of "
            f"{caller.name}; use a queue of your own: it notices others' processes on the devices, and waits"
        )
    if os.geteuid() != caller.uid:
        try:
            pwd.getpwuid(caller.uid)
        except KeyError:
            raise QueueError(
                f"user {caller.uid} has no entry in the system's list of users: no job can run as it"
            ) from None
    return program
