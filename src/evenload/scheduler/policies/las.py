"""``las``: least attained service first, for where nothing is known of jobs: the discretised 2D-LAS of Tiresias.

Gu et al., "Tiresias: A GPU Cluster Manager for Distributed Deep Learning", NSDI 2019, section 3.2: service is devices ×
time; queues end at thresholds of it, a job sinks from queue to queue as it is served, lower queues run only on what
higher ones leave, and within a queue jobs go in a fixed order, so equals don't preempt each other all the time. The order
here is that of submission, as in the simulator that Pollux was compared with; the paper has that of the first start.
"""

from __future__ import annotations

from bisect import bisect_right

from evenload.scheduler.core.policy import PolicyDecision, PolicyInput
from evenload.scheduler.core.values import Job
from evenload.scheduler.policies.elastic import starting_sizes


def las(inputs: PolicyInput) -> PolicyDecision:
    """Order by queue, then submission. As published, jobs behind one that doesn't fit may pass it."""
    thresholds = inputs.settings.las_thresholds_device_s

    def key(job: Job) -> tuple[int, int, float]:
        queue = bisect_right(thresholds, job.service_until(inputs.now_s))
        return -job.spec.priority, queue, job.submitted_s

    order = sorted(inputs.jobs, key=key)
    return PolicyDecision(order=order, preempts=True, reserves=False, sizes=starting_sizes(inputs, order))
