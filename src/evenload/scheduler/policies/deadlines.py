"""The cheapest way to end a job by its deadline: which devices now, and whether to wait for cheap hours. Pure.

The work W of a job is the seconds it still needs on its minimum of devices of speed 1, times `Settings.deadline_margin`. An
option is a kind and a number of devices, with its rate (work a second) and its price in normal and in cheap hours. In each of
these two periods the lower convex hull of (rate, price) consists of segments of rising slope: a segment adds Δrate for
Δprice, so it does Δrate · T of work at Δprice/Δrate each in the T seconds of its period before the deadline. Taking all
segments by their slope until they do W is the cheapest plan (the greedy solution of a linear program). The slope of the
last one, λ, decides on now: of the present hull all that costs up to λ. What may be done at any time is done first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from evenload.scheduler.core.estimates import restart_s, work_left
from evenload.scheduler.core.layout import Layout
from evenload.scheduler.core.policy import PolicyInput
from evenload.scheduler.core.values import Job, Needs
from evenload.scheduler.policies.elastic import speedups
from evenload.scheduler.policies.goodput import candidates

_SAME = 1e-9
_WORTH = 2.0
"""A running job changes to save money only where that saves this many times the price of its restart."""


class KindOffer(NamedTuple):
    """The devices of one kind that a job may use."""

    kind: str
    num_devices: int
    speed: float
    price: float
    """An hour of one device; like the speed, the mean over the kind's devices."""
    cheap_price: float


class DeviceOption(NamedTuple):
    kind: str
    num_devices: int
    rate: float
    """Work a second, in seconds on the job's minimum of devices of speed 1."""
    price: float
    """An hour of all devices."""
    cheap_price: float


class DeadlinePlan(NamedTuple):
    """The decision on one job for now."""

    options: tuple[DeviceOption, ...]
    """Those it may use now, the best first; empty: it waits for cheap hours."""
    slack_s: float
    """Time that it could still lose, on its fastest option, with the margin."""
    short_s: float = 0.0
    """Time by which it misses its deadline on its fastest option, if it starts now and its estimate is exact."""
    must_lead: bool = False
    """It can't afford to wait for other jobs."""
    is_unknown: bool = False
    """Nothing is known of its work."""


def offers_of(layout: Layout, needs: Needs) -> list[KindOffer]:
    """Return the kinds of which there are enough devices for the job, on one host if it needs that; the fastest first."""
    found: dict[str, dict[int, list[tuple[int, float, float, float]]]] = {}
    for (index, host), num in sorted(Counter(zip(layout.pool_of, layout.host_of, strict=True)).items()):
        pool = layout.pools[index]
        if pool.suits(needs):
            place = host if needs.one_host else 0
            row = (num, pool.speed, pool.price_per_hour, pool.cheap_price_per_hour)
            found.setdefault(pool.kind, {}).setdefault(place, []).append(row)
    offers = []
    for kind, places in found.items():
        sizes = {place: sum(num for num, *_ in rows) for place, rows in places.items()}
        rows = [row for place, of_place in places.items() if sizes[place] >= needs.min_devices for row in of_place]
        if rows:
            total = sum(num for num, *_ in rows)
            means = (sum(row[0] * row[column] for row in rows) / total for column in (1, 2, 3))
            offers.append(KindOffer(kind, max(sizes.values()), *means))
    return sorted(offers, key=lambda offer: (-offer.speed, offer.price))


def work_s(inputs: PolicyInput, job: Job, fastest: float) -> float | None:
    """Return the seconds a job still needs on its minimum of devices of speed 1; None if nothing is known.

    Estimates and reports are taken to be of its present devices, without any of the fastest it may use: so they are
    not below what it needs. Where its estimate says so, the last report of a waiting job is from slower ones.
    """
    layout, spec = inputs.layout, job.spec
    held = [layout.devices[layout.index[device]].speed for device in job.devices]
    speed = min(held) if held else fastest
    left = work_left(job, inputs.now_s)
    estimated = None
    if spec.estimate_s is not None and job.total and job.done:
        estimated = spec.estimate_s * (1 - min(1.0, job.done / job.total)) * fastest
    if left is not None and (job.rates or job.rate_per_s > 0):
        num = spec.needs.min_devices
        rate = job.rates[min(num, len(job.rates)) - 1] if job.rates else job.rate_per_s
        if rate > 0:
            reported = left / rate * speed
            if held or estimated is None:
                return reported
            slowest = min([pool.speed for pool in layout.pools])  # nobody knows where its last report is from
            return min(reported, max(estimated, left / rate * slowest))
    if spec.estimate_s is None:
        return None
    if estimated is not None:
        return estimated
    left_s = spec.estimate_s * fastest - job.held_until(inputs.now_s) * speed
    return left_s if left_s > 0 else None


def deadline_plan(inputs: PolicyInput, job: Job, offers: Sequence[KindOffer]) -> DeadlinePlan:
    """Plan a job that has a deadline and at least one offer; see the module."""
    settings, now_s = inputs.settings, inputs.now_s
    options, work = _options(inputs, job, offers), work_s(inputs, job, offers[0].speed)
    fastest = sorted(options, key=lambda option: (-option.rate, option.price))
    if work is None or job.spec.deadline_s is None:
        return DeadlinePlan(tuple(fastest), 0.0, must_lead=True, is_unknown=True)
    start_s = restart_s(job, settings)
    left_s = job.spec.deadline_s - now_s - (0.0 if job.devices else start_s)
    slack_s = left_s - work * settings.deadline_margin / fastest[0].rate
    short_s = work / fastest[0].rate - left_s
    if slack_s <= settings.min_run_s + 2 * start_s:
        in_time = [option for option in fastest if option.rate * left_s >= work]
        return DeadlinePlan(tuple(in_time or fastest), slack_s, max(0.0, short_s), must_lead=True)
    is_cheap, _ = inputs.tariff.next_change_s(now_s)
    at_s = now_s + start_s
    num_spans = inputs.tariff.num_spans(now_s, job.spec.deadline_s)
    cheap_s = max(0.0, inputs.tariff.cheap_s(at_s, job.spec.deadline_s) - start_s * num_spans)
    times_s = {True: cheap_s, False: max(0.0, left_s - cheap_s - start_s * num_spans)}
    hulls = {cheap: _hull(options, cheap) for cheap in (True, False)}
    chosen = _affordable(hulls[is_cheap], is_cheap, _slope(hulls, times_s, work * settings.deadline_margin))
    present = _present(inputs, job, options)
    if present is not None and chosen and chosen[0].rate < present.rate * (1 - _SAME):
        # It would lose a restart, and must not need another to come back.
        times_s = {cheap: max(0.0, seconds - 2 * start_s) for cheap, seconds in times_s.items()}
        chosen = _affordable(hulls[is_cheap], is_cheap, _slope(hulls, times_s, work * settings.deadline_margin))
    if job.devices and (stays := _stays(inputs, job, options, chosen, work, is_cheap)) is not None:
        return DeadlinePlan((stays,), slack_s)
    return DeadlinePlan(tuple(chosen), slack_s)


def _options(inputs: PolicyInput, job: Job, offers: Sequence[KindOffer]) -> list[DeviceOption]:
    needs = job.spec.needs
    curve = speedups(inputs, job)
    one = curve[needs.min_devices] or 1.0
    options = []
    for offer in offers:
        most = min(len(curve) - 1, offer.num_devices)
        for num in candidates(needs.min_devices, max(most, needs.min_devices), len(job.devices)):
            rate = offer.speed * curve[num] / one
            if rate > 0:
                options.append(DeviceOption(offer.kind, num, rate, num * offer.price, num * offer.cheap_price))
    return options


def _price(option: DeviceOption, is_cheap: bool) -> float:
    return option.cheap_price if is_cheap else option.price


def _hull(options: Iterable[DeviceOption], is_cheap: bool) -> list[DeviceOption]:
    """Return the corners of the lower convex hull from (0, 0), by growing rate."""
    corners: list[DeviceOption] = [DeviceOption("", 0, 0.0, 0.0, 0.0)]
    for option in sorted(options, key=lambda o: (o.rate, -_price(o, is_cheap))):
        while len(corners) > 1 and _step(corners[-2], corners[-1], is_cheap) >= _step(corners[-2], option, is_cheap):
            corners.pop()
        if option.rate > corners[-1].rate:
            corners.append(option)
    return corners


def _step(low: DeviceOption, high: DeviceOption, is_cheap: bool) -> float:
    """Return the slope from one option to a faster one."""
    if high.rate <= low.rate:
        return 0.0 if _price(high, is_cheap) <= _price(low, is_cheap) else float("inf")
    return (_price(high, is_cheap) - _price(low, is_cheap)) / (high.rate - low.rate)


def _slope(hulls: dict[bool, list[DeviceOption]], times_s: dict[bool, float], work: float) -> float:
    """Return λ: the slope of the last segment that the work needs."""
    segments = sorted(
        (_step(low, high, is_cheap), (high.rate - low.rate) * times_s[is_cheap])
        for is_cheap, hull in hulls.items()
        for low, high in pairwise(hull)
        if times_s[is_cheap] > 0
    )
    for slope, amount in segments:
        work -= amount
        if work <= 0:
            return slope
    return float("inf")


def _affordable(hull: list[DeviceOption], is_cheap: bool, slope: float) -> list[DeviceOption]:
    """Return the hull's options up to a slope, the fastest first."""
    limit = slope * (1 + _SAME)
    return [high for low, high in reversed(list(pairwise(hull))) if _step(low, high, is_cheap) <= limit]


def _stays(
    inputs: PolicyInput,
    job: Job,
    options: Iterable[DeviceOption],
    chosen: Sequence[DeviceOption],
    work: float,
    is_cheap: bool,
) -> DeviceOption | None:
    """Return the option a running job is on if a change doesn't pay: nothing faster is needed, and little is saved."""
    present = _present(inputs, job, options)
    if present is None or present in chosen[:1]:
        return present
    if chosen and chosen[0].rate > present.rate * (1 + _SAME):
        return None
    cheapest = min(
        [_price(o, is_cheap) / o.rate for o in chosen[:1]] or [min(o.price, o.cheap_price) / o.rate for o in options]
    )
    saved = work * (_price(present, is_cheap) / present.rate - cheapest)
    return present if saved <= _WORTH * restart_s(job, inputs.settings) * present.price else None


def _present(inputs: PolicyInput, job: Job, options: Iterable[DeviceOption]) -> DeviceOption | None:
    """Return the option that a running job is on; None if it waits, or has several kinds."""
    kinds = {inputs.layout.devices[inputs.layout.index[device]].kind for device in job.devices}
    return next((o for o in options if {o.kind} == kinds and o.num_devices == len(job.devices)), None)
