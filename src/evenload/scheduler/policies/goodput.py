"""``goodput``: elastic; assign devices by measured speed curves, weighted by the remaining work.

The sizes k maximise ``Σ λ_j · s_j(k_j)`` over all jobs of a class, higher classes first. s is the measured speed-up over
one device; `elastic.share_out` finds the maximum by marginal gain on concave hulls. The weight λ is the cost to all jobs
of one second of a job's work on one device. Jobs are sorted by ``x · use^fairness / (1 + waited / ageing)``, where x is
the remaining seconds on one device; the r-th from the end has

    λ = (r^q − (r − 1)^q)^(1/q)

which is exact if all curves are k^(1 − 1/q) (Berg, Vesilo, Harchol-Balter, "heSRPT: Parallel scheduling to minimize mean
slowdown", 2020). A job with little work left gets more devices the more jobs wait behind it. q → 1 weighs all jobs alike
and maximises the work done per second; q → ∞ weighs by the number of jobs behind, which is shortest first. If the
remaining work is only guessed from the work done, the order is less reliable, and q is smaller.

Pollux (Qiao et al., OSDI 2021) maximises a power mean of all speed-ups, which treats a job of a minute and one of ten
hours equally. Sizes are powers of two, so that changes are never small and jobs fill hosts without gaps.
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import groupby

from evenload.scheduler.core.estimates import change_s, left_s
from evenload.scheduler.core.limits import LimitUse
from evenload.scheduler.core.policy import PolicyDecision, PolicyInput
from evenload.scheduler.core.values import Job
from evenload.scheduler.policies.devices_left import devices_left
from evenload.scheduler.policies.elastic import (
    USUAL_RESTART_S,
    Bid,
    Churn,
    churn_of,
    kept_devices,
    share_out,
    single_s,
    speedups,
    worth_of_change,
)
from evenload.scheduler.policies.shares import relative_use

_Q_KNOWN, _Q_GUESSED = 3.0, 1.3
"""Tuned on two of the four workloads that docs/scheduling-policies.md names, and on samples of their jobs."""

_LEAST_RUN = 10.0
"""An elastic job runs for this many times what a change costs beyond `USUAL_RESTART_S` before it loses its protections."""

_LINE = 1.5
"""Skip jobs that wait behind others which together request this many times all devices."""


def goodput(inputs: PolicyInput) -> PolicyDecision:
    """Choose sizes class by class, a restart counted against each change."""
    fairness = inputs.settings.fairness
    uses = {name: use**fairness for name, use in relative_use(inputs).items()} if fairness > 0 else {}
    everyone = [*inputs.jobs, *inputs.settled]
    alone_s = {job.id: single_s(inputs, job) for job in everyone}
    keys = {job.id: _key(inputs, job, alone_s[job.id], uses) for job in everyone}
    order = sorted(everyone, key=lambda job: keys[job.id])
    movable = {job.id for job in inputs.jobs}
    kept = {job.id: num for job in inputs.jobs if (num := _num_kept(inputs, job))}
    settled = [job for job in inputs.holders if job.id not in movable]
    limits, in_line = LimitUse(inputs.users, settled), LimitUse(inputs.users, settled)
    left, churn = devices_left(inputs), churn_of(inputs)
    for job in inputs.jobs:
        if job.id in kept:
            left.keep(job, kept[job.id])
            limits.add(job, kept[job.id])
        if job.devices:  # the rest of them it can give up for another of its user
            in_line.add(job, max(kept.get(job.id, 0), job.spec.needs.min_devices))
    sizes = dict.fromkeys(movable, 0)
    for _, group in groupby(order, key=lambda job: job.spec.priority):
        of_class = list(group)
        bids: list[Bid] = []
        line = left.times(_LINE)
        for rank, job in zip(range(len(of_class), 0, -1), of_class, strict=True):
            if not job.devices:
                if not line.has(job, 0) or in_line.reached(job):
                    continue
                line.take(job, job.spec.needs.min_devices)
                in_line.add(job, job.spec.needs.min_devices)
            if job.id in movable:
                bids.append(_bid(inputs, job, alone_s[job.id], kept.get(job.id, 0), rank, churn))
        sizes |= share_out(bids, left, limits)
    return PolicyDecision(order=[job for job in order if job.id in movable], preempts=True, sizes=sizes)


def _key(inputs: PolicyInput, job: Job, one_s: float, uses: dict[str, float]) -> tuple[int, float, float, str]:
    score = max(one_s, 1.0) / (1.0 + job.waited_until(inputs.now_s) / inputs.settings.ageing_s)
    if uses:
        score *= uses.get(job.spec.user, 1.0)
    return -job.spec.priority, score, job.submitted_s, job.id


def _num_kept(inputs: PolicyInput, job: Job) -> int:
    """Return how many devices the job keeps in any case.

    None of an elastic job that can save, however young it is: its restart counts against each change, and a stop. Where that
    costs more than usual, `min_run_s` and `max_preemptions_per_hour` hold for a while.
    """
    needs, kept = job.spec.needs, kept_devices(inputs, job)
    if not job.spec.preemptible:
        return len(job.devices)
    dear_s = change_s(job, inputs.settings) - USUAL_RESTART_S
    is_free = needs.min_devices < needs.max_devices and inputs.now_s - job.attempt_began_s >= _LEAST_RUN * dear_s
    return 0 if is_free else kept


def _weight(inputs: PolicyInput, job: Job, rank: int) -> float:
    """Weigh a job; one that never ran counts as known: it is taken to be short until it reports."""
    is_known = job.first_began_s is None or job.total is not None or left_s(job, inputs.now_s) is not None
    return _weight_of(rank, _Q_KNOWN if is_known else _Q_GUESSED)


@lru_cache(maxsize=2**18)
def _weight_of(rank: int, q: float) -> float:
    return float((rank**q - (rank - 1) ** q) ** (1.0 / q))


def _bid(inputs: PolicyInput, job: Job, one_s: float, floor: int, rank: int, churn: Churn) -> Bid:
    """Value each size for the job, the `rank`-th from the end of its class."""
    curve, present, weight = speedups(inputs, job), len(job.devices), _weight(inputs, job, rank)
    if not present and job.spec.needs.min_devices == job.spec.needs.max_devices:
        size = job.spec.needs.min_devices
        return Bid(job, 0, (size,), (weight * curve[size],), 0.0, curve)

    def value(size: int) -> float:
        worth = weight * curve[size]
        if present and size != present:
            worth *= worth_of_change(inputs, job, one_s / max(curve[size], 1e-9), churn)
        return worth

    lowest = max(job.spec.needs.min_devices, floor + 1)
    sizes = candidates(lowest, len(curve) - 1, present) if not floor or job.spec.preemptible else ()
    return Bid(job, floor, sizes, tuple(map(value, sizes)), weight * curve[floor] if floor else 0.0, curve)


@cache
def candidates(lowest: int, largest: int, present: int) -> tuple[int, ...]:
    """Return the sizes considered: powers of two, the least, the largest, and the present one."""
    powers = {1 << power for power in range(largest.bit_length())}
    return tuple(sorted(size for size in powers | {lowest, largest, present} if lowest <= size <= largest))
