"""Remaining time of a job: from its reports, else from an estimate of its owner or of earlier runs, else unknown."""

from __future__ import annotations

import math

from evenload.scheduler.core.states import RUNNING
from evenload.scheduler.core.values import Job, Settings


def work_left(job: Job, now_s: float) -> float | None:
    if job.total is None:
        return None
    done = job.done
    if job.state is RUNNING:
        done += job.rate_per_s * max(0.0, now_s - job.reported_s)
    return max(0.0, job.total - done)


def left_s(job: Job, now_s: float) -> float | None:
    """Return the seconds it will still run on its devices, or on its minimum if it has none.

    None if unknown; a job that outlived its estimate is unknown again.
    """
    if job.total is not None and (left := work_left(job, now_s)) is not None:
        rate = job.rate_per_s
        if job.rates:
            num = len(job.devices) or job.spec.needs.min_devices
            rate = rate if job.devices and rate > 0 else job.rates[min(num, len(job.rates)) - 1]
        if rate > 0:
            return left / rate
    estimate_s = job.spec.estimate_s
    more_s = 0.0 if estimate_s is None else estimate_s - job.held_until(now_s)
    return more_s if more_s > 0 else None


def device_s_left(job: Job, now_s: float) -> float | None:
    """Return the device-seconds it still needs on its minimum of devices; None if unknown.

    For a job that can use more, sizes are compared by what it would need on few: how many it has now doesn't count.
    """
    num = job.spec.needs.min_devices
    left = work_left(job, now_s) if job.total is not None and job.rates else None
    if left is not None and (rate := job.rates[min(num, len(job.rates)) - 1]) > 0:
        return left / rate * num
    seconds = left_s(job, now_s)
    return None if seconds is None else seconds * (len(job.devices) or num)


def end_s(job: Job, now_s: float) -> float:
    """Return when a job that runs, or would from now on, has ended at the latest; infinite if unknown."""
    limit_s, estimate_s = job.spec.hard_limit_s, job.spec.estimate_s
    if job.total is None and limit_s is None:  # a shortcut for most jobs
        more_s = 0.0 if estimate_s is None else estimate_s - job.held_until(now_s)
        return now_s + more_s if more_s > 0 else math.inf
    expected_s = left_s(job, now_s)
    end = math.inf if expected_s is None else now_s + expected_s
    if limit_s is not None:
        end = min(end, now_s + max(0.0, limit_s - job.held_until(now_s)))
    return end


def change_s(job: Job, settings: Settings) -> float:
    """Return what another number of devices costs the job, in seconds of its devices."""
    return restart_s(job, settings) if job.spec.resize_s is None else job.spec.resize_s


def restart_s(job: Job, settings: Settings) -> float:
    """Return what a stop and resume costs the job, in seconds of its devices."""
    return settings.restart_s if job.spec.restart_s is None else job.spec.restart_s
