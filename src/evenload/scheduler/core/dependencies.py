"""Jobs that start after others: those that one still waits for, and why it can never start."""

from __future__ import annotations

from collections.abc import Container, Mapping

from evenload.errors import QueueError
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job, JobSpec


def waits_for(
    job: str, spec: JobSpec, jobs: Container[str], outcomes: Mapping[str, JobState]
) -> tuple[tuple[str, ...], str]:
    """Return the jobs that a new one waits for, and why it can never start; `QueueError` if there is no such job."""
    unmet, doomed = [], ""
    for after in spec.after:
        if after.job in jobs:
            unmet.append(after.job)
        elif after.job not in outcomes:
            raise QueueError(f"job {job} is to start after {after.job}, but there is no such job")
        elif not after.is_met(outcomes[after.job]):
            doomed = _doom(after.job, outcomes[after.job])
    return tuple(dict.fromkeys(unmet)), doomed


def after_end(waiting: Job, name: str, outcome: JobState) -> tuple[tuple[str, ...], str]:
    """Return the same of a job that waits, after job `name` has ended."""
    is_met = all(after.job != name or after.is_met(outcome) for after in waiting.spec.after)
    unmet = tuple(other for other in waiting.unmet if other != name)
    return unmet, waiting.doomed if is_met else _doom(name, outcome)


def _doom(name: str, state: JobState) -> str:
    return f"it was to start after job {name}, which is {state}"
