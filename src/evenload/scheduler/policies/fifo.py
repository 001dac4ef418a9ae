"""``fifo``: in the order of submission, nobody is preempted; later jobs may pass only where that delays nobody."""

from __future__ import annotations

from evenload.scheduler.core.view import View, Wishes


def fifo(view: View) -> Wishes:
    """First come, first served, with EASY backfilling where ends are known (`core.hold`). Priorities don't matter."""
    return Wishes(order=sorted(view.jobs, key=lambda job: job.submitted_s), preempts=False)
