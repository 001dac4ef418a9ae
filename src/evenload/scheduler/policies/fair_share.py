"""``fair_share``: the user with the least use for their share goes next; older use counts less."""

from __future__ import annotations

import heapq

from evenload.scheduler.core.policy import PolicyDecision, PolicyInput
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Job, User
from evenload.scheduler.policies.shares import use

_QUANTUM_S = 3600.0
"""A job put into the order counts as if it had run for so long: so users take turns instead of one taking all."""


def fair_share(inputs: PolicyInput) -> PolicyDecision:
    """Fill progressively: take the next job of the user with the least use over share, again and again.

    Each user's own jobs are sorted running ones first, then by submission. A running job counts only half, so that
    users who are equal don't take devices from each other in turns.
    """
    order: list[Job] = []
    for priority in sorted({job.spec.priority for job in inputs.jobs}, reverse=True):
        order += _fill(inputs, [job for job in inputs.jobs if job.spec.priority == priority])
    return PolicyDecision(order=order, preempts=True)


def _fill(inputs: PolicyInput, jobs: list[Job]) -> list[Job]:
    queues: dict[str, list[Job]] = {}
    for job in sorted(
        jobs, key=lambda j: (j.state is not JobState.RUNNING, j.submitted_s), reverse=True
    ):  # the next is at the end
        queues.setdefault(job.spec.user, []).append(job)
    shares = {name: inputs.users.get(name, User(name)).limits.share for name in queues}
    used = {name: use(inputs, name) for name in queues}

    def key(name: str) -> tuple[float, float, str]:
        job = queues[name][-1]
        head_start = 0.5 if job.state is JobState.RUNNING else 0.0
        cost = _QUANTUM_S * job.spec.needs.min_devices / shares[name]
        return used[name] - head_start * cost, job.submitted_s, name

    heap = [key(name) for name in queues]
    heapq.heapify(heap)
    order = []
    while heap:
        name = heap[0][2]
        job = queues[name].pop()
        order.append(job)
        used[name] += _QUANTUM_S * (len(job.devices) or job.spec.needs.min_devices) / shares[name]
        if queues[name]:
            heapq.heapreplace(heap, key(name))
        else:
            heapq.heappop(heap)
    return order
