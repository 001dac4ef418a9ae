"""Decide whether a job whose program is gone may run again: the same in the queue of one machine and on Ray."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job

_NAME = "evenload"
_SCRIPT_BYTES = 2**20
"""Part of a script that is searched for the name."""


def names_evenload(command: Sequence[str], folder: str | Path) -> bool:
    """Return True where the command, or a script in it, names Evenload: it then reports, sooner or later."""
    if any(_NAME in word for word in command):
        return True
    for word in command[1:]:
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(Path(folder, word), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                if stat.S_ISREG(os.fstat(descriptor).st_mode) and _NAME.encode() in file.read(_SCRIPT_BYTES):
                    return True
    return False


def final(event: events.QueueEvent, job: Job) -> events.QueueEvent:
    """Return a failure in place of an event that would start a job again which neither saves nor was submitted for that.

    The caller leaves out jobs whose programs have not begun, or can be expected to save although they have not reported yet.
    """
    if not isinstance(event, events.Lost | events.Yielded) or job.spec.preemptible or job.state is not JobState.RUNNING:
        return event
    reason = f"{event.reason}; it can't save, and without --requeue it is not started again from the beginning"
    return events.Ended(event.time_s, event.job, is_success=False, reason=reason, ended_s=event.ended_s)
