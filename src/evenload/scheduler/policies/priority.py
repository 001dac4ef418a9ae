"""``priority``: higher classes first, and at the cost of lower ones that run; within a class the order of submission."""

from __future__ import annotations

from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.view import View, Wishes


def priority(view: View) -> Wishes:
    """Jobs of one class never displace each other: those that run stand before those that wait."""
    order = sorted(view.jobs, key=lambda job: (-job.spec.priority, job.state is not JobState.RUNNING, job.submitted_s))
    return Wishes(order=order, preempts=True)
