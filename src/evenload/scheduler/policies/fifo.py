"""``fifo``: in the order of submission, nobody is preempted; later jobs may pass only where that delays nobody."""

from __future__ import annotations

from evenload.scheduler.core.policy import PolicyDecision, PolicyInput


def fifo(inputs: PolicyInput) -> PolicyDecision:
    """First come, first served, with EASY backfilling where ends are known (`core.backfill`). Priorities don't matter."""
    return PolicyDecision(order=sorted(inputs.jobs, key=lambda job: job.submitted_s), preempts=False)
