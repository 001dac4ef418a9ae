"""What `decide` tells a shell to do. Each has an event of its own, to be recorded before it is carried out."""

from __future__ import annotations

from dataclasses import dataclass

from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState


@dataclass(frozen=True, slots=True)
class Start:
    """Give these devices to a pending job and start it."""

    job: str
    devices: tuple[str, ...]
    attempt: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Resize:
    """Ask a running job to save and stop, then start it on these devices; all of them are free or its own."""

    job: str
    devices: tuple[str, ...]
    reason: str = ""
    is_forced: bool = False
    """Others need what it gives up."""


@dataclass(frozen=True, slots=True)
class Preempt:
    """Ask a job to save and stop; it goes on later."""

    job: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """End a job for good: over its hard limit, or it can never start."""

    job: str
    state: JobState
    reason: str
    has_devices: bool


Command = Start | Resize | Preempt | End


def recorded(command: Command, now_s: float) -> events.Event:
    """The event that says that the command was given."""
    if isinstance(command, Start):
        return events.Placed(now_s, command.job, command.devices, command.attempt, command.reason)
    if isinstance(command, Resize):
        return events.ResizeRequested(now_s, command.job, command.devices, command.reason, command.is_forced)
    if isinstance(command, Preempt):
        return events.StopRequested(now_s, command.job, JobState.PENDING, command.reason)
    if command.has_devices:
        return events.StopRequested(now_s, command.job, command.state, command.reason)
    return events.Cancelled(now_s, command.job, command.reason)
