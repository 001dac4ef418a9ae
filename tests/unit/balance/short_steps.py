"""Short steps of two or four equal ranks, whose seconds scatter in the ways of real ones. Pure and seeded.

Own seconds are a part that is the samples' and a fixed one, times or plus what disturbs them; the whole step takes as long as
the slowest rank, and an exchange.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from evenload.balance.decision import Decision, Observation
from evenload.balance.rebalance import Balancer

LEAD = 2


@dataclass
class Moment:
    """One step of one rank: its usual seconds, and when it begins."""

    usual_s: float
    rank: int
    step: int
    now_s: float
    world_size: int
    delay_s: float = 0.0
    """Of the seconds that it really needs, those in which other programs have the core; noise may set it."""


Noise = Callable[[random.Random, Moment], float]
"""Returns the seconds that the rank really needs."""


def _lognormal(sigma: float) -> Noise:
    return lambda rng, at: at.usual_s * math.exp(rng.gauss(0, sigma))


def _pareto(shape: float) -> Noise:
    return lambda rng, at: at.usual_s * (0.7 + 0.1 * min(rng.paretovariate(shape), 1000))


def _stalls(chance: float, stall_s: float) -> Noise:
    return lambda rng, at: at.usual_s * rng.gauss(1, 0.05) + (stall_s * rng.random() if rng.random() < chance else 0.0)


def _bursts(every_s: float, lasting_s: float, factor: float) -> Noise:
    """Something else runs on one core for a while."""

    def noise(rng: random.Random, at: Moment) -> float:
        period = int(at.now_s / every_s)
        burst = random.Random(period * 7919)
        begin_s, rank = burst.uniform(0, every_s - lasting_s), burst.randrange(at.world_size)
        hit = rank == at.rank and begin_s <= at.now_s - period * every_s < begin_s + lasting_s
        return at.usual_s * rng.gauss(1, 0.1) * (factor if hit else 1.0)

    return noise


def _warm_up(num_steps: int, factor: float) -> Noise:
    def noise(rng: random.Random, at: Moment) -> float:
        extra = (factor - 1) * math.exp(-at.step / num_steps) if at.rank == 1 else 0.0
        return at.usual_s * rng.gauss(1, 0.1) * (1 + extra)

    return noise


def _fixed_extra(extra_s: float) -> Noise:
    """Rank 0 has more to do in each step, whatever its share: it logs."""

    def noise(rng: random.Random, at: Moment) -> float:
        base_s = at.usual_s
        return base_s * rng.gauss(1, 0.1) + (extra_s if at.rank == 0 else 0.0)

    return noise


def _busy_machine(every_s: float, most_s: float) -> Noise:
    """Other programs have a slice of the core in each step, longer ones on one core and then on another."""

    def noise(rng: random.Random, at: Moment) -> float:
        level_s = random.Random(int(at.now_s / every_s) * 31 + at.rank).uniform(0.5 * most_s, most_s)
        at.delay_s = level_s * rng.uniform(0.9, 1.1)
        return at.usual_s * rng.gauss(1, 0.1) + at.delay_s

    return noise


def _quantized(tick_s: float) -> Noise:
    return lambda rng, at: max(tick_s, round(at.usual_s * rng.gauss(1, 0.2) / tick_s) * tick_s)


def _bimodal(chance: float, factor: float) -> Noise:
    return lambda rng, at: at.usual_s * rng.gauss(1, 0.05) * (factor if rng.random() < chance else 1.0)


def _alternating(factor: float) -> Noise:
    return lambda rng, at: at.usual_s * rng.gauss(1, 0.1) * (factor if (at.step + at.rank) % 2 else 1.0)


def _wandering(sigma: float, every_s: float) -> Noise:
    """Each rank's speed is another one from time to time."""

    def noise(rng: random.Random, at: Moment) -> float:
        level = random.Random(int(at.now_s / every_s) * 31 + at.rank).gauss(0, sigma)
        return at.usual_s * rng.gauss(1, 0.1) * math.exp(level)

    return noise


def _shared_core(width: float) -> Noise:
    """One rank gets as much more as the other lacks."""

    def noise(rng: random.Random, at: Moment) -> float:
        part = random.Random(at.step).uniform(-width, width)
        return at.usual_s * (1 + (part if at.rank % 2 else -part))

    return noise


def _collections(every: int, stall_s: float) -> Noise:
    return lambda rng, at: at.usual_s * rng.gauss(1, 0.1) + (stall_s if (at.step + 17 * at.rank) % every == 0 else 0.0)


KINDS: dict[str, tuple[float, float, Noise]] = {
    # name: own seconds at equal shares, fixed part of them, noise
    "0.05 ms": (5e-5, 0.8, _lognormal(0.3)),
    "0.1 ms, stalls": (1e-4, 0.8, _stalls(0.01, 0.004)),
    "0.1 ms, heavy tail": (1e-4, 0.9, _pareto(1.1)),
    "0.2 ms, heavy tail": (2e-4, 0.5, _pareto(1.5)),
    "0.3 ms, a rank warms up": (3e-4, 0.8, _warm_up(60, 5.0)),
    "0.3 ms, wide": (3e-4, 0.0, _lognormal(1.0)),
    "0.4 ms, rank 0 logs": (4e-4, 0.8, _fixed_extra(1e-4)),
    "0.6 ms, all fixed": (6e-4, 1.0, _lognormal(0.3)),
    "0.6 ms, bursts": (6e-4, 0.5, _bursts(1.0, 0.1, 3.0)),
    "0.8 ms, rank 0 logs": (8e-4, 0.5, _fixed_extra(1e-4)),
    "1 ms, ticks of 0.5 ms": (1e-3, 0.3, _quantized(5e-4)),
    "1 ms, heavy tail": (1e-3, 0.3, _pareto(1.3)),
    "1 ms, a core shared": (1e-3, 0.0, _shared_core(0.9)),
    "1 ms, collections": (1e-3, 0.3, _collections(50, 0.005)),
    "2 ms, a busy machine": (2e-3, 0.3, _busy_machine(4.0, 0.05)),
    "2 ms, two modes": (2e-3, 0.3, _bimodal(0.2, 2.0)),
    "2 ms, in turns": (2e-3, 0.0, _alternating(2.0)),
    "2 ms, stalls": (2e-3, 0.3, _stalls(0.1, 0.02)),
    "3 ms, other programs": (3e-3, 0.2, _bursts(3.0, 0.4, 2.0)),
    "3 ms, wandering": (3e-3, 0.2, _wandering(0.15, 0.2)),
    "5 ms, heavy tail": (5e-3, 0.2, _pareto(1.3)),
    "5 ms, wandering": (5e-3, 0.1, _wandering(0.15, 0.1)),
    "5 ms, other programs": (5e-3, 0.2, _bursts(2.0, 0.2, 3.0)),
}


@dataclass
class ShortTrace:
    shares: list[tuple[int, ...]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def farthest(self) -> float:
        """The largest distance of a share from equal, as a part of it."""
        equal = sum(self.shares[0]) / len(self.shares[0])
        return max(abs(share / equal - 1) for shares in self.shares for share in shares)


def run_kind(name: str, seed: int, world_size: int = 2, num_samples: int = 64, seconds: float = 6.0) -> ShortTrace:
    """Run a kind of step for so many simulated seconds, at most 2,500 steps."""
    usual_s, fixed, noise = KINDS[name]
    rng, balancer, trace = random.Random(f"{name} {seed}"), Balancer(num_samples, world_size), ShortTrace()
    shares, coming, now_s, step = balancer.shares, [], rng.uniform(0, 100), 0
    end_s = now_s + seconds
    while now_s < end_s and step < 2500:
        while coming and coming[0][0] <= step:
            shares = coming.pop(0)[1]
        own, alone = [], []
        for rank, share in enumerate(shares):
            part = fixed + (1 - fixed) * max(share, 1) * world_size / num_samples
            moment = Moment(part * usual_s, rank, step, now_s, world_size)
            own.append(max(1e-6, noise(rng, moment)))
            alone.append(own[-1] - moment.delay_s)
        delay_s = max(0.0, max(own) - max(alone))
        whole_s = max(own) + 3e-4 * math.exp(rng.gauss(0, 0.5))
        now_s += whole_s
        trace.shares.append(shares)
        seen = Observation(step, shares, 1, tuple(own), whole_s, left_out=step == 0, delay_s=delay_s)
        decision = balancer.observe(seen)
        if decision is not None:
            trace.decisions.append(decision)
            coming.append((step + LEAD, decision.shares))
        if (note := balancer.take_note()) is not None:
            trace.notes.append(note)
        step += 1
    return trace
