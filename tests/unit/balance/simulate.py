"""A job without a job: ranks of given costs, noise and events, and a `Balancer` that sees what a real run would show.

Pure and seeded. `benchmarks/` uses it too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from evenload.balance.decision import Decision, Observation
from evenload.balance.rebalance import Balancer
from evenload.balance.split import split_batch
from evenload.balance.values import Cost

Disturb = Callable[[random.Random, int, int], float]
"""(generator, step, rank) -> the factor on that rank's seconds in that step."""


@dataclass
class Trace:
    """What happened, step by step."""

    expected_s: list[float] = field(default_factory=list)
    """The step without noise under the shares it ran with."""
    optimum_s: list[float] = field(default_factory=list)
    """The step without noise under the best shares for the costs of that step."""
    shares: list[tuple[int, ...]] = field(default_factory=list)
    decisions: list[tuple[int, Decision]] = field(default_factory=list)

    def excess(self, step: int) -> float:
        return self.expected_s[step] / self.optimum_s[step] - 1


def run_trace(
    costs: list[Cost],
    num_samples: int,
    num_steps: int,
    seed: int,
    *,
    disturb: Disturb = lambda rng, step, rank: 1.0,
    slow: Callable[[int, int], float] = lambda step, rank: 1.0,
    delay: int = 3,
    caps: list[int | None] | None = None,
    balancer: Balancer | None = None,
) -> Trace:
    """Runs `num_steps` steps; a decision taken on the observation of step s holds from step s + delay on."""
    rng = random.Random(seed)
    balancer = balancer or Balancer(num_samples, len(costs), caps)
    shares, num_micro = balancer.shares, balancer.num_micro
    coming: list[tuple[int, tuple[int, ...], int]] = []
    trace = Trace()
    for step in range(num_steps):
        while coming and coming[0][0] <= step:
            _, shares, num_micro = coming.pop(0)
        now = [
            Cost(cost.per_micro_s * slow(step, rank), cost.per_sample_s * slow(step, rank))
            for rank, cost in enumerate(costs)
        ]
        plain = [cost.predict_s(share, num_micro) for cost, share in zip(now, shares, strict=True)]
        trace.expected_s.append(max(plain))
        trace.optimum_s.append(split_batch(num_samples, now, caps).expected_s)
        trace.shares.append(shares)
        seconds = tuple(time_s * disturb(rng, step, rank) for rank, time_s in enumerate(plain))
        decision = balancer.observe(Observation(step, shares, num_micro, seconds))
        if decision:
            trace.decisions.append((step, decision))
            coming.append((step + delay, decision.shares, decision.num_micro))
    return trace


def scatter(sigma: float) -> Disturb:
    """Gaussian noise of this relative size."""
    return lambda rng, step, rank: max(0.5, rng.gauss(1.0, sigma))


def uniform(width: float) -> Disturb:
    """Every time anywhere within +- width."""
    return lambda rng, step, rank: 1 + rng.uniform(-width, width)


def spikes(num_ranks: int, chance: float = 0.1, sigma: float = 0.02) -> Disturb:
    """In each step, with this chance, one rank takes two to four times as long."""
    hit: dict[int, int] = {}

    def disturb(rng: random.Random, step: int, rank: int) -> float:
        if step not in hit:
            hit[step] = rng.randrange(num_ranks) if rng.random() < chance else -1
        return max(0.5, rng.gauss(1.0, sigma)) * (rng.uniform(2, 4) if hit[step] == rank else 1.0)

    return disturb


@dataclass(frozen=True)
class Scenario:
    """One seeded trace of a 3x change of one rank."""

    costs: list[Cost]
    num_samples: int
    rank: int
    factor: float
    at: int
    sigma: float

    def slow(self, step: int, rank: int) -> float:
        if self.factor < 1:  # a recovery: slow from the start, then back
            return 1 / self.factor if rank == self.rank and step < self.at else 1.0
        return self.factor if rank == self.rank and step >= self.at else 1.0

    def run(self, seed: int, num_steps: int | None = None) -> Trace:
        return run_trace(
            self.costs, self.num_samples, num_steps or self.at + 30, seed, disturb=scatter(self.sigma), slow=self.slow
        )


def scenario(seed: int) -> Scenario:
    """2 to 4 ranks of speeds up to 1 : 4, up to 30 % fixed cost, noise of 3 to 5 %, slow-downs and recoveries."""
    rng = random.Random(10_000 + seed)
    world_size = rng.choice((2, 2, 3, 4))
    num_samples = rng.choice((32, 64, 128, 256, 512))
    fixed = rng.uniform(0.0, 0.3)
    costs = []
    for _ in range(world_size):
        step_s = rng.choice((1.0, 1.0, 2.0, 4.0)) * rng.uniform(0.02, 0.5)
        costs.append(Cost(fixed * step_s, (1 - fixed) * step_s * world_size / num_samples))
    return Scenario(
        costs,
        num_samples,
        rng.randrange(world_size),
        rng.choice((3.0, 1 / 3.0)),
        rng.randint(25, 90),
        rng.uniform(0.03, 0.05),
    )
