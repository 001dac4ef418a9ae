"""Results of a measurement with alternating arms: timed blocks, the estimates made from them, and their table.

Each arm has one block per round, and the rounds are the units of the bootstrap. Drift of the machine (clock frequency,
other load) affects all arms of a round alike, so ratios are far more certain than speeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

SOLO, EVEN, EVENLOAD = "solo", "even", "evenload"
"""``even``: equal shares. ``evenload``: the planned shares. ``solo``: each rank computes whole global batches alone.
``static:24,8`` is a further arm with fixed shares."""
STATIC = "static:"
_RESAMPLES = 4000
_TITLES = {EVEN: "equal shares", EVENLOAD: "Evenload"}


@dataclass(frozen=True)
class TimedBlock:
    """One block of one arm: samples and seconds of each rank in ``solo``, of all ranks together in other arms."""

    arm: str
    round: int
    num_samples: tuple[int, ...]
    seconds: tuple[float, ...]
    shares: tuple[int, ...] = ()
    """Of a full step; empty in ``solo``."""

    @property
    def per_s(self) -> tuple[float, ...]:
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
class MeasurementResult:
    """The estimates of a measurement; speeds are samples/s."""

    num_rounds: int
    speeds: Mapping[str, Estimate]
    """By arm, without ``solo``."""
    shares: Mapping[str, tuple[int, ...]]
    solo: tuple[Estimate, ...]
    """By rank; empty without a ``solo`` arm."""
    solo_sum: Estimate | None
    of_sum: Mapping[str, Estimate]
    """Speed of each arm over the sum of the solo speeds; empty without a ``solo`` arm."""
    over_even: Estimate | None
    over_best_alone: Estimate | None
    best_static: str | None
    """The fixed split with the highest median speed."""
    over_best_static: Estimate | None
    """In each round, over the fixed split with the highest median speed in the other rounds: the highest of several medians is
    high by chance, too, and a split that other rounds chose is not. With fewer than three rounds, over ``best_static``."""

    @property
    def efficiency(self) -> Estimate | None:
        """Speed of Evenload over the sum of the solo speeds."""
        return self.of_sum.get(EVENLOAD)


Round = Mapping[str, TimedBlock]
"""The blocks of one round by arm."""


def bootstrap(values: Sequence[float], seed: int = 0) -> Estimate:
    """Estimate the median of the rounds' values, with its percentile interval over rounds drawn with replacement."""
    rng = random.Random(seed)
    drawn = sorted(median(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return Estimate(median(values), drawn[round(0.025 * (_RESAMPLES - 1))], drawn[round(0.975 * (_RESAMPLES - 1))])


def evaluate(blocks: Sequence[TimedBlock]) -> MeasurementResult:
    """Estimate speeds (medians over rounds) and ratios (medians of the ratios within a round)."""
    by_round: dict[int, dict[str, TimedBlock]] = {}
    for block in blocks:
        by_round.setdefault(block.round, {})[block.arm] = block
    names = list(dict.fromkeys(block.arm for block in blocks))
    rounds = [found for _, found in sorted(by_round.items()) if len(found) == len(names)]

    def ratio(above: Callable[[Round], float], below: Callable[[Round], float]) -> Estimate:
        return bootstrap([above(found) / below(found) for found in rounds])

    def speed(arm: str) -> Callable[[Round], float]:
        return lambda found: sum(found[arm].per_s)

    def of(arm: str, rank: int) -> Estimate:
        return bootstrap([found[arm].per_s[rank] for found in rounds])

    speeds = {arm: of(arm, 0) for arm in names if arm != SOLO}
    num_ranks = len(rounds[0][SOLO].num_samples) if SOLO in names else 0
    solo = tuple(of(SOLO, rank) for rank in range(num_ranks))
    best = max(range(num_ranks), key=lambda rank: solo[rank].value, default=None)
    splits = [arm for arm in names if arm.startswith(STATIC)]
    static = max(splits, key=lambda arm: speeds[arm].value, default=None)
    has = EVENLOAD in names

    def best_elsewhere(index: int) -> str:
        others = [found for number, found in enumerate(rounds) if number != index] if len(rounds) > 2 else rounds
        return max(splits, key=lambda arm: median(speed(arm)(found) for found in others))

    over_static = [
        speed(EVENLOAD)(found) / speed(best_elsewhere(index))(found)
        for index, found in enumerate(rounds)
        if has and static
    ]
    return MeasurementResult(
        num_rounds=len(rounds),
        speeds=speeds,
        shares={arm: rounds[-1][arm].shares for arm in speeds},
        solo=solo,
        solo_sum=bootstrap([speed(SOLO)(found) for found in rounds]) if solo else None,
        of_sum={arm: ratio(speed(arm), speed(SOLO)) for arm in speeds} if solo else {},
        over_even=ratio(speed(EVENLOAD), speed(EVEN)) if has and EVEN in names else None,
        over_best_alone=(
            ratio(speed(EVENLOAD), lambda found: found[SOLO].per_s[best]) if has and best is not None else None
        ),
        best_static=static,
        over_best_static=bootstrap(over_static) if over_static else None,
    )


def blocks_to_rows(blocks: Sequence[TimedBlock]) -> list[dict[str, Any]]:
    return [asdict(block) for block in blocks]


def blocks_from_rows(rows: Sequence[Mapping[str, Any]]) -> list[TimedBlock]:
    return [
        TimedBlock(row["arm"], row["round"], tuple(row["num_samples"]), tuple(row["seconds"]), tuple(row["shares"]))
        for row in rows
    ]


def format_measurement(found: MeasurementResult, devices: Sequence[str] = (), throttle: Sequence[float] = ()) -> str:
    """``throttle`` holds the requested relative speed of each rank; empty if no rank is throttled."""
    total = found.solo_sum
    rows = [
        (
            f"rank {rank} alone" + (f", {devices[rank]}" if rank < len(devices) else ""),
            "",
            speed,
            speed.value / total.value if total is not None else None,
        )
        for rank, speed in enumerate(found.solo)
    ]
    if total is not None:
        rows.append(("sum of these", "", total, 1.0))
    for arm, speed in found.speeds.items():
        title = _TITLES.get(arm, "fixed shares" if arm.startswith(STATIC) else arm)
        part = found.of_sum[arm].value if arm in found.of_sum else None
        rows.append((title, " + ".join(map(str, found.shares[arm])), speed, part))
    width = max(len(title) for title, *_ in rows)
    shares_width = max(len("shares"), *(len(shares) for _, shares, *_ in rows))
    lines = [f"{'':{width}}  {'shares':>{shares_width}}  samples/s" + ("  of the sum" if total is not None else "")]
    for title, shares, speed, part in rows:
        end = f"  {part * 100:8.1f} %" if part is not None else ""
        lines.append(f"{title:{width}}  {shares:>{shares_width}}  {speed.value:9.4g}{end}")
    best_static = (found.best_static or "").removeprefix(STATIC)
    for what, ratio in (
        ("Evenload over equal shares", found.over_even),
        ("Evenload over the best device alone", found.over_best_alone),
        (f"Evenload over the best fixed split ({best_static})", found.over_best_static),
    ):
        if ratio is not None:
            lines.append(f"{what}: {ratio.value:.3g} times ({ratio.low:.3g} to {ratio.high:.3g})")
    if (ratio := found.efficiency) is not None:
        low, high = ratio.low * 100, ratio.high * 100
        lines.append(f"efficiency, Evenload over the sum: {ratio.value * 100:.1f} % ({low:.1f} to {high:.1f})")
    if len(throttle) == len(found.solo) > 1 and any(factor != 1 for factor in throttle):
        requested = ":".join(f"{factor / throttle[0]:.4g}" for factor in throttle)
        delivered = ":".join(f"{speed.value / found.solo[0].value:.3f}" for speed in found.solo)
        lines.append(f"throttle: requested speeds {requested}, delivered {delivered}")
    return "\n".join(lines)
