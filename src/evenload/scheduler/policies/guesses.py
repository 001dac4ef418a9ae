"""Estimates of a job whose remaining work is unknown, from jobs that have ended and its own age."""

from __future__ import annotations

from collections.abc import Iterable

from evenload.balance.run_times import work_of
from evenload.scheduler.core.policy import PolicyInput
from evenload.scheduler.core.values import Job


def guessed_s(inputs: PolicyInput, job: Job, age_s: float) -> float:
    """Guess the seconds left on its minimum of devices, of a job of unknown work that ran for `age_s` there.

    Without an estimate it takes at least as long as another of the same script that still runs (`balance.run_times`).
    """
    num, spec = job.spec.needs.min_devices, job.spec
    if spec.estimate_source:
        return inputs.past.left_s(num, age_s, spec.estimate_s)
    least_s = inputs.oldest[spec.run_key] / work_of(1.0, num) if spec.run_key in inputs.oldest else 0.0
    if least_s > age_s:
        return least_s - age_s + inputs.past.left_s(num, least_s)
    return inputs.past.left_s(num, age_s)


def oldest_work(jobs: Iterable[Job], now_s: float) -> dict[str, float]:
    """Return `JobSpec.run_key` → the most that one of its unended jobs has run, as on one device."""
    oldest: dict[str, float] = {}
    for job in jobs:
        key = job.spec.run_key
        if key and (job.devices or job.held_s):
            num = job.spec.needs.min_devices
            oldest[key] = max(oldest.get(key, 0.0), work_of(job.service_until(now_s) / num, num))
    return oldest
