"""Use of devices, brought up to a time: of users, and of jobs whose programs ended before that was noticed."""

from __future__ import annotations

from dataclasses import replace

from evenload.scheduler.core.values import Job, User

_HOUR_S = 3600.0


def accounted(user: User, time_s: float, half_life_s: float) -> User:
    return replace(user, usage_device_s=user.usage_until(time_s, half_life_s), accounted_s=time_s)


def counted_preemptions(job: Job, time_s: float) -> tuple[float, ...]:
    """Return when the job was preempted within the last hour, with one more preemption now."""
    return (*(t for t in job.preempted_s if t > time_s - _HOUR_S), time_s)


def without_unused(job: Job, user: User, num_devices: int, unused_s: float) -> tuple[Job, User]:
    """Return a job that just released its devices, and its user, without the time after the program had ended."""
    shorter = replace(
        job,
        held_s=max(0.0, job.held_s - unused_s),
        service_device_s=max(0.0, job.service_device_s - num_devices * unused_s),
        since_s=job.since_s - unused_s,
    )
    return shorter, replace(user, usage_device_s=max(0.0, user.usage_device_s - num_devices * unused_s))
