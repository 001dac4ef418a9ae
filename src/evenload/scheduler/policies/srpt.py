"""``srpt``: the job with the fewest device-seconds left goes first, and may preempt running ones."""

from __future__ import annotations

from evenload.balance.run_times import work_of
from evenload.scheduler.core.estimates import device_s_left, restart_s
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

    So that jobs don't displace each other for nothing, the restart of one that waits counts, and of the one it displaces.
    """
    spec = job.spec
    num, is_similar = spec.needs.min_devices, bool(spec.estimate_source)
    restarts_s = 0.0 if job.state is JobState.RUNNING else 2 * restart_s(job, inputs.settings) * num
    if job.total is None and not job.devices:  # a shortcut for most waiting jobs
        if spec.estimate_s is not None and not is_similar and spec.estimate_s > job.held_s:
            return (spec.estimate_s - job.held_s) * num + restarts_s
        return guessed_s(inputs, job, job.service_device_s / num) * num + restarts_s
    known = None if is_similar and job.total is None else device_s_left(job, inputs.now_s)
    if known is None:
        known = guessed_s(inputs, job, job.service_until(inputs.now_s) / num) * num
    return known + restarts_s


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
