"""``cost``: each job ends before its deadline at the least price (`deadlines`); other jobs follow ``default``.

A job whose slack on its fastest devices is used up goes first in its class, least slack first. A job with a priority below 0 and
no deadline waits for cheap hours, at most `Settings.cheap_wait_s`, and takes the kind that does most for its price. A job
whose deadline can't be met any more runs at best effort, as one without a deadline.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from evenload.scheduler.core.policy import PolicyDecision, PolicyInput
from evenload.scheduler.core.values import Job, Needs
from evenload.scheduler.policies.deadlines import DeadlinePlan, KindOffer, deadline_plan, offers_of
from evenload.scheduler.policies.default import default
from evenload.scheduler.policies.elastic import kept_devices, spread_rest


def cost(inputs: PolicyInput) -> PolicyDecision:
    """Plan jobs with deadlines and low priorities, and order and size the others by ``default``."""

    @cache
    def offers(needs: Needs) -> list[KindOffer]:
        return offers_of(inputs.layout, needs)

    held: dict[str, str] = {}
    notes: dict[str, str] = {}
    kinds: dict[str, tuple[str, ...]] = {}
    sizes: dict[str, int] = {}
    slacks: dict[str, float] = {}
    is_cheap, change_s = inputs.tariff.next_change_s(inputs.now_s)
    until = f"waits for cheap hours, which begin in {(change_s - inputs.now_s) / 3600:.1f} h"
    for job in (*inputs.jobs, *inputs.settled):
        if job.spec.share_device or not (found := offers(job.spec.needs)):
            continue
        if job.spec.deadline_s is not None:
            plan = deadline_plan(inputs, job, found)
            if plan.short_s > 0:
                notes[job.id] = _late(plan)
                continue
            if plan.is_unknown and not job.devices:
                notes[job.id] = "its run time isn't known yet, so it goes first for its deadline; --estimate gives it"
            if not plan.options:
                held[job.id] = until
                continue
            kinds[job.id] = tuple(dict.fromkeys(option.kind for option in plan.options))
            if job.spec.needs.min_devices < job.spec.needs.max_devices:
                sizes[job.id] = max(plan.options[0].num_devices, kept_devices(inputs, job))
            if plan.must_lead:
                slacks[job.id] = plan.slack_s
        elif job.spec.priority < 0:
            if not is_cheap and _waits_for_cheap_hours(inputs, job, found):
                held[job.id] = until
                continue
            found = sorted(found, key=lambda offer: (offer.cheap_price if is_cheap else offer.price) / offer.speed)
            kinds[job.id] = tuple(offer.kind for offer in found)
    usual = default(replace(inputs, jobs=[job for job in inputs.jobs if job.id not in held]))
    order = sorted(usual.order, key=lambda job: (-job.spec.priority, job.id not in slacks, slacks.get(job.id, 0.0)))
    return PolicyDecision(
        order=[*order, *(job for job in inputs.jobs if job.id in held)],
        preempts=True,
        sizes={**spread_rest(inputs, order, sizes), **sizes} if sizes else usual.sizes,
        held=held,
        kinds=kinds,
        leading=frozenset(slacks),
        deadline_notes=notes,
    )


def _waits_for_cheap_hours(inputs: PolicyInput, job: Job, offers: list[KindOffer]) -> bool:
    saves = any(offer.cheap_price < offer.price for offer in offers)
    return saves and bool(inputs.tariff.spans) and job.waited_until(inputs.now_s) < inputs.settings.cheap_wait_s


def _late(plan: DeadlinePlan) -> str:
    best = plan.options[0]
    return (
        f"its deadline can't be met: on {best.num_devices} × {best.kind}, its fastest choice, it would end "
        f"{plan.short_s / 60:.0f} min late; it runs at best effort"
    )
