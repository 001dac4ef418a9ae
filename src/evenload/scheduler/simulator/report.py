"""Figures of a simulation: completion times, use of the devices, restarts, fairness, costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evenload.scheduler.core.states import JobState
from evenload.scheduler.simulator.outcome import JobOutcome, SimulationOutcome


@dataclass(frozen=True)
class SimulationReport:
    """The figures of one simulation; times in seconds, over the jobs that succeeded."""

    policy: str
    cluster: str
    num_devices: int
    num_jobs: int
    num_failed: int
    """Over their hard limit, or never able to start."""
    mean_jct_s: float
    median_jct_s: float
    p99_jct_s: float
    mean_wait_s: float
    """From submission to the first step."""
    makespan_s: float
    utilisation: float
    """Device-seconds in which programs ran, over devices × makespan."""
    held: float
    """The same for devices held, starts and restarts included."""
    restarts_per_job: float
    preemptions_per_job: float
    mean_unfairness: float
    """ρ = completion time over that on an equal part of the cluster (`fairness`); 1 is an equal part."""
    p99_unfairness: float
    worst_unfairness: float
    device_hours: float
    cost: float
    deadlines_met: float
    """Part of the jobs with a deadline that succeeded by then; 0 without such jobs."""
    num_deadlines: int
    """Jobs with a deadline."""
    energy_kwh: float
    num_decisions: int


def report_of(outcome: SimulationOutcome, cluster: str = "") -> SimulationReport:
    jobs = [job for job in outcome.jobs if job.state is JobState.SUCCEEDED]
    limits = [(job, job.deadline_s) for job in outcome.jobs if job.deadline_s is not None]
    jcts = [job.jct_s for job in jobs]
    unfairness = [job.jct_s / job.fair_s for job in jobs if job.fair_s > 0]
    first_s = min((job.submitted_s for job in outcome.jobs), default=0.0)
    makespan_s = max((job.ended_s for job in outcome.jobs), default=0.0) - first_s
    capacity = outcome.num_devices * makespan_s
    service = sum(job.service_device_s for job in outcome.jobs)
    num = max(1, len(outcome.jobs))
    return SimulationReport(
        policy=outcome.policy,
        cluster=cluster,
        num_devices=outcome.num_devices,
        num_jobs=len(outcome.jobs),
        num_failed=len(outcome.jobs) - len(jobs),
        mean_jct_s=mean(jcts),
        median_jct_s=percentile(jcts, 50),
        p99_jct_s=percentile(jcts, 99),
        mean_wait_s=mean([job.began_s - job.submitted_s for job in jobs if job.began_s is not None]),
        makespan_s=makespan_s,
        utilisation=outcome.useful_device_s / capacity if capacity else 0.0,
        held=service / capacity if capacity else 0.0,
        restarts_per_job=sum(job.num_restarts for job in outcome.jobs) / num,
        preemptions_per_job=sum(job.num_preemptions for job in outcome.jobs) / num,
        mean_unfairness=mean(unfairness),
        p99_unfairness=percentile(unfairness, 99),
        worst_unfairness=max(unfairness, default=0.0),
        device_hours=service / 3600.0,
        cost=sum(job.cost for job in outcome.jobs),
        deadlines_met=mean(
            [float(job.state is JobState.SUCCEEDED and job.ended_s <= limit_s) for job, limit_s in limits]
        ),
        num_deadlines=len(limits),
        energy_kwh=sum(job.energy_kwh for job in outcome.jobs),
        num_decisions=outcome.num_decisions,
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def percentile(values: Sequence[float], part: float) -> float:
    """Interpolate linearly between the two nearest values, as numpy does; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * part / 100.0
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def slowdowns(jobs: Sequence[JobOutcome], base: Sequence[JobOutcome]) -> list[float]:
    """Return each job's completion time over its own in another simulation of the same workload."""
    before = {job.job: job.jct_s for job in base}
    return [job.jct_s / before[job.job] for job in jobs if before.get(job.job)]


_COLUMNS = (
    ("policy", "policy", "{}"),
    ("cluster", "cluster", "{}"),
    ("mean_jct_s", "mean JCT", "{:.0f} s"),
    ("median_jct_s", "median", "{:.0f} s"),
    ("p99_jct_s", "p99", "{:.0f} s"),
    ("mean_wait_s", "mean wait", "{:.0f} s"),
    ("makespan_s", "makespan", "{:.0f} s"),
    ("utilisation", "used", "{:.0%}"),
    ("restarts_per_job", "restarts/job", "{:.2f}"),
    ("p99_unfairness", "ρ p99", "{:.2f}"),
    ("worst_unfairness", "ρ worst", "{:.2f}"),
    ("cost", "cost", "{:.2f}"),
    ("deadlines_met", "in time", "{:.1%}"),
    ("energy_kwh", "kWh", "{:.1f}"),
)
_ONLY_WHERE_SET = {"cost": "cost", "deadlines_met": "num_deadlines", "energy_kwh": "energy_kwh"}
"""Column → the field without which it is left out."""


def table(reports: Sequence[SimulationReport]) -> str:
    columns = [c for c in _COLUMNS if any(getattr(r, _ONLY_WHERE_SET.get(c[0], "num_devices")) for r in reports)]
    cells = [[title for _, title, _ in columns]]
    cells += [[form.format(getattr(report, name)) for name, _, form in columns] for report in reports]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
