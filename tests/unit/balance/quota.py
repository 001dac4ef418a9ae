"""Ranks under a CPU quota, as the kernel applies it: a rank computes at full speed until its period's quota is used up, then
stands until the next period. Pure and seeded, like simulate.py.

A step of each rank: forward and backward, wait for the slowest, the exchange of gradients (which uses the quota too but is no
own time), the optimizer. Own seconds are those of forward, backward and optimizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean

from evenload.balance.decision import Decision, Observation
from evenload.balance.rebalance import Balancer


@dataclass(frozen=True)
class QuotaRank:
    """CPU seconds of a rank at full speed, and the part of them it gets."""

    per_sample_s: float
    fixed_s: float = 0.0
    """Of each step: the optimizer, and what forward and backward cost whatever the share."""
    exchange_s: float = 0.0
    quota: float = 1.0
    period_s: float = 0.01
    noise: float = 0.01


class _Budget:
    """What a rank has left of its period."""

    def __init__(self, rank: QuotaRank, offset_s: float) -> None:
        self._rank, self._offset_s = rank, offset_s
        self._period, self._left_s = -1, 0.0

    def run(self, begin_s: float, cpu_s: float) -> float:
        """Compute from `begin_s` on; return the end."""
        rank = self._rank
        if rank.quota >= 1:
            return begin_s + cpu_s
        now_s = begin_s
        while True:
            period = int((now_s - self._offset_s) // rank.period_s)
            if period != self._period:
                self._period, self._left_s = period, rank.quota * rank.period_s
            if cpu_s <= self._left_s:
                self._left_s -= cpu_s
                return now_s + cpu_s
            cpu_s -= self._left_s
            self._left_s = 0.0
            now_s = self._offset_s + (period + 1) * rank.period_s + 1e-12


@dataclass
class QuotaTrace:
    step_s: list[float] = field(default_factory=list)
    own_s: list[tuple[float, ...]] = field(default_factory=list)
    shares: list[tuple[int, ...]] = field(default_factory=list)
    decisions: list[tuple[int, Decision]] = field(default_factory=list)

    def mean_s(self, begin: int, end: int | None = None) -> float:
        return mean(self.step_s[begin:end])


Slow = Callable[[int, int], float]
"""(step, rank) -> factor on the CPU seconds."""


def run_quota(
    ranks: Sequence[QuotaRank],
    num_steps: int,
    seed: int,
    *,
    balancer: Balancer | None = None,
    shares: tuple[int, ...] | None = None,
    slow: Slow = lambda step, rank: 1.0,
    delay: int = 2,
) -> QuotaTrace:
    """Run steps with a balancer, or with fixed shares; a decision on the observation of step s holds from s + delay on."""
    rng = random.Random(seed)
    budgets = [_Budget(rank, rng.uniform(0, rank.period_s)) for rank in ranks]
    shares = balancer.shares if balancer is not None else shares
    assert shares is not None
    trace, told = QuotaTrace(), [(0, shares)]
    free_s = [0.0] * len(ranks)
    reduced_s = 0.0
    for step in range(num_steps):
        while told and told[0][0] <= step:
            shares = told.pop(0)[1]
        factors = [max(0.3, rng.gauss(1, rank.noise)) * slow(step, r) for r, rank in enumerate(ranks)]
        ends = [
            budget.run(begin_s, factor * (0.5 * rank.fixed_s + rank.per_sample_s * max(1, share)))
            for budget, begin_s, factor, rank, share in zip(budgets, free_s, factors, ranks, shares, strict=True)
        ]
        slowest_s = max(ends)
        own = [end - begin_s for end, begin_s in zip(ends, free_s, strict=True)]
        ended_s = max(budget.run(slowest_s, rank.exchange_s) for budget, rank in zip(budgets, ranks, strict=True))
        free_s = [
            budget.run(ended_s, factor * 0.5 * rank.fixed_s)
            for budget, factor, rank in zip(budgets, factors, ranks, strict=True)
        ]
        seconds = tuple(before + free - ended_s for before, free in zip(own, free_s, strict=True))
        trace.step_s.append(ended_s - reduced_s)
        trace.own_s.append(seconds)
        trace.shares.append(shares)
        reduced_s = ended_s
        if balancer is not None:
            decision = balancer.observe(Observation(step, shares, 1, seconds, trace.step_s[-1], left_out=step == 0))
            if decision is not None:
                trace.decisions.append((step, decision))
                told.append((step + delay, decision.shares))
    return trace


def best_fixed(ranks: Sequence[QuotaRank], candidates: Sequence[tuple[int, ...]], num_steps: int, seed: int) -> float:
    """Return the mean seconds of a step under the best of these fixed shares."""
    return min(run_quota(ranks, num_steps, seed, shares=shares).mean_s(5) for shares in candidates)
