"""Sizes of elastic jobs by marginal gain on concave hulls of measured speed curves.

The value of k devices to job j is v_j(k) = w_j · s_j(k), with s_j its measured speed-up over one device and w_j its
weight. A size other than the present one costs a running job a restart of c_j seconds, so v_j is multiplied by
(H − c_j)/H with the horizon H, the expected time until the job ends or is changed again (`Churn`); small gains therefore
move no job. The upper concave hull of (k, v_j(k)) consists of segments of falling slope. Taking all jobs' segments
steepest first, while they fit, maximises Σ v_j(k_j) up to the last segment (the greedy solution of the Lagrangian
relaxation). A gang of at least m devices is one segment from 0 to m.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from evenload.scheduler.core.estimates import change_s, work_left
from evenload.scheduler.core.limits import LimitUse
from evenload.scheduler.core.policy import PolicyInput
from evenload.scheduler.core.states import RUNNING
from evenload.scheduler.core.values import Job, Settings
from evenload.scheduler.policies.devices_left import DevicesLeft, devices_left
from evenload.scheduler.policies.guesses import guessed_s

_PRIOR_EXPONENT = 0.9
"""A job whose speed was never measured is taken to speed up like k^0.9, within one host."""
USUAL_RESTART_S = 30.0
_GROWTH_OF_HORIZON = 0.7
"""Exponent of a change's cost. With 1, jobs are changed about as often at 180 s as at 30 s; with 0.3 some hardly grow."""
_PART_OF_MEAN = 0.1
_REST = 4.0
"""A job runs for this many times what a change costs beyond `USUAL_RESTART_S` before another size is worth anything."""
_LEAST_WORTH = 1e-6
_ALL_SIZES = 8
"""Up to so many devices every size is looked at; beyond, multiples of four and the largest."""


class Bid(NamedTuple):
    job: Job
    floor: int
    """It has this many in any case: 0, or its minimum, or what can't be taken from it."""
    sizes: tuple[int, ...]
    """Growing, all above `floor`."""
    values: tuple[float, ...]
    floor_value: float
    speedups: Sequence[float]
    """Of 0, 1, 2, … devices."""


def speedups(inputs: PolicyInput, job: Job) -> Sequence[float]:
    """Return the speed-up over one device of 0, 1, 2, … devices, up to as many as the job can use."""
    needs, rates = job.spec.needs, job.rates
    if rates and max(rates) > 0:
        most = max(min(needs.max_devices, len(rates)), needs.min_devices, len(job.devices))
        one = rates[0] if rates[0] > 0 else next(rate / (k + 1) for k, rate in enumerate(rates) if rate > 0)
        known = [0.0, *(rate / one for rate in rates[:most])]
        return known + [known[-1]] * (most + 1 - len(known))
    most = max(min(needs.max_devices, inputs.layout.host_size), needs.min_devices, len(job.devices))
    return _prior(most)


@cache
def _prior(most: int) -> tuple[float, ...]:
    return tuple(float(k) ** _PRIOR_EXPONENT for k in range(most + 1))


def single_s(inputs: PolicyInput, job: Job) -> float:
    """Return the seconds the job still needs on one device; guessed from what it has done if its work is unknown."""
    spec, num, now_s = job.spec, job.spec.needs.min_devices, inputs.now_s
    left = None if job.total is None else work_left(job, now_s)
    rate = job.rates[0] if job.rates else 0.0
    if rate > 0 and left is not None:
        return left / rate
    if left is None and spec.estimate_s is not None and not spec.estimate_source:
        left_s = spec.estimate_s - job.held_until(now_s)
        if left_s > 0:
            return left_s * num
    if rate > 0:
        done = job.done + (job.rate_per_s * (now_s - job.reported_s) if job.state is RUNNING else 0.0)
        return guessed_s(inputs, job, done / rate / num) * num
    return guessed_s(inputs, job, job.service_until(now_s) / num) * num


class Churn(NamedTuple):
    """Frequency of changes of the running elastic jobs."""

    held_s: float
    """Time for which they have held devices, and the number of their changes in it."""
    num_changes: int

    def until_next_s(self, lost_s: float, settings: Settings) -> float:
        """Return the expected time until a job is changed again, where each change costs it `lost_s`.

        At least `horizon_s`, and longer where a change costs more than `USUAL_RESTART_S`, because such jobs are changed less
        often; but not in proportion, so that a change must gain more there. In a calm queue more: a part of the mean time
        between changes, whose tail is heavy.
        """
        longer = float(max(1.0, lost_s / USUAL_RESTART_S) ** _GROWTH_OF_HORIZON)
        return max(settings.horizon_s * longer, _PART_OF_MEAN * self.held_s / (self.num_changes + 1))


def churn_of(inputs: PolicyInput) -> Churn:
    held_s, num = 0.0, 0
    for job in inputs.jobs:
        if job.devices and job.spec.needs.min_devices < job.spec.needs.max_devices:
            held_s += job.held_until(inputs.now_s)
            num += job.attempt - 1
    return Churn(held_s, num)


def kept_devices(inputs: PolicyInput, job: Job) -> int:
    """Return how many devices can't be taken from a job now; one that gives some back without a stop keeps its minimum."""
    if job.id not in inputs.keeping:
        return 0
    return len(job.devices) if job.spec.resize_s is None else min(len(job.devices), job.spec.needs.min_devices)


def worth_of_change(inputs: PolicyInput, job: Job, seconds: float, churn: Churn) -> float:
    """Return the part of a size's value that is left after the change, for a job that would run there for `seconds`.

    (H − c) / H with the cost c of the change, and the horizon H: until the job ends, or is changed again. Next to nothing soon
    after a change that costs more than usual; a job that must give up a device still prefers the larger of other sizes.
    """
    settings = inputs.settings
    lost_s = change_s(job, settings)
    if inputs.now_s - job.attempt_began_s < _REST * (lost_s - USUAL_RESTART_S):
        return _LEAST_WORTH
    horizon_s = min(seconds, churn.until_next_s(lost_s, settings))
    return max(_LEAST_WORTH, 1.0 - lost_s / max(horizon_s, 1e-9))


def bid(inputs: PolicyInput, job: Job, weight: float, floor: int, churn: Churn) -> Bid:
    """Value all sizes above `floor`, with a restart counted against each change."""
    curve = speedups(inputs, job)
    present = len(job.devices)
    lowest = max(job.spec.needs.min_devices, floor + 1)
    sizes = [
        k for k in range(lowest, len(curve)) if k <= _ALL_SIZES or k % 4 == 0 or k == len(curve) - 1 or k == present
    ]
    if job.id in inputs.keeping and not job.spec.preemptible:  # such as a run that has not reported yet
        sizes = [] if job.spec.resize_s is None else [k for k in sizes if k <= present]
    one_s = single_s(inputs, job)

    def value(k: int) -> float:
        worth = weight * curve[k]
        if present and k != present and k:
            worth *= worth_of_change(inputs, job, one_s / max(curve[k], 1e-9), churn)
        return worth

    return Bid(job, floor, tuple(sizes), tuple(value(k) for k in sizes), value(floor) if floor else 0.0, curve)


def share_out(bids: Sequence[Bid], left: DevicesLeft, limits: LimitUse) -> dict[str, int]:
    """Return the sizes that maximise the sum of values within what is left, in which the floors have theirs.

    No user gets more than the limits allow, in which the floors are counted too; what jobs get is counted in both.
    """
    segments = []
    for index, offer in enumerate(bids):
        for low, high, slope in _hull(offer):
            segments.append((-slope, index, low, high))
    segments.sort()
    sizes = {offer.job.id: offer.floor for offer in bids}
    for _, index, low, high in segments:
        offer = bids[index]
        job = offer.job
        if left.num_left <= 0:
            break
        if sizes[job.id] != low or (low == 0 and not job.devices and limits.reached(job)):
            continue
        room = high - low if left.has(job, high - low) else left.most(job)
        # No limit stops a job that runs, but it may become smaller for another of its user.
        own = job.spec.needs.min_devices if job.devices and not offer.floor else 0
        most = max(limits.most(job.spec.user, room), min(room, own - low))
        high = high if high - low <= most else _largest_that_pays(offer, low, low + most)
        if high > low and offer.speedups[high] > offer.speedups[low]:
            sizes[job.id] = high
            left.take(job, high - low)
            if low == 0:
                limits.add(job, high)
            else:
                limits.grow(job.spec.user, high - low)
    return sizes


def spread_rest(
    inputs: PolicyInput, order: Sequence[Job], planned: Mapping[str, int] = MappingProxyType({})
) -> Mapping[str, int]:
    """Size elastic jobs: the minimum for each in the given order, and the rest where it speeds up most.

    Rigid jobs, and those for which no devices are left or which a limit keeps waiting, are not in the result; nor are those
    whose sizes are `planned`: in their turn they get these, or what is left where that is less.
    """
    if not any(job.spec.needs.min_devices < job.spec.needs.max_devices for job in order):
        return {}
    left, churn, limits = devices_left(inputs), churn_of(inputs), LimitUse(inputs.users, ())
    owns = {job.id: _least(inputs, job) for job in inputs.holders}
    for job in inputs.holders:
        limits.add(job, owns[job.id])
    for job in order:
        if job.id in inputs.keeping:
            left.keep(job, owns[job.id])
    bids = []
    for job in order:
        if left.num_left <= 0 and job.id not in inputs.keeping:
            continue
        needs, present = job.spec.needs, len(job.devices)
        own = owns[job.id] if present else needs.min_devices
        least = max(planned.get(job.id, own), kept_devices(inputs, job))
        num_kept = min(least, present)
        if num_kept:
            if job.id not in inputs.keeping and not left.keep(job, num_kept):
                continue
        elif limits.reached(job) or not left.has(job, own):
            continue
        else:
            least = own if least == own else max(own, min(least, left.most(job)))
            limits.add(job, own)
        if least > num_kept:
            left.take(job, least - num_kept)
        limits.grow(job.spec.user, least - own)
        if needs.min_devices < needs.max_devices and job.id not in planned:
            bids.append(bid(inputs, job, 1.0, least, churn))
    return share_out(bids, left, limits)


def _least(inputs: PolicyInput, job: Job) -> int:
    """Return how many devices a job has in any case if it is to have some: all that it holds if no policy can resize it."""
    least = job.spec.needs.min_devices
    if job.state is RUNNING and least < job.spec.needs.max_devices:
        return max(least, kept_devices(inputs, job))
    return len(job.devices) or least


def starting_sizes(inputs: PolicyInput, order: Sequence[Job]) -> Mapping[str, int]:
    """Size the elastic jobs that start, for a policy that resizes no running one: they share what no other job needs."""
    pending = [job for job in order if not job.devices]
    if not inputs.free or not any(job.spec.needs.min_devices < job.spec.needs.max_devices for job in pending):
        return {}
    left, churn = DevicesLeft(inputs.layout, inputs.choices, inputs.free), churn_of(inputs)
    limits, bids = LimitUse(inputs.users, inputs.holders), []
    for job in pending:
        needs = job.spec.needs
        if left.num_left <= 0:
            break
        if limits.reached(job) or not left.has(job, needs.min_devices):
            continue
        limits.add(job, needs.min_devices)
        left.take(job, needs.min_devices)
        if needs.min_devices < needs.max_devices:
            bids.append(bid(inputs, job, 1.0, needs.min_devices, churn))
    return share_out(bids, left, limits)


def _hull(offer: Bid) -> list[tuple[int, int, float]]:
    """Return the upper concave hull above the floor as (from, to, slope) with falling slopes; only where it rises."""
    if len(offer.sizes) == 1:
        rise = offer.values[0] - offer.floor_value
        low, high = offer.floor, offer.sizes[0]
        return [(low, high, rise / (high - low))] if rise > 0 else []
    corners: list[tuple[int, float]] = [(offer.floor, offer.floor_value)]
    for size, value in zip(offer.sizes, offer.values, strict=True):
        while len(corners) >= 2:
            (k1, v1), (k2, v2) = corners[-2], corners[-1]
            if (v2 - v1) * (size - k2) > (value - v2) * (k2 - k1):
                break
            corners.pop()
        corners.append((size, value))
    return [(k1, k2, (v2 - v1) / (k2 - k1)) for (k1, v1), (k2, v2) in pairwise(corners) if v2 > v1]


def _largest_that_pays(offer: Bid, low: int, most: int) -> int:
    """Return the best size above `low` that fits; `low` if none is better."""
    if not offer.job.devices:  # it starts with whatever is left
        sizes = range(max(low, offer.job.spec.needs.min_devices), min(most, len(offer.speedups) - 1) + 1)
        return max(sizes, key=offer.speedups.__getitem__, default=low)
    best, best_value = low, offer.floor_value
    for size, value in zip(offer.sizes, offer.values, strict=True):
        if size == low:
            best_value = value
        elif low < size <= most and value > best_value:
            best, best_value = size, value
    return best
