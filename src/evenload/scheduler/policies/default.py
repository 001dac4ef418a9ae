"""``default``: by class, then the least remaining work and the least use first; ageing prevents starvation.

Jobs are sorted by ``work · use^fairness / (1 + waited / ageing_s)``: `work` in device-seconds as in ``srpt``; `use` the
owner's relative use (`shares.relative_use`); `waited` the time in which the job could have run but had no devices. After
waiting `ageing_s` a job counts as if half of its work were left, after three times that a quarter (highest response ratio
next: Brinch Hansen 1971). Elastic jobs get their minimum in this order; the other devices go where they speed up most.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from evenload.scheduler.core.policy import PolicyDecision, PolicyInput
from evenload.scheduler.policies.elastic import spread_rest
from evenload.scheduler.policies.shares import relative_use
from evenload.scheduler.policies.srpt import work


def default(inputs: PolicyInput) -> PolicyDecision:
    settings = inputs.settings
    uses = relative_use(inputs) if settings.fairness > 0 else {}
    factors = {name: use**settings.fairness for name, use in uses.items()}
    jobs, scores = inputs.jobs, scores_of(inputs, factors)
    classes: defaultdict[int, list[int]] = defaultdict(list)
    for index, job in enumerate(jobs):
        classes[job.spec.priority].append(index)
    order = []
    for priority in sorted(classes, reverse=True):  # equals stay as they are: running jobs first, then by submission
        order += [jobs[index] for index in sorted(classes[priority], key=scores.__getitem__)]
    sizes = spread_rest(inputs, order)
    return PolicyDecision(order=order, preempts=True, sizes=sizes)


def scores_of(inputs: PolicyInput, factors: Mapping[str, float]) -> list[float]:
    """Return what each job of the input is sorted by, least first; `factors`: user → factor, empty for none."""
    now_s, ageing_s = inputs.now_s, inputs.settings.ageing_s
    scores = [work(inputs, job) / (1.0 + job.waited_until(now_s) / ageing_s) for job in inputs.jobs]
    if factors:
        scores = [score * factors[job.spec.user] for job, score in zip(inputs.jobs, scores, strict=True)]
    return _in_turn(inputs, scores) if inputs.oldest else scores


def _in_turn(inputs: PolicyInput, scores: list[float]) -> list[float]:
    """Keep unknown jobs of a script behind the one that ran most, also if they waited longer: so they don't take turns."""
    first: dict[str, tuple[float, int]] = {}
    unknown = [
        (index, job)
        for index, job in enumerate(inputs.jobs)
        if job.spec.run_key in inputs.oldest and job.spec.estimate_s is None and job.total is None
    ]
    for index, job in unknown:
        first[job.spec.run_key] = max(first.get(job.spec.run_key, (-1.0, 0)), (job.service_until(inputs.now_s), -index))
    for index, job in unknown:
        leader = -first[job.spec.run_key][1]
        if index != leader:
            scores[index] = max(scores[index], math.nextafter(scores[leader], math.inf))
    return scores
