"""``fair_share``: the user with the least use for their share goes next; older use counts less."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping

from evenload.scheduler.core.policy import PolicyDecision, PolicyInput
from evenload.scheduler.core.states import RUNNING
from evenload.scheduler.core.values import Job, User
from evenload.scheduler.policies.default import scores_of
from evenload.scheduler.policies.elastic import spread_rest
from evenload.scheduler.policies.shares import use

_QUANTUM_S = 3600.0
"""A job put into the order counts as if it had run for so long: so users take turns instead of one taking all."""


def fair_share(inputs: PolicyInput) -> PolicyDecision:
    """Fill progressively: take the next job of the user with the least use over share, again and again.

    Each user's own jobs are sorted as by ``default``, and elastic ones get their sizes as there. As many jobs of
    a user as run count only half, so that users who are equal don't take devices from each other in turns.
    """
    scores = {job.id: score for job, score in zip(inputs.jobs, scores_of(inputs, {}), strict=True)}
    order: list[Job] = []
    for priority in sorted({job.spec.priority for job in inputs.jobs}, reverse=True):
        order += _fill(inputs, [job for job in inputs.jobs if job.spec.priority == priority], scores)
    return PolicyDecision(order=order, preempts=True, sizes=spread_rest(inputs, order))


def _fill(inputs: PolicyInput, jobs: list[Job], scores: Mapping[str, float]) -> list[Job]:
    queues: dict[str, list[Job]] = {}
    jobs = sorted(jobs, key=lambda j: (scores[j.id], j.state is not RUNNING, j.submitted_s))
    for job in reversed(jobs):  # the next is at the end
        queues.setdefault(job.spec.user, []).append(job)
    shares = {name: inputs.users.get(name, User(name)).limits.share for name in queues}
    used = {name: use(inputs, name) for name in queues}
    num_running = Counter(job.spec.user for job in jobs if job.state is RUNNING)

    def key(name: str) -> tuple[float, float, str]:
        job = queues[name][-1]
        head_start = 0.5 if num_running[name] > 0 else 0.0
        cost = _QUANTUM_S * job.spec.needs.min_devices / shares[name]
        return used[name] - head_start * cost, job.submitted_s, name

    heap = [key(name) for name in queues]
    heapq.heapify(heap)
    order = []
    while heap:
        name = heap[0][2]
        job = queues[name].pop()
        order.append(job)
        num_running[name] -= 1
        used[name] += _QUANTUM_S * (len(job.devices) or job.spec.needs.min_devices) / shares[name]
        if queues[name]:
            heapq.heapreplace(heap, key(name))
        else:
            heapq.heappop(heap)
    return order
