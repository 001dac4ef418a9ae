"""``fifo``: in the order of submission, without preemption; later jobs may pass only if that delays no earlier one."""

from __future__ import annotations

from evenload.scheduler.core.policy import PolicyDecision, PolicyInput
from evenload.scheduler.policies.elastic import starting_sizes


def fifo(inputs: PolicyInput) -> PolicyDecision:
    """Serve first come, first served, with EASY backfilling where ends are known (`core.backfill`). Ignore priorities."""
    order = sorted(inputs.jobs, key=lambda job: job.submitted_s)
    return PolicyDecision(order=order, preempts=False, sizes=starting_sizes(inputs, order))
