"""``srpt``: the job with the fewest device-seconds left goes first, and may preempt running ones."""

from __future__ import annotations

import math

from evenload.scheduler.core.estimates import PRIOR_S, device_s_left, guessed_device_s, restart_s
from evenload.scheduler.core.policy import PolicyDecision, PolicyInput
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job


def srpt(inputs: PolicyInput) -> PolicyDecision:
    """Apply Smith's rule to gangs: with equal weights, least remaining device-seconds first."""
    return PolicyDecision(
        order=sorted(inputs.jobs, key=lambda job: (-job.spec.priority, work(inputs, job), job.submitted_s)),
        preempts=True,
    )


def work(inputs: PolicyInput, job: Job) -> float:
    """Return the device-seconds left, as they count in a comparison.

    Two things keep jobs from displacing each other for nothing: one that waits needs a start, and the displaced one a restart;
    and where the work is only guessed from what was attained, it is rounded up to a power of two, so equals swap only
    when one of them has doubled.
    """
    if job.total is None and not job.devices:  # a shortcut for most waiting jobs
        spec, num = job.spec, job.spec.needs.min_devices
        restarts_s = 2 * (inputs.settings.restart_s if spec.restart_s is None else spec.restart_s) * num
        if spec.estimate_s is not None and spec.estimate_s > job.held_s:
            return (spec.estimate_s - job.held_s) * num + restarts_s
        return _power_above(job.service_device_s + PRIOR_S * num) + restarts_s
    known = device_s_left(job, inputs.now_s)
    if known is None:
        known = _power_above(guessed_device_s(job, inputs.now_s))
    if job.state is not JobState.RUNNING:
        known += 2 * restart_s(job, inputs.settings) * job.spec.needs.min_devices
    return known


def _power_above(value: float) -> float:
    """Return the least power of two that is not below `value`."""
    part, power = math.frexp(value)
    return math.ldexp(1.0, power - (part == 0.5))
