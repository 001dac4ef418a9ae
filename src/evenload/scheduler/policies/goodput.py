"""``goodput``: elastic; devices go where measured speed curves say that they help most, weighted by what is left to do.

Jobs stand in the order of ``x · use^fairness / (1 + waited / ageing)``, with x the seconds that a job still needs on one
device, the least first. Each takes, out of what those before it left, the number of devices k that makes

    s(k) / (N + c · n · k)

greatest: s is its measured speed-up, N the number of all devices, n the number of jobs behind it. That is the least sum of
its own time and of the time by which it keeps the others waiting: T(k) seconds with k of N devices hold n jobs up for
T(k) · k / N seconds each. On the picture of s it is the tangent from ``−N / (c·n)`` on the axis of k to the concave hull of
the curve: alone, a job takes all that speeds it up at all; before a long queue it takes no more than it uses well. c is
below 1 because those behind mostly run meanwhile too, on devices that they use less well.

Pollux (Qiao et al., OSDI 2021) makes a power mean of all speed-ups greatest, which treats a job of a minute and one of ten
hours alike. That jobs with little left deserve more devices the more others wait is heSRPT (Berg, Vesilo, Harchol-Balter,
2020), for curves like k^p; there the first of many takes p / (1 − p) · N / n devices, as it does here.

Sizes are powers of two: a change is then never a small one, and jobs fit into hosts without leaving gaps.
"""

from __future__ import annotations

from evenload.scheduler.core.estimates import restart_s
from evenload.scheduler.core.values import Job
from evenload.scheduler.core.view import View, Wishes
from evenload.scheduler.policies.elastic import single_s, speedups
from evenload.scheduler.policies.shares import relative_use

_PRICE = 0.7
"""c. Tuned together with nothing else, on two of the four workloads that docs/scheduling-policies.md names."""


def goodput(view: View) -> Wishes:
    """Sizes one job after the other, a restart counted against each change."""
    uses = relative_use(view) if view.settings.fairness > 0 else {}
    everybody = [*view.jobs, *view.settled]
    keys = {job.id: _key(view, job, uses) for job in everybody}
    order = sorted(everybody, key=lambda job: keys[job.id])
    movable = {job.id for job in view.jobs}
    num_all = view.num_devices + sum(len(job.target or job.devices) for job in view.settled)
    kept = {job.id: len(job.devices) for job in view.jobs if job.id in view.keeping}
    left = view.num_devices - sum(kept.values())
    sizes = {}
    for place, job in enumerate(order):
        if job.id not in movable:
            continue
        floor = kept.get(job.id, 0)
        price = _PRICE * (len(order) - 1 - place) / max(1, num_all)
        sizes[job.id] = _size(view, job, floor, left + floor, price)
        left -= sizes[job.id] - floor
    return Wishes(order=[job for job in order if job.id in movable], preempts=True, sizes=sizes)


def _key(view: View, job: Job, uses: dict[str, float]) -> tuple[int, float, float, str]:
    score = max(single_s(view, job), 1.0) / (1.0 + job.waited_until(view.now_s) / view.settings.ageing_s)
    if uses:
        score *= uses.get(job.spec.user, 1.0) ** view.settings.fairness
    return -job.spec.priority, score, job.submitted_s, job.id


def _size(view: View, job: Job, floor: int, most: int, price: float) -> int:
    """The number of devices between `floor` and `most` with the best speed-up for its price; `floor` where none fits."""
    curve, present = speedups(view, job), len(job.devices)
    lowest = max(job.spec.needs.min_devices, floor)
    if not job.spec.preemptible and present:
        return present
    one_s = single_s(view, job)
    best, best_value = floor, 0.0
    for size in candidates(lowest, len(curve) - 1, present):
        speedup = curve[size] - view.device_cost * (size - 1)
        if size > most or speedup <= 0:
            continue
        value = speedup / (1.0 + price * size)
        if present and size != present:
            horizon_s = min(view.settings.horizon_s, one_s / curve[size])
            value *= max(0.0, 1.0 - restart_s(job, view.settings) / max(horizon_s, 1e-9))
        if value > best_value:
            best, best_value = size, value
    return best


def candidates(lowest: int, largest: int, present: int) -> list[int]:
    """The sizes looked at: powers of two, the least, the largest, and what the job has."""
    powers = {1 << power for power in range(largest.bit_length())}
    return sorted(size for size in powers | {lowest, largest, present} if lowest <= size <= largest)
