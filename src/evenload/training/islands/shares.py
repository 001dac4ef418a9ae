"""Divide the global batch, or the batches of a round, over islands: by measured speed, as over ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean

from evenload.balance.decision import Decision, Observation
from evenload.balance.rebalance import Balancer
from evenload.balance.split import scale_shares
from evenload.errors import DataError

NUM_BLOCKS = 8
"""Most means of step times that an island reports at a time: each is an observation of the balancer."""
FIRST_GAP = 4
"""Steps of a run until islands exchange times; the first has unusual times, and the balancer looks at three."""
_LAST_GAP = 32
_MOST_COST = 0.005
"""Part of the time that exchanges of times may take in the long run; four times as much while shares move."""


class IslandShares:
    """Proportions of the islands; equal on all ranks, and only rank 0 decides.

    A share counts samples of a global batch, or batches of a round where islands take unequal numbers of steps.
    """

    def __init__(self, total: int, proportions: Sequence[int], *, decides: bool) -> None:
        """`decides`: this rank measures and decides; `balance` was not set otherwise, and there are several islands."""
        self.total = total
        self.shares = at_least_one(scale_shares(proportions, total))
        # The first step of a session, whose times are not usual, is not reported.
        self._balancer = Balancer(total, len(self.shares), shares=self.shares, num_warmup=0) if decides else None
        self._num_seen = 0

    def cut(self, size: int) -> list[int]:
        """Return where each island's part of `size` begins, and `size`; DataError if some island would have none."""
        if size < len(self.shares):
            raise DataError(
                f"a step of {size} samples cannot be divided over {len(self.shares)} islands, each of which needs one: set "
                "DataLoader(drop_last=True), or a larger batch_size"
            )
        shares = self.shares if size == self.total else at_least_one(scale_shares(self.shares, size))
        return list(itertools.accumulate(shares, initial=0))

    def observe(self, blocks: Sequence[Sequence[float]]) -> Decision | None:
        """Take the seconds that each island needed for its share, in several blocks; return new shares where they pay."""
        decision: Decision | None = None
        for seconds in zip(*blocks, strict=True):
            if self._balancer is not None and all(time_s > 0 for time_s in seconds):
                self._num_seen += 1
                decision = (
                    self._balancer.observe(Observation(self._num_seen, self.shares, 1, tuple(seconds))) or decision
                )
        return decision

    def set(self, shares: Sequence[int]) -> None:
        """Take decided shares; an island without any would be left behind."""
        self.shares = at_least_one(shares)


class ReportTimes:
    """When islands exchange times between two synchronisations: often at first and after a move, rarely in long rounds.

    Rank 0 decides the steps until the next exchange, which travel with its shares.
    """

    def __init__(self) -> None:
        self.gap = FIRST_GAP
        self.latency_s = 0.0
        """Seconds of the newest exchange in which no rank waited for another; an exchange of times and its answer take two."""
        self._at: int | None = None
        self._num_exchanges = 0

    def set(self, done: int, gap: int) -> None:
        self.gap, self._at = gap, done + gap

    def is_due(self, done: int) -> bool:
        """Return whether times are exchanged after so many steps of the run; never before `set`."""
        return self._at is not None and done >= self._at

    def next_gap(self, step_s: float, *, has_moved: bool) -> int:
        """Return the steps until the next exchange; `step_s` is what a step of this rank takes, 0 if unknown."""
        self._num_exchanges += 1
        if has_moved:
            return max(2 * FIRST_GAP, self._cheap(step_s) // 4)
        # Three steps are too few where their times scatter.
        return FIRST_GAP if self._num_exchanges == 1 else min(2 * self.gap, max(_LAST_GAP, self._cheap(step_s)))

    def _cheap(self, step_s: float) -> int:
        return math.ceil(2 * self.latency_s / _MOST_COST / step_s) if step_s > 0 else _LAST_GAP


def at_least_one(shares: Sequence[int]) -> tuple[int, ...]:
    """Return the shares with those of 0 raised to 1, from the largest; their sum is at least their number."""
    found = list(shares)
    for index, share in enumerate(found):
        if not share:
            found[found.index(max(found))] -= 1
            found[index] = 1
    return tuple(found)


def blocks_of(seconds: Sequence[float]) -> list[float]:
    """Return `NUM_BLOCKS` means of consecutive steps; of fewer steps each, and zeros."""
    count = min(len(seconds), NUM_BLOCKS)
    edges = [index * len(seconds) // max(count, 1) for index in range(count + 1)]
    return [fmean(seconds[low:high]) for low, high in itertools.pairwise(edges)] + [0.0] * (NUM_BLOCKS - count)
