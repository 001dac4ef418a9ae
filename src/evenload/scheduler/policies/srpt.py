"""``srpt``: the job with the fewest device-seconds left goes first, and may preempt running ones."""

from __future__ import annotations

from evenload.scheduler.core.estimates import device_s_left, restart_s
from evenload.scheduler.core.policy import PolicyDecision, PolicyInput
from evenload.scheduler.core.states import RUNNING
from evenload.scheduler.core.values import Job
from evenload.scheduler.policies.elastic import starting_sizes
from evenload.scheduler.policies.guesses import guessed_s


def srpt(inputs: PolicyInput) -> PolicyDecision:
    """Apply Smith's rule to gangs: with equal weights, least remaining device-seconds first."""
    order = sorted(inputs.jobs, key=lambda job: (-job.spec.priority, work(inputs, job), job.submitted_s))
    return PolicyDecision(order=order, preempts=True, sizes=starting_sizes(inputs, order))


def work(inputs: PolicyInput, job: Job) -> float:
    """Return the device-seconds left, as they count in a comparison.

    So that jobs don't displace each other for nothing, the restart of one that waits counts, and of the one it displaces.
    """
    spec = job.spec
    num, is_similar = spec.needs.min_devices, bool(spec.estimate_source)
    restarts_s = 0.0 if job.state is RUNNING else 2 * restart_s(job, inputs.settings) * num
    if job.total is None and not job.devices:  # a shortcut for most waiting jobs
        if spec.estimate_s is not None and not is_similar and spec.estimate_s > job.held_s:
            return (spec.estimate_s - job.held_s) * num + restarts_s
        return guessed_s(inputs, job, job.service_device_s / num) * num + restarts_s
    known = None if is_similar and job.total is None else device_s_left(job, inputs.now_s)
    if known is None:
        known = guessed_s(inputs, job, job.service_until(inputs.now_s) / num) * num
    return known + restarts_s
