"""Guard of all preempting policies: a job that waited much longer than it ran goes before all others.

A job starves while ``waited − held > starve_after_s``. It then stands before all others, the starving among themselves
in order of submission, so it gets the next devices that can be had; while it runs, the debt shrinks, and once it is paid
the job stands where the policy puts it. If it is displaced then, it starves again as soon as the debt returns. So from
the moment it first starves it gets devices at least half of the time: a job of T seconds is over at most about
``starve_after_s + 2 T`` after its submission, plus what the starving before it and jobs that can't be preempted take.
"""

from __future__ import annotations

from evenload.scheduler.core.values import Job, Settings


def is_starving(job: Job, now_s: float, settings: Settings) -> bool:
    """Return whether the guard puts the job first. Jobs with a priority below 0 take what is left and are never put first."""
    after_s = settings.starve_after_s
    if now_s - job.submitted_s <= after_s or job.spec.priority < 0:
        return False
    return job.waited_until(now_s) - job.held_until(now_s) > after_s
