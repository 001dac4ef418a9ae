"""Spent budgets of device-hours: jobs of their users get idle devices only, or wait.

A job that can be preempted counts as one with a priority below 0: it takes what no other job wants, and gives it back at
once. Any other would keep its devices, so it waits. Jobs that already run and can't be preempted go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.states import JobState

_IDLE_ONLY = -1


def within_budgets(snapshot: QueueSnapshot, spent: Mapping[str, str]) -> tuple[QueueSnapshot, dict[str, str]]:
    """Return the queue that the policy may decide on, and the reasons of the jobs that wait although they could run.

    `spent`: user → which budget is spent, for people.
    """
    if not spent:
        return snapshot, {}
    jobs, waits = [], {}
    for job in snapshot.jobs:
        reason = spent.get(job.spec.user)
        if reason is not None and job.spec.preemptible:
            job = replace(job, spec=replace(job.spec, priority=min(_IDLE_ONLY, job.spec.priority)))
        elif reason is not None and job.state is JobState.PENDING:
            waits[job.id] = f"{reason}; a job that can save, or with --requeue, would use idle devices"
            continue
        jobs.append(job)
    return replace(snapshot, jobs=tuple(jobs)), waits
