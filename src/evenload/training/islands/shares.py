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
PIECES = 8
"""Of a sample or a batch that are divided among islands; more than one where a whole one is a large part of a share."""
FEW = 64
"""Samples or batches for each island from which on a whole one is a small part."""
LEAD = 2
"""Steps from the rows of a report to what follows from them; see reports.py."""
FIRST_GAP = 4
"""Steps of a run until islands send their times; the first has unusual times, and the balancer looks at three."""
_LAST_GAP = 32
_MOST_COST = 0.005
"""Part of the time that exchanges of times may take in the long run; four times as much while shares move."""


class IslandShares:
    """Proportions of the islands; equal on all ranks, and only rank 0 decides.

    A share counts samples of a global batch, or batches of a round where islands take unequal numbers of steps; or pieces of
    which `pieces` make one of them. Then an island's part changes by one from step to step, so that its mean is the share.
    """

    def __init__(self, size: int, proportions: Sequence[int], *, decides: bool, pieces: int = 1) -> None:
        """`decides`: this rank measures and decides; `balance` was not set otherwise, and there are several islands."""
        self.total = total = size * pieces
        self.pieces = pieces
        self.shares = self._fit(proportions)
        # The first step of a session, whose times are not usual, is not reported.
        self._balancer = Balancer(total, len(self.shares), shares=self.shares, num_warmup=0) if decides else None
        self._num_seen = 0

    def cut(self, size: int, before: int | None = None) -> list[int]:
        """Return where each island's part of `size` begins, and `size`; DataError if some island would have none.

        `before` counts samples or batches since the run began: what an island was given too little of its share so far, it
        is given now. None: as near as it can be at once.
        """
        if size < len(self.shares):
            raise DataError(
                f"a step of {size} samples cannot be divided over {len(self.shares)} islands, each of which needs one: set "
                "DataLoader(drop_last=True), or a larger batch_size"
            )
        if before is None:
            shares = scale_shares(self.shares, size)
        else:
            ends = itertools.accumulate(self.shares, initial=0)
            edges = [end * (before + size) // self.total - end * before // self.total for end in ends]
            shares = tuple(high - low for low, high in itertools.pairwise(edges))
        return list(itertools.accumulate(at_least_one(shares), initial=0))

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
        self.shares = self._fit(shares)

    def _fit(self, shares: Sequence[int]) -> tuple[int, ...]:
        return at_least_one(scale_shares(shares, self.total), self.pieces)

    @property
    def means(self) -> tuple[float, ...]:
        """The mean part of each island in samples, or in batches of a round."""
        return tuple(share / self.pieces for share in self.shares)


class ReportTimes:
    """When islands exchange times between two synchronisations: often at first and after a move, rarely in long rounds.

    Rank 0 decides the steps until the next exchange, which travel with its shares.
    """

    def __init__(self) -> None:
        self.gap = FIRST_GAP
        self.cost_s = math.inf
        """The least that a report has made this rank wait."""
        self._num_exchanges = 0

    def next_gap(self, step_s: float, *, has_moved: bool) -> int:
        """Return the steps until the next exchange; `step_s` is what a step of this rank takes, 0 if unknown."""
        self._num_exchanges += 1
        if has_moved:
            return max(2 * FIRST_GAP, self._cheap(step_s) // 4)
        # Three steps are too few where their times scatter.
        return FIRST_GAP if self._num_exchanges == 1 else min(2 * self.gap, max(_LAST_GAP, self._cheap(step_s)))

    def _cheap(self, step_s: float) -> int:
        is_known = step_s > 0 and self.cost_s < math.inf
        return math.ceil(self.cost_s / _MOST_COST / step_s) if is_known else _LAST_GAP


def at_least_one(shares: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """Return the shares with those below `least` raised to it, from the largest; their sum suffices for that."""
    found = list(shares)
    for index, share in enumerate(found):
        for _ in range(least - share):
            found[found.index(max(found))] -= 1
            found[index] += 1
    return tuple(found)


def blocks_of(seconds: Sequence[float]) -> list[float]:
    """Return `NUM_BLOCKS` means of consecutive steps; of fewer steps each, and zeros."""
    count = min(len(seconds), NUM_BLOCKS)
    edges = [index * len(seconds) // max(count, 1) for index in range(count + 1)]
    return [fmean(seconds[low:high]) for low, high in itertools.pairwise(edges)] + [0.0] * (NUM_BLOCKS - count)
