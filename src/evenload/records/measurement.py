"""What alternating windows measured: blocks of arms, and the estimates that are made of them.

In one round each arm has one block. The rounds are the units of the bootstrap: everything that drifts (the clock of a
processor, a neighbour on the machine) touches the arms of one round alike, so ratios are far surer than speeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

SOLO, EVEN, EVENLOAD = "solo", "even", "evenload"
"""``even`` gives equal shares, ``evenload`` the shares that were ruled; in ``solo`` each rank does whole global batches
alone. ``static:24,8`` is a further arm of fixed shares."""
STATIC = "static:"
_RESAMPLES = 4000


@dataclass(frozen=True)
class Block:
    """One block of one arm: the samples and seconds of each rank in ``solo``, of all ranks together in other arms."""

    arm: str
    round: int
    num_samples: tuple[int, ...]
    seconds: tuple[float, ...]
    shares: tuple[int, ...] = ()
    """Of a usual step; empty in ``solo``."""

    @property
    def per_s(self) -> tuple[float, ...]:
        """Samples/s."""
        return tuple(count / time_s for count, time_s in zip(self.num_samples, self.seconds, strict=True))


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % bootstrap interval over rounds."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval, relative to the value."""
        return (self.high - self.low) / 2 / self.value if self.value else float("inf")


@dataclass(frozen=True)
class Arms:
    """The result of a measurement; speeds are samples/s."""

    num_rounds: int
    speeds: Mapping[str, Estimate]
    """By arm, without ``solo``."""
    shares: Mapping[str, tuple[int, ...]]
    solo: tuple[Estimate, ...]
    """By rank; empty where it was not measured."""
    solo_sum: Estimate | None
    of_sum: Mapping[str, Estimate]
    """Each arm's speed over the sum of the solo speeds; empty where those were not measured."""
    over_even: Estimate | None
    over_best_alone: Estimate | None
    best_static: str | None
    """The fixed split with the highest median."""
    over_best_static: Estimate | None

    @property
    def efficiency(self) -> Estimate | None:
        """Evenload's part of the sum of the solo speeds."""
        return self.of_sum.get(EVENLOAD)


Rounds = Sequence[Mapping[str, Block]]


def bootstrap(statistic: Callable[[Rounds], float], rounds: Rounds, seed: int = 0) -> Estimate:
    """A statistic of all rounds, with the percentile interval of it over rounds drawn with replacement."""
    rng = random.Random(seed)
    count = len(rounds)
    drawn = sorted(statistic([rounds[rng.randrange(count)] for _ in range(count)]) for _ in range(_RESAMPLES))
    return Estimate(statistic(rounds), drawn[round(0.025 * (_RESAMPLES - 1))], drawn[round(0.975 * (_RESAMPLES - 1))])


def evaluate(blocks: Sequence[Block]) -> Arms:
    """Estimates speeds (medians over rounds) and ratios (medians of the ratios inside a round)."""
    by_round: dict[int, dict[str, Block]] = {}
    for block in blocks:
        by_round.setdefault(block.round, {})[block.arm] = block
    names = list(dict.fromkeys(block.arm for block in blocks))
    rounds = [found for _, found in sorted(by_round.items()) if len(found) == len(names)]

    def ratio(above: Callable[[Mapping[str, Block]], float], below: Callable[[Mapping[str, Block]], float]) -> Estimate:
        return bootstrap(lambda drawn: median(above(found) / below(found) for found in drawn), rounds)

    def speed(arm: str) -> Callable[[Mapping[str, Block]], float]:
        return lambda found: sum(found[arm].per_s)

    def of(arm: str, rank: int) -> Estimate:
        return bootstrap(lambda drawn: median(found[arm].per_s[rank] for found in drawn), rounds)

    speeds = {arm: of(arm, 0) for arm in names if arm != SOLO}
    num_ranks = len(rounds[0][SOLO].num_samples) if SOLO in names else 0
    solo = tuple(of(SOLO, rank) for rank in range(num_ranks))
    best = max(range(num_ranks), key=lambda rank: solo[rank].value, default=None)
    static = max((arm for arm in names if arm.startswith(STATIC)), key=lambda arm: speeds[arm].value, default=None)
    has = EVENLOAD in names
    return Arms(
        num_rounds=len(rounds),
        speeds=speeds,
        shares={arm: rounds[-1][arm].shares for arm in speeds},
        solo=solo,
        solo_sum=bootstrap(lambda drawn: median(map(speed(SOLO), drawn)), rounds) if solo else None,
        of_sum={arm: ratio(speed(arm), speed(SOLO)) for arm in speeds} if solo else {},
        over_even=ratio(speed(EVENLOAD), speed(EVEN)) if has and EVEN in names else None,
        over_best_alone=(
            ratio(speed(EVENLOAD), lambda found: found[SOLO].per_s[best]) if has and best is not None else None
        ),
        best_static=static,
        over_best_static=ratio(speed(EVENLOAD), speed(static)) if has and static else None,
    )


def as_rows(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Blocks as plain values, for an event."""
    return [
        {
            "arm": block.arm,
            "round": block.round,
            "num_samples": list(block.num_samples),
            "seconds": list(block.seconds),
            "shares": list(block.shares),
        }
        for block in blocks
    ]


def read_rows(rows: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Reads what `as_rows` gave."""
    return [
        Block(row["arm"], row["round"], tuple(row["num_samples"]), tuple(row["seconds"]), tuple(row["shares"]))
        for row in rows
    ]
