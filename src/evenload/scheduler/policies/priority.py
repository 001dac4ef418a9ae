"""``priority``: higher classes first, and at the cost of lower ones that run; within a class the order of submission."""

from __future__ import annotations

from evenload.scheduler.core.policy import PolicyDecision, PolicyInput
from evenload.scheduler.core.states import RUNNING
from evenload.scheduler.policies.elastic import starting_sizes


def priority(inputs: PolicyInput) -> PolicyDecision:
    """Order by class; within a class jobs never displace each other: running ones come before waiting ones."""
    order = sorted(inputs.jobs, key=lambda job: (-job.spec.priority, job.state is not RUNNING, job.submitted_s))
    return PolicyDecision(order=order, preempts=True, sizes=starting_sizes(inputs, order))
