"""The jobs that hold each device: one, or several if all of them may share it. `QueueState` keeps the mapping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from evenload.errors import QueueError
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job

Holders = dict[str, tuple[str, ...]]
"""Device → the jobs that hold it, by when they got it."""


def occupy(holders: Holders, jobs: Mapping[str, Job], job: Job, devices: Iterable[str]) -> None:
    """Add a job to devices, beside those that share them."""
    for device in devices:
        others = holders.get(device)
        if others is None:
            holders[device] = (job.id,)
        elif job.id not in others:  # an order that a state read from a store has too
            arrived = {name: (jobs[name].attempt_began_s, name) for name in (*others, job.id)}
            holders[device] = tuple(sorted(arrived, key=arrived.__getitem__))


def vacate(holders: Holders, job: Job, devices: Iterable[str]) -> None:
    for device in devices:
        others = tuple(name for name in holders[device] if name != job.id)
        if others:
            holders[device] = others
        else:
            del holders[device]


def check(
    holders: Holders,
    jobs: Mapping[str, Job],
    closed: Mapping[str, str],
    job: Job,
    device: str,
    *,
    may_join: bool,
) -> None:
    """Raise `QueueError` if the job can't get a device: it is closed, or a holder doesn't share it with the job.

    Memory is not checked here: what fitted when it was decided is not judged by later rules.
    """
    others = [name for name in holders.get(device, ()) if name != job.id]
    if others and not (may_join and job.spec.share_device and all(may_be_joined(jobs[name]) for name in others)):
        raise QueueError(f"job {job.id} is to get device {device}, which job {', '.join(others)} holds")
    if device in closed and device not in job.devices:
        raise QueueError(f"job {job.id} is to get device {device}, which is closed: {closed[device]}")


def may_be_joined(job: Job) -> bool:
    """Return whether other jobs may join on its device: it shares, and isn't about to stop."""
    return job.spec.share_device and job.state in (JobState.STARTING, JobState.RUNNING)
