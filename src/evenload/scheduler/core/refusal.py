"""Reasons for which a job is refused when it is submitted."""

from __future__ import annotations

from collections.abc import Mapping

from evenload.scheduler.core.layout import Layout
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job, JobSpec, Limits, Needs, User


def refusal(
    spec: JobSpec,
    jobs: Mapping[str, Job],
    outcomes: Mapping[str, JobState],
    users: Mapping[str, User],
    layout: Layout,
) -> str | None:
    """Return the reason, for the job's owner; None if the job can be accepted.

    `layout` includes closed devices, which may open again; `jobs` have not ended, those of `outcomes` have.
    """
    for after in spec.after:
        if after.job not in jobs and after.job not in outcomes:
            return f"it is to start after {after.job}, but there is no such job"
    limits = users[spec.user].limits if spec.user in users else Limits()
    if limits.max_queued is not None:
        num = sum(1 for job in jobs.values() if job.spec.user == spec.user)
        if num >= limits.max_queued:
            return f"{spec.user} has {num} jobs in the queue and may have {limits.max_queued}"
    needs = spec.needs
    what, most = _needs_text(needs), layout.most_together(needs)
    if most < needs.min_devices:
        return f"it asks for {what}; this queue has {most} such of its {len(layout.devices)} devices"
    if limits.max_devices is not None and limits.max_devices < needs.min_devices:
        return f"it asks for {what}; {spec.user} may have {limits.max_devices} at once"
    return None


def _needs_text(needs: Needs) -> str:
    what = f"{needs.min_devices} devices" if needs.min_devices > 1 else "a device"
    if needs.kinds:
        what += f" of kind {' or '.join(needs.kinds)}"
    if needs.memory_bytes:
        what += f" with {needs.memory_bytes / 2**30:.3g} GiB"
    return what + " in one host" * needs.one_host + " all of one kind" * needs.one_kind
