"""Guard of all preempting policies: a job that waited much longer than it ran goes before all others.

A job starves while ``waited − held > starve_after_s``. Starving jobs come before all others, in order of submission. The
difference shrinks while the job runs and grows while it waits, so from the time it first starves it has devices at least
half of the time: a job of T seconds ends at most about ``starve_after_s + 2 T`` after its submission, plus the time of
earlier starving jobs and of jobs that can't be preempted.
"""

from __future__ import annotations

from evenload.scheduler.core.values import Job, Settings


def is_starving(job: Job, now_s: float, settings: Settings) -> bool:
    """Return whether the guard puts the job first. Jobs with a priority below 0 take what is left and are never put first."""
    after_s = settings.starve_after_s
    if now_s - job.submitted_s <= after_s or job.spec.priority < 0:
        return False
    return job.waited_until(now_s) - job.held_until(now_s) > after_s
